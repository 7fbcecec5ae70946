"""Record digests of rope tables: tests/data/rope_tables.json, the same on every machine.

    python tools/record_rope_tables.py

The file changes only with the tables, and then answers may change: the CHANGELOG must say so.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.families.rope import rope_from_config
from ridgeline.model.files.rope_tables import cos_and_sin, rope_tables
from ridgeline.model.shape.model import Rope

PATH = Path(__file__).resolve().parent.parent / "tests" / "data" / "rope_tables.json"
HEAD_DIM, MAX_MODEL_LEN = 128, 4096
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + pair / 64 for pair in range(48)],
    "long_factor": [1 + pair for pair in range(48)],
}
# What config.json files of published models say.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-2": {"rope_theta": 10000.0, "max_position_embeddings": 4096},
    "smollm2": {"rope_theta": 100000, "max_position_embeddings": 8192},
    "llama-3": {
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "rope_scaling": _LLAMA3,
    },
    "qwen2.5-1m": {"rope_theta": 10000000.0, "max_position_embeddings": 1010000},
    "qwen3-yarn": {"rope_theta": 1000000, "max_position_embeddings": 40960, "rope_scaling": _YARN},
    "phi-3-128k": {
        "rope_theta": 10000.0,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rope_scaling": _LONGROPE,
    },
}


def rope_of(name: str) -> Rope:
    """Return the rotary embedding of one of ``CONFIGS``."""
    return rope_from_config(ConfigReader(CONFIGS[name], name), HEAD_DIM)[0]


def digests() -> dict[str, str]:
    """Return digests of the tables, and of what they are before they are rounded to float32."""
    digest_of = {name: _digest(*rope_tables(rope_of(name), MAX_MODEL_LEN)) for name in CONFIGS}
    angles = np.arange(1 << 18)[:, None] * np.array([1.0, 0.7310585786300049, 5.0])
    return digest_of | {"float64": _digest(*cos_and_sin(angles))}


def _digest(*arrays: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def main() -> None:
    """Write the file."""
    PATH.write_text(json.dumps(digests(), indent=1) + "\n")


if __name__ == "__main__":
    main()
