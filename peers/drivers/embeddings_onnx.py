"""ONNX Runtime on an encoder: exported, fused, quantised by its own tools, then timed.

    python -m peers.drivers.embeddings_onnx MODEL f32|int8 OUT IDS THREADS ROUNDS

MODEL is a directory in Hugging Face's layout, OUT where the exported model is kept, IDS a JSON file
with a list of texts as token ids of one length. The last line on standard output is JSON: seconds
of each round, and the vectors, mean-pooled and of length 1. Runs in ONNX Runtime's environment.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def export(model: str, kind: str, out: Path) -> Path:
    """Return the model in ONNX's format, made unless it is there: fused, then in 8 bits."""
    target = out / f"{kind}.onnx"
    if target.exists():
        return target
    import torch
    from onnxruntime.quantization import (  # type: ignore[import-not-found]
        QuantType,
        quantize_dynamic,
    )
    from onnxruntime.transformers import optimizer  # type: ignore[import-not-found]
    from transformers import BertModel  # type: ignore[import-not-found]

    out.mkdir(parents=True, exist_ok=True)
    bert = BertModel.from_pretrained(model, attn_implementation="eager").eval()

    class States(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, ids: Any, mask: Any, types: Any) -> Any:
            return self.bert(
                input_ids=ids, attention_mask=mask, token_type_ids=types
            ).last_hidden_state

    raw, sizes = out / "raw.onnx", {0: "texts", 1: "tokens"}
    example = torch.ones((2, 8), dtype=torch.int64)
    torch.onnx.export(
        States().eval(),
        (example,) * 3,
        str(raw),
        input_names=list(INPUTS),
        output_names=["states"],
        dynamic_axes=dict.fromkeys((*INPUTS, "states"), sizes),
        dynamo=False,
    )
    config = bert.config
    fused = optimizer.optimize_model(
        str(raw),
        model_type="bert",
        num_heads=config.num_attention_heads,
        hidden_size=config.hidden_size,
    )
    fused.save_model_to_file(str(out / "f32.onnx"))
    if kind == "int8":
        quantize_dynamic(
            str(out / "f32.onnx"),
            str(target),
            per_channel=True,
            weight_type=QuantType.QInt8,
            extra_options={"DefaultTensorType": 1},  # float, where fused nodes say nothing
        )
    return target


def main(model: str, kind: str, out: str, ids: str, threads: str, rounds: str) -> None:
    """Time some rounds over all texts at once, after one that does not count."""
    import onnxruntime  # type: ignore[import-not-found]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(threads)
    path = export(model, kind, Path(out))
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    texts = np.array(json.loads(Path(ids).read_text()), np.int64)
    known = {one.name for one in session.get_inputs()}
    values = (texts, np.ones_like(texts), np.zeros_like(texts))
    feed = {name: array for name, array in zip(INPUTS, values, strict=True) if name in known}
    seconds, vectors = [], np.zeros(0)
    for _ in range(1 + int(rounds)):
        begin_s = time.perf_counter()
        states = session.run(None, feed)[0]
        vectors = states.mean(axis=1)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        seconds.append(time.perf_counter() - begin_s)
    result = {"seconds": seconds[1:], "vectors": vectors.tolist()}
    print(json.dumps(result | {"version": onnxruntime.__version__}))


if __name__ == "__main__":
    main(*sys.argv[1:])
