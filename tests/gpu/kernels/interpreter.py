"""For tests on kernels in Triton's interpreter: import it first, and take its marks.

The interpreter of Triton 3.6 multiplies bfloat16 as integers, so float16 and float32 stand for it.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch", reason="the cuda backend needs torch: make test-gpu")
pytest.importorskip("triton", reason="the kernels need Triton: make test-gpu")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted with TRITON_INTERPRET=1", allow_module_level=True)

# It computes rows that nobody has too, and turns arrays of one number into numbers.
MARKS = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
