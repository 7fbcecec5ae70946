"""A head of which little is read: the tokens are those of the whole one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Step
from tests.backends.runners import ALL, GREEDY, TOKENS, WIDE, Make, make, step, work
from tests.tiny import checkpoint, random_arrays

__all__ = ["make"]  # a fixture
NOT_FINITE = "logits are not finite"
MANY = replace(WIDE, vocab_size=3000)


def streams(count: int, params: SamplingParams) -> Step:
    return step(
        *(work(TOKENS[i : 3 * i + 1], (2 * i, 2 * i + 1), params=params) for i in range(count))
    )


def near_ties() -> NDArray[np.float32]:
    """Outputs that differ from each other by less than 4 bits can say, in tiles far apart."""
    rng = np.random.default_rng(3)
    like = random_arrays(WIDE)["head"][rng.integers(0, 4, 3000)]
    return like * np.where(rng.random(like.shape) < 0.02, 1.01, 1).astype(np.float32)


@pytest.mark.parametrize("head", ["random", "near ties", "much in common"])
def test_the_token_after_pruning_is_the_exact_one(make: Make, head: str) -> None:
    arrays = random_arrays(MANY)
    if head != "random":
        arrays["head"] = near_ties()
    if head == "much in common":
        arrays["head"] += np.random.default_rng(4).normal(0, 3, 96).astype(np.float32)
    for threads in (1, 2, 3):
        runner = make(checkpoint(MANY, arrays), threads=threads)
        assert runner.weights.proxy is not None
        for count in range(1, 8):  # the last are too many
            quick = runner.execute(streams(count, GREEDY))
            exact = runner.execute(streams(count, ALL))
            assert quick.tokens == exact.tokens
            assert not quick.errors
            assert not quick.logprobs


def test_a_proxy_as_wrong_as_it_can_be(make: Make) -> None:
    """The likeliest output is lost by rounding along x, in favour of one whose proxy is exact."""
    runner = make(checkpoint(MANY, random_arrays(MANY)))
    runner.execute(streams(1, GREEDY))
    act_scales = runner._buffers.scratch["head_act_scales"][0].view(np.float32).reshape(-1, 6)
    x = runner._buffers.scratch["head_x"][0].view(np.int8) * np.repeat(
        act_scales[:, :2].ravel(), 16
    )
    levels = np.random.default_rng(1).integers(-14, 15, x.shape).astype(float)
    levels += 0.4 * np.sign(x)  # of the 32 that the proxy has, nearly the next one
    others = 15 * np.sign(x)
    for level in (levels, others):
        level.reshape(-1, 32)[:, 0] = -16
    head = np.zeros((3000, 96), np.float32)
    head[2000] = levels / 16
    head[1000] = others * (levels @ x - 0.05 * np.abs(x).sum()) / (16 * (others @ x))
    tricky = make(checkpoint(MANY, random_arrays(MANY) | {"head": head}))
    assert tricky.execute(streams(1, GREEDY)).tokens == ((2000,),)


@pytest.mark.parametrize(("head", "wanted"), [("random", 1), ("near ties", 0)])
def test_pruning_rests_where_it_spares_nothing(make: Make, head: str, wanted: int) -> None:
    arrays = random_arrays(MANY) | ({"head": near_ties()} if head == "near ties" else {})
    runner = make(checkpoint(MANY, arrays), threads=2)
    runner._adaptive_threads.size = 1  # whose counters lie elsewhere
    for _ in range(10):
        runner.execute(streams(2, GREEDY))
    assert runner._buffers.get("prunes") == wanted


def test_what_cannot_be_the_likeliest_is_not_read(make: Make) -> None:
    """Without a number where nobody looks, the token stays; who wants logits gets the error."""
    runner = make(checkpoint(MANY, random_arrays(MANY)), threads=2)
    one, with_logits = streams(1, GREEDY), streams(1, ALL)
    wanted = runner.execute(one).tokens
    logits = runner.prompt_logits(TOKENS[:1])[0]
    scales = runner.weights.head.data[:, :, 1024:].view(np.float16)
    unlikely = np.array(
        [i for i in range(93) if logits[32 * i : 32 * i + 32].max() < 0.5 * logits.max()]
    )
    assert len(unlikely) > 20
    scales[unlikely] = np.nan
    output = runner.execute(one)
    assert (output.tokens, output.errors) == (wanted, {})
    assert "not finite" in runner.execute(with_logits).errors[0]


@pytest.mark.parametrize("count", [1, 2])
def test_with_masks_the_pruned_head_gives_what_the_whole_one_does(make: Make, count: int) -> None:
    runner = make(checkpoint(MANY, random_arrays(MANY)), threads=2)
    plain = streams(count, GREEDY)
    likeliest = [token for (token,) in runner.execute(plain).tokens]
    assert runner._buffers.get("prunes")

    def ranked(top: int, masks: list[tuple[bytes, ...]]) -> list[list[int]]:
        work = [
            item._replace(seeds=(), top=top, masks=mask)
            for item, mask in zip(plain.work, masks, strict=True)
        ]
        found = runner.execute(plain._replace(work=tuple(work))).top
        return [[token for token, _ in found[i]] for i in range(count)]

    orders = ranked(3000, [()] * count)
    assert [order[0] for order in orders] == likeliest
    rng = np.random.default_rng(8)
    for share in (0.999, 0.5, 0.1, 0.002):
        bits = rng.random((count, 3000)) < share
        bits[:, 7] = True  # never none
        masks = [(np.packbits(row, bitorder="little").tobytes(),) for row in bits]
        work = [item._replace(masks=mask) for item, mask in zip(plain.work, masks, strict=True)]
        left = [
            [token for token in order if row[token]]
            for order, row in zip(orders, bits, strict=True)
        ]
        drawn = runner.execute(plain._replace(work=tuple(work))).tokens
        assert [token for (token,) in drawn] == [order[0] for order in left]
        assert ranked(5, masks) == [order[:5] for order in left]


@pytest.mark.parametrize("factor", [1e-24, 1e18, 1e25, np.nan])
def test_a_row_too_short_or_long_for_bounds_gets_all_its_logits(make: Make, factor: float) -> None:
    runner = make(checkpoint(MANY, random_arrays(MANY)))
    exact = runner.execute(streams(2, ALL)).tokens
    runner.weights.final_norm[:] *= np.float32(factor)
    runner.weights.distances[:] = 0  # what pruning would believe in
    runner.weights.proxy.data[:] = 0  # type: ignore[union-attr]
    output = runner.execute(streams(2, GREEDY))
    if np.isnan(factor):
        assert [output.errors[i] for i in (0, 1)] == [NOT_FINITE] * 2
    else:
        assert output.tokens == exact
