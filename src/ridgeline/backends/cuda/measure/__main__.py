"""One part of ``ridgeline bench gpu``: findings are lines of JSON on standard output."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from ridgeline.backends.cuda import device as devices

_NO_DEVICE = 3  # status, with a line that says why


def main() -> None:
    """Run the part that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part")
    parser.add_argument("--seconds", type=float, required=True, help="when no more cases begin")
    parser.add_argument("--tiny", action="store_true", help="small shapes, by twins on the CPU")
    args = parser.parse_args()
    if args.tiny:
        os.environ[devices.TWINS] = "1"
    try:
        devices.check()
    except ValueError as missing:
        print(missing)
        sys.exit(_NO_DEVICE)
    from ridgeline.backends.cuda.measure.part import Part

    of_part = importlib.import_module(f"ridgeline.backends.cuda.measure.parts.{args.part}")
    of_part.measure(Part(args.part, args.seconds))


if __name__ == "__main__":
    main()
