"""One part of ``ridgeline bench gpu``: findings are lines of JSON on standard output."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys

from ridgeline.backends.cuda import device as devices
from ridgeline.system.machine import DeviceLost

_NO_DEVICE, _LOST = 3, 5  # exit statuses: no device, with a line that says why; the device was lost


def main() -> None:
    """Run the part that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part")
    parser.add_argument("--seconds", type=float, required=True, help="when no more cases begin")
    parser.add_argument("--tiny", action="store_true", help="small shapes, by twins on the CPU")
    parser.add_argument("--skip", type=json.loads, default=(), help="cases that are known: JSON")
    parser.add_argument("--worker", type=int, default=0, help="which of --workers this one is")
    parser.add_argument("--workers", type=int, default=1, help="that share a part's cases")
    args = parser.parse_args()
    try:
        devices.check(on_cpu=args.tiny)
    except ValueError as missing:
        print(missing)
        sys.exit(_NO_DEVICE)
    from ridgeline.backends.cuda.measure.part import Part

    of_part = importlib.import_module(f"ridgeline.backends.cuda.measure.parts.{args.part}")
    try:
        given = args.part, args.seconds, args.skip, args.worker, args.workers
        of_part.measure(Part(*given, is_tiny=args.tiny))
    except DeviceLost:  # said already
        sys.stdout.flush()
        os._exit(_LOST)  # freeing what is on the device would fail, or wait


if __name__ == "__main__":
    main()
