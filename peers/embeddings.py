"""How fast are vectors of texts? Ridgeline and ONNX Runtime on the same encoder, in turn.

    python -m peers.embeddings MODEL [--texts 64] [--tokens 128] [--rounds 5] [--repeats 3]

MODEL is the directory of a BERT in Hugging Face's layout, such as all-MiniLM-L6-v2. All texts have
the same number of random tokens, so that nobody computes padding. ONNX Runtime's model is fused by
its own optimiser and quantised by its own tool (dynamic, per channel). One process at a time, the
engines in turn. Printed is a markdown table of texts per second (medians) with the least cosine to
the f32 vectors of ONNX Runtime; the last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers.engines import (
    HOME,
    ROOT,
    Engine,
    Format,
    LeftOut,
    environment,
    install,
    last_line,
    log_path,
)
from ridgeline.engine.outputs import cosine
from ridgeline.system.machine import usable_cpus

PEER = Engine(
    "onnxruntime",
    "embeddings_onnx",
    (Format("f32"), Format("int8")),
    ("onnxruntime==1.31.1", "onnx==1.23.2", "onnxscript", "sympy", "torch", "transformers"),
)
OURS = ("auto", "int8", "int8-row", "bf16")
_FIRST_ID = 1000  # below are control tokens


def _measured(command: list[str], log: str) -> dict[str, Any]:
    """Return the JSON of a process's last line. Raises LeftOut if it failed."""
    path = log_path(log)
    with path.open("w") as errors:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=errors,
            check=False, text=True,
        )  # fmt: skip
    if done.returncode:
        raise LeftOut(f"{log}: {last_line(path)}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def commands(model: Path, ids: Path, threads: int, rounds: int) -> dict[str, list[str]]:
    """Return the command of each row of the table."""
    last = [str(ids), str(threads), str(rounds)]
    kept = str(HOME / "models" / f"{model.resolve().name}-onnx")
    command_of = {}
    for form in PEER.formats:
        name = f"{PEER.name} {form.name}"
        driver = ["-m", f"peers.drivers.{PEER.driver}", str(model.resolve()), form.name, kept]
        command_of[name] = [str(PEER.python), *driver, *last]
    for dtype in OURS:
        driver = ["-m", "peers.drivers.embeddings_ours", str(model.resolve()), dtype]
        command_of[f"ridgeline {dtype}"] = [sys.executable, *driver, *last]
    return command_of


def table(rows: dict[str, dict[str, Any]], num_texts: int) -> tuple[str, dict[str, Any]]:
    """Return the table in markdown, and its values; the first row has the vectors to compare with.

    ``rows`` has the seconds and the vectors of each.
    """
    wanted = next(iter(rows.values()))["vectors"]
    values: dict[str, Any] = {}
    lines = ["| engine | texts/s | least cosine to f32 |", "|---|---:|---:|"]
    for name, row in rows.items():
        speed = num_texts / statistics.median(row["seconds"])
        least_cosine = min(cosine(*pair) for pair in zip(row["vectors"], wanted, strict=True))
        values[name] = {"texts_per_s": speed, "least_cosine": least_cosine}
        lines.append(f"| {name} | {speed:.1f} | {least_cosine:.5f} |")
    return "\n".join(lines), values


def main() -> None:
    """Install, alternate, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", type=Path)
    for name, default in (("texts", 64), ("tokens", 128), ("rounds", 5), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    install(PEER)
    vocabulary = json.loads((asked.model / "config.json").read_text())["vocab_size"]
    dice = random.Random(1)
    texts = [
        [dice.randrange(_FIRST_ID, vocabulary) for _ in range(asked.tokens)]
        for _ in range(asked.texts)
    ]
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        ids = Path(folder) / "ids.json"
        ids.write_text(json.dumps(texts))
        ways = commands(asked.model, ids, usable_cpus(), asked.rounds)
        for repeat in range(asked.repeats):
            for name, command in ways.items():
                print(f"{repeat + 1} of {asked.repeats}: {name}", file=sys.stderr)
                result = _measured(command, f"embeddings-{name}")
                row = rows.setdefault(name, result | {"seconds": []})
                row["seconds"] += result["seconds"]
    shown, values = table(rows, asked.texts)
    print(shown)
    print(json.dumps({"texts": asked.texts, "tokens": asked.tokens, "rows": values}))


if __name__ == "__main__":
    main()
