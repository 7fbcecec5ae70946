"""A model that was trained to fill in the middle does it, over HTTP."""

from __future__ import annotations

import pytest

from tests.real_models import real_model
from tests.serve.serving import serving

pytestmark = pytest.mark.engine
CODER = "qwen2.5-coder:0.5b"
LOOP = (
    "def largest(numbers):\n    best = numbers[0]\n    for number in numbers:\n"
    "        if number > best:\n            best = "
)


@pytest.mark.full
def test_qwen_completes_the_middle_of_functions() -> None:
    options = {"max_model_len": 512, "kv_cache_memory": "64MiB", "threads": 2}
    with serving(real_model(CODER), options) as served:
        for prefix, suffix, middle in (
            ("def is_even(n):\n    return n ", " == 0\n", "% 2"),
            (LOOP, "\n    return best\n", "number"),
            ("for i in ", "(10):\n    print(i)\n", "range"),
            ("def area(width, height):\n    ", "\n\n\nprint(area(2, 3))  # 6\n",
             "return width * height"),
        ):  # fmt: skip
            texts = {"input_prefix": prefix, "input_suffix": suffix}
            line = texts | {"n_predict": 16, "temperature": 0, "stop": ["\n"]}
            status, answer, _ = served.call("/infill", line)
            assert (status, answer["stop_type"]) == (200, "word")
            assert answer["content"].startswith(middle), answer["content"]
        # Nothing but the other file has this name.
        files = [{"filename": "shapes.py", "text": "def weighted_octagon(x):\n    return x\n"}]
        other = {"input_prefix": "import shapes\n\nprint(", "input_suffix": "(3))\n"}
        other |= {"input_extra": files, "n_predict": 16, "temperature": 0}
        answer = served.call("/infill", other)[1]
        assert answer["content"].startswith("shapes.weighted_octagon")
