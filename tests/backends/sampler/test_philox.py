"""The generator against its published test vectors, and that its numbers are unrelated."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.backends.sampler.rule import uniform_bits
from tests.backends.sampler.test_rule import chi_square, limit, uniform


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    """Philox4x32-10 once more, in arrays of numpy (Salmon et al., SC 2011)."""
    x, k, low = np.array(counter, np.uint64), np.array(key, np.uint64), np.uint64(0xFFFFFFFF)
    for _ in range(10):
        product = x[[0, 2]] * np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
        high = product >> np.uint64(32)
        x = np.array([high[1] ^ x[1] ^ k[0], product[1] & low, high[0] ^ x[3] ^ k[1], product[0]])
        x, k = x & low, (k + np.array([0x9E3779B9, 0xBB67AE85], np.uint64)) & low
    return [int(word) for word in x]


@pytest.mark.parametrize(
    ("counter", "key", "published"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_second_statement_has_the_published_values(
    counter: str, key: str, published: str
) -> None:
    words = [tuple(int(word, 16) for word in text.split()) for text in (counter, key, published)]
    assert philox(words[0], words[1]) == list(words[2])


def test_uniform_zero_is_the_published_value() -> None:
    assert uniform_bits(0, 0) == 0x6627E8D5 << 21 | 0xE169C58D >> 11


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 1))
@settings(deadline=None)
def test_uniform_is_the_generator_at_a_position(seed: int, position: int, stream: int) -> None:
    counter = (position % 2**32, position // 2**32, stream, 0)
    x0, x1, _, _ = philox(counter, (seed % 2**32, seed // 2**32))
    assert uniform_bits(seed, position, stream) == x0 * 2**21 + x1 // 2**11 < 2**53


@pytest.mark.parametrize("vary", ["seed", "position", "stream"])
def test_neighbouring_draws_are_unrelated(vary: str) -> None:
    places = {
        "seed": [(i, 5, 0) for i in range(6000)],
        "position": [(5, i, 0) for i in range(6000)],
        "stream": [(5, i // 2, i % 2) for i in range(6000)],
    }
    values = [uniform(*place) for place in places[vary]]
    cells = Counter(
        (int(a * 6), int(b * 6)) for a, b in zip(values[::2], values[1::2], strict=True)
    )
    assert chi_square(cells, {(a, b): 1 / 36 for a in range(6) for b in range(6)}) < limit(35)
