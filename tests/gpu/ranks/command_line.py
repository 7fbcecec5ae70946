"""``ridgeline`` on a machine without a GPU: ``--backend cuda`` computes on the CPU, in order."""

from __future__ import annotations

import pytest

from ridgeline.__main__ import main
from tests.gpu.on_cpu import ORDERED, compute_on_cpu

if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        compute_on_cpu(patch, ORDERED)
        main()
