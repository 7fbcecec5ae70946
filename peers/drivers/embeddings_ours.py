"""Ridgeline on an encoder, timed as ``peers.drivers.embeddings_onnx`` times the other.

python -m peers.drivers.embeddings_ours MODEL DTYPE IDS THREADS ROUNDS
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from ridgeline import LLM, __version__


def main(model: str, dtype: str, ids: str, threads: str, rounds: str) -> None:
    """Time some rounds over all texts at once, after one that does not count."""
    texts = json.loads(Path(ids).read_text())
    seconds, vectors = [], list[list[float]]()
    with LLM(model, dtype=dtype, threads=int(threads)) as llm:
        for _ in range(1 + int(rounds)):
            begin_s = time.perf_counter()
            outs = llm.embed(texts, progress=False)
            vectors = [out.outputs.embedding for out in outs]
            seconds.append(time.perf_counter() - begin_s)
    print(json.dumps({"seconds": seconds[1:], "vectors": vectors, "version": __version__}))


if __name__ == "__main__":
    main(*sys.argv[1:])
