"""What a hostile tokenizer costs: ``python -m tests.text.bombs TOKENIZER.JSON TEXT`` is one try.

In a process of its own, so that no other process of a tokenizer is measured with it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.text.tokenizers.tokenizer import load_tokenizer

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Cost:
    """How a tokenizer ended, and what its own process took: of a processor, and of memory."""

    error: str
    cpu_s: float
    peak_bytes: int


def cost_of(spec: dict[str, Any], text: str, folder: Path) -> Cost:
    """Load a tokenizer.json and encode a text; ``error`` is "" if both succeed."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(spec))
    command = [sys.executable, "-m", "tests.text.bombs", str(path), text]
    environment = os.environ | {"RUST_BACKTRACE": "1"}  # as somebody may have it
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=_ROOT, env=environment, check=True
    )
    assert done.stderr == ""
    error, cpu_s, peak_bytes = json.loads(done.stdout)
    return Cost(error, cpu_s, peak_bytes)


def _try(path: Path, text: str) -> str:
    """Return what is said; when this returns the tokenizer's process has ended."""
    try:
        load_tokenizer(path).encode(text)
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    said = _try(Path(sys.argv[1]), sys.argv[2])
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(json.dumps([said, usage.ru_utime + usage.ru_stime, peak_bytes]))
