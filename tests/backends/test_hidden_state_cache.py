"""Final states kept beside the KV cache: the same similarity in any batch, whole or in pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ridgeline.backends.hidden_state_cache import HiddenStateCache
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, Step, StepOutput, Work

HIDDEN = 24
BLOCK = 4
NOTHING: tuple[Any, ...] = ((), Sampling(SamplingParams(), 0, ()), (), ())  # is drawn
States_T = NDArray[np.float32]


def compare(
    states: HiddenStateCache,
    items: list[tuple[Work, States_T]],
    copies: tuple[tuple[int, int], ...] = (),
) -> dict[int, float]:
    """Run a step whose items have these final states; return what is compared."""
    step = Step(tuple(work for work, _ in items), copies, (), (), ())
    rows = np.concatenate([of_item for _, of_item in items])
    top = {i: ((0, 0.0),) for i, (work, _) in enumerate(items) if work.top}
    output = StepOutput(tokens=((),) * len(items), top=top)
    return dict(states.compare(step, output, lambda tokens: rows[tokens]).similarity)


def item(start: int, states: States_T, table: tuple[int, ...], top: int = 2) -> Work:
    return Work((0, 0), start, (1,) * len(states), table, *NOTHING, top=top, similar=True)


def text(seed: int, length: int = 11) -> States_T:
    return np.random.default_rng(seed).standard_normal((length, HIDDEN), np.float32)


def exact(of_text: States_T) -> float:
    unit = of_text.astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    return float((unit[:-1] @ unit[-1]).max())


def test_it_is_the_greatest_cosine_with_what_was_said_before() -> None:
    for seed in range(20):
        found = compare(
            HiddenStateCache(8, BLOCK, HIDDEN), [(item(0, text(seed), (5, 0, 3)), text(seed))]
        )[0]
        assert found == pytest.approx(exact(text(seed)), abs=1e-5)


def test_a_first_token_is_like_nothing() -> None:
    assert compare(
        HiddenStateCache(8, BLOCK, HIDDEN), [(item(0, text(0, 1), (5,)), text(0, 1))]
    ) == {0: 0.0}


def test_a_state_is_like_itself_whatever_its_length() -> None:
    told = text(3, 6)
    told[5] = told[1] * 1000
    assert compare(HiddenStateCache(8, BLOCK, HIDDEN), [(item(0, told, (5, 1)), told)])[
        0
    ] == pytest.approx(1, abs=1e-5)


def test_copies_of_a_step_are_made_once_for_all_its_parts() -> None:
    """A runner of stages gives them to the first part alone, whichever items that has."""
    told, other = text(7), text(8)
    told[10] = told[9]  # which it is like: that one is in the block that is copied
    (alone,) = compare(
        HiddenStateCache(8, BLOCK, HIDDEN), [(item(0, told, (0, 1, 2)), told)]
    ).values()
    states = HiddenStateCache(16, BLOCK, HIDDEN)
    compare(states, [(item(0, told[:-1], (9, 2, 12)), told[:-1])])
    plain = item(0, other, (1, 3, 4))._replace(similar=False)
    assert compare(states, [(plain, other)], copies=((12, 5),)) == {}
    found = compare(states, [(item(len(told) - 1, told[-1:], (9, 2, 5)), told[-1:])])
    assert found == {0: alone}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 11])
def test_the_same_in_pieces_and_beside_others(size: int) -> None:
    """Bit for bit: with any cut, table, neighbour and order."""
    told = text(7)
    (alone,) = compare(
        HiddenStateCache(8, BLOCK, HIDDEN), [(item(0, told, (0, 1, 2)), told)]
    ).values()
    states, table = HiddenStateCache(16, BLOCK, HIDDEN), (9, 2, 12)
    for start in range(0, len(told), size):
        piece, other = told[start : start + size], text(start)
        neighbours = [
            (item(0, other, (1, 3, 4)), other),
            (item(start, piece, table), piece),
            (item(0, other[::-1], (5, 6, 7)), other[::-1]),
        ]
        found = compare(states, neighbours)
    assert found[1] == alone


def test_a_fork_takes_its_copied_block_along() -> None:
    told, states = text(1, 6), HiddenStateCache(8, BLOCK, HIDDEN)
    compare(states, [(item(0, told, (0, 1)), told)])
    last = text(2, 1)
    forks = [(item(6, last, (0, block)), last) for block in (1, 2, 3)]
    found = compare(states, forks, copies=((1, 2), (1, 3)))
    wanted = exact(np.concatenate([told, last]))
    assert len(set(found.values())) == 1
    assert found[2] == pytest.approx(wanted, abs=1e-5)


def test_states_that_are_not_finite_are_like_nothing() -> None:
    told = text(1, 6)
    told[2], told[3, 4] = np.inf, np.nan
    (found,) = compare(HiddenStateCache(8, BLOCK, HIDDEN), [(item(0, told, (0, 1)), told)]).values()
    assert np.isfinite(found)


def test_where_nobody_asks_nothing_is_kept() -> None:
    def forbidden(tokens: range) -> States_T:
        raise AssertionError(tokens)

    work = Work((0, 0), 0, (1, 1), (0,), *NOTHING, top=2)
    output = StepOutput(tokens=((),), top={0: ((0, 0.0),)})
    step = Step((work,), (), (), (), ())
    assert HiddenStateCache(8, BLOCK, HIDDEN).compare(step, output, forbidden) is output
