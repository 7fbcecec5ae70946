"""Cases of every operation: each kernel beside its twin in float64, or to the bit.

``CASES`` has those of each operation by its name in ``twins``. ``EXACT`` are operations whose
results are equal to the bit, because they depend on no order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ridgeline.backends.cuda.measure.cases import attention, draws, layers, products
from ridgeline.backends.cuda.measure.part import Case, Part

CASES: Mapping[str, Callable[[Part], Iterator[Case]]] = {
    **attention.CASES, **layers.CASES, **products.CASES, **draws.CASES,
}  # fmt: skip
EXACT = {"copy_blocks", *draws.CASES}
