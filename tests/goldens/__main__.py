"""Write the goldens anew: ``python -m tests.goldens``. A release that needs this changes bits.

The models are files of the repository, so that no library's random numbers are part of it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.answers.tiny_families import write_family
from tests.serve.serving import serving
from tests.trust.receipts.requests import TEXT, receipt_of

HERE = Path(__file__).parent
FAMILIES = ("llama3", "gemma3", "qwen3-moe", "lfm2")  # dense, windows, experts, states
FORMATS: dict[str, dict[str, Any]] = {
    "default": {},
    "f32": {"dtype": "f32", "kv_cache_dtype": "f32"},
    "int8": {"dtype": "int8"},
}
_BASE = {"max_tokens": 20, "ignore_eos": True, "seed": 7}
REQUESTS: dict[str, dict[str, Any]] = {
    "drawn": _BASE | {"prompt": [[5, 9, 2, 7], [11] * 40], "n": 2, "top_p": 0.9},
    "greedy": _BASE | {"prompt": [3, 1, 4, 1, 5], "temperature": 0, "repetition_penalty": 1.2},
}


def main() -> None:
    """Write models that are missing, and all receipts."""
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "receipt.key"
        for family in FAMILIES:
            model = HERE / family / "model"
            if not model.exists():
                shutil.copytree(write_family(Path(folder) / family, family), model)
                weights = model / "model.safetensors"
                halves = {k: v.astype(np.float16) for k, v in load_file(weights).items()}
                save_file(halves, weights)
            for form, options in FORMATS.items():
                with serving(model, options | {"max_model_len": 128}, receipt_key=key) as served:
                    for name, body in REQUESTS.items():
                        receipt = receipt_of(served, TEXT, body) | {"signatures": []}
                        file = HERE / family / f"{form}-{name}.json"
                        file.write_text(json.dumps(receipt) + "\n")


if __name__ == "__main__":
    main()
