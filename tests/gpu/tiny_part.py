"""A part of ``ridgeline bench gpu``, in small whatever is asked for: there is no GPU."""

from __future__ import annotations

import sys

from ridgeline.backends.cuda.measure.__main__ import main

if __name__ == "__main__":
    sys.argv.append("--tiny")
    main()
