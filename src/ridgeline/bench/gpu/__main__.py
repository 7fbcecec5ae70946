"""``ridgeline bench gpu`` for a machine that has torch, Triton, NumPy and safetensors alone.

Run as ``PYTHONPATH=src python -m ridgeline.bench.gpu``: the command line needs more than these.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ridgeline.bench.gpu.main import SECONDS, bench_gpu, chosen_parts


def main() -> None:
    """Run what the same flags of the command line ask for."""
    parser = argparse.ArgumentParser(prog="python -m ridgeline.bench.gpu")
    parser.add_argument("--parts")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    try:
        is_right = bench_gpu(
            chosen_parts(args.parts), args.seconds, is_tiny=args.tiny, out=args.out
        )
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
