"""The CPU runner on tiny models of every structure: right, the same however work is split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ridgeline.backends.cpu.batch import Batch, arrange
from ridgeline.backends.cpu.runner import CpuRunner
from ridgeline.backends.reference.runner import ReferenceRunner
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, Step, StepOutput, Work
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.model.shape.model import Rope
from tests.kept_kernels import KERNELS
from tests.tiny import ARCHS, BY_LAYER, LATENT, PLAIN, changed, checkpoint, new_setup, random_arrays

MODELS = ARCHS | BY_LAYER | LATENT
NUM_BLOCKS, MAX_LEN, VOCAB = 24, 96, PLAIN.vocab_size
ALL = SamplingParams(temperature=0, logprobs=VOCAB)
PROMPT_TOO = SamplingParams(temperature=0, logprobs=VOCAB, prompt_logprobs=3)
NOT_FINITE = "logits are not finite"
PLAIN_GREEDY = SamplingParams(temperature=0)
TOKENS = tuple(int(token) for token in np.random.default_rng(5).integers(0, VOCAB, MAX_LEN))
# Weights, cache, and how far logits may be from the reference's, relative to their size: the root
# mean square over a text. Tiny models are a hard case; of real ones, see docs/results.md#accuracy.
FORMATS = {
    "f32": ("f32", "f32", 5e-6),
    "f32, f16 cache": ("f32", "f16", 0.003),
    "int8": ("auto", "int8", 0.12),
    "int8-int4 cache": ("auto", "int8-int4", 0.2),
    "int8-row": ("int8-row", "int8", 0.12),
    "bf16": ("bf16", "f16", 0.02),
    "int4": ("int4", "int8", 0.12),  # of the same weights after rounding to 4 bits
}

ROUNDED = ["all biases", "qk norm", "mixed windows", "partial rope", "long rope", "one kv head"]
ROUNDED += [
    "norms behind",
    "norms around",
    "beside",
    "beside, own",
    "two ropes",
    "learnt positions",
    "experts",
    "many experts",
    "sinks",
    "kinds",
    "shared keys and values",
    "keys and values of layer 0",
    "latent",
]

Make = Callable[..., CpuRunner]


@pytest.fixture(scope="module")
def make() -> Iterator[Make]:
    """Return a function that makes runners; they are closed in the end."""
    made: list[CpuRunner] = []

    def build(model: Checkpoint | str = "plain", kind: str = "int8", **options: Any) -> CpuRunner:
        dtype, cache_dtype, _ = FORMATS[kind]
        base = {
            "dtype": dtype,
            "kv_cache_dtype": cache_dtype,
            "num_blocks": NUM_BLOCKS,
            "block_size": 16,
            "max_model_len": MAX_LEN,
            "max_num_batched_tokens": 256,
            "threads": 1,
        }
        model = checkpoint(MODELS[model]) if isinstance(model, str) else model
        made.append(CpuRunner(model, new_setup(**base | options), kernel_cache=KERNELS))
        return made[-1]

    yield build
    for runner in made:
        runner.close()


def reference(model: Checkpoint) -> ReferenceRunner:
    return ReferenceRunner(model, new_setup(num_blocks=8, block_size=16, max_model_len=MAX_LEN))


def work(
    tokens: tuple[int, ...],
    table: tuple[int, ...],
    *,
    start: int = 0,
    end: int | None = None,
    params: SamplingParams = ALL,
    seeds: tuple[int, ...] = (7,),
) -> Work:
    """Compute ``tokens[start:end]`` of a sequence; sample where that reaches its last token."""
    end = len(tokens) if end is None else end
    targets = tokens[start + 1 : end + 1] if params.prompt_logprobs is not None else ()
    wanted = seeds if end == len(tokens) else ()
    sampling = Sampling(params, len(tokens), ())
    return Work((table[0], 0), start, tokens[start:end], table, wanted, sampling, tokens, targets)


def step(*items: Work, copies: tuple[tuple[int, int], ...] = ()) -> Step:
    return Step(items, copies, (), (), ())


def error(got: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """The root mean square of differences, relative to that of the logits."""
    return float(np.sqrt(((got - wanted) ** 2).mean() / (wanted**2).mean()))


# --- the right numbers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "f32") for name in MODELS]
    + [(name, "int8") for name in ROUNDED]
    + [(name, "int8-int4 cache") for name in [*ROUNDED[:4], "shared keys and values"]],
)
def test_logits_are_the_references(make: Make, name: str, kind: str) -> None:
    """A long prompt (split by tokens), some rows (mixed), then one to three (by outputs)."""
    runner, wanted = make(name, kind), reference(checkpoint(MODELS[name])).prompt_logits(TOKENS)
    parts = [runner.prompt_logits(TOKENS[:68])]
    for start, end in ((68, 80), (80, 83), (83, 85), (85, 86), (86, MAX_LEN)):
        parts.append(runner.prompt_logits(TOKENS[start:end], start))
    got = np.concatenate(parts)
    assert error(got, wanted) < FORMATS[kind][2]
    if kind == "f32":
        per_row = np.abs(got - wanted).max(axis=1) / np.abs(wanted).max(axis=1)
        assert per_row.max() < 1e-4


@pytest.mark.parametrize(
    ("name", "limit"), [("experts beside", 0.08), ("latent of compressed queries", 0.12)]
)
def test_experts_in_bytes(make: Make, name: str, limit: float) -> None:
    """By the middle row: rounding sends a row to another expert now and then."""
    wanted = reference(checkpoint(MODELS[name])).prompt_logits(TOKENS)
    rows = ((make(name).prompt_logits(TOKENS) - wanted) ** 2).mean(axis=1)
    assert np.sqrt(np.median(rows) / (wanted**2).mean()) < limit


@pytest.mark.parametrize("name", ["plain", "partial rope"])
def test_a_cache_of_half_floats(make: Make, name: str) -> None:
    kind = "f32, f16 cache"
    wanted = reference(checkpoint(ARCHS[name])).prompt_logits(TOKENS)
    assert error(make(name, kind).prompt_logits(TOKENS), wanted) < FORMATS[kind][2]


# Heads without padding: what is packed has the file's groups of 32.
WIDE = changed(
    PLAIN,
    hidden_size=96,
    size=160,
    num_heads=3,
    num_kv_heads=1,
    head_dim=32,
    rope=Rope(theta=1e4, dim=32),
)


def test_the_quick_choice_is_the_exact_one(make: Make) -> None:
    """Without logprobs no row of logits is kept; the token is the same, and the reference's."""
    runner, model = make("plain", "f32"), reference(checkpoint(PLAIN))
    for length in (1, 5, 17, 40):
        tables = (0, 1, 2), (3, 4, 5)
        quick = work(TOKENS[:length], tables[0], params=PLAIN_GREEDY)
        exact = work(TOKENS[:length], tables[1])
        output = runner.execute(step(quick, exact))
        assert output.tokens[0] == output.tokens[1]
        assert list(output.logprobs) == [1]
        assert output.tokens[0] == model.execute(step(quick)).tokens[0]


# --- a head of which little is read ------------------------------------------------------------

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
    for num_threads in (1, 2, 3):
        runner = make(checkpoint(MANY, arrays), threads=num_threads)
        assert runner.weights.proxy is not None
        for count in range(1, 8):  # the last are too many
            quick = runner.execute(streams(count, PLAIN_GREEDY))
            exact = runner.execute(streams(count, ALL))
            assert quick.tokens == exact.tokens
            assert not quick.errors
            assert not quick.logprobs


def test_a_proxy_as_wrong_as_it_can_be(make: Make) -> None:
    """The likeliest output is lost by rounding along x, in favour of one whose proxy is exact."""
    runner = make(checkpoint(MANY, random_arrays(MANY)))
    runner.execute(streams(1, PLAIN_GREEDY))
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
    assert tricky.execute(streams(1, PLAIN_GREEDY)).tokens == ((2000,),)


@pytest.mark.parametrize(("head", "wanted"), [("random", 1), ("near ties", 0)])
def test_pruning_rests_where_it_spares_nothing(make: Make, head: str, wanted: int) -> None:
    arrays = random_arrays(MANY) | ({"head": near_ties()} if head == "near ties" else {})
    runner = make(checkpoint(MANY, arrays), threads=2)
    runner._adaptive_threads.size = 1  # whose counters lie elsewhere
    for _ in range(10):
        runner.execute(streams(2, PLAIN_GREEDY))
    assert runner._buffers.get("prunes") == wanted


def test_what_cannot_be_the_likeliest_is_not_read(make: Make) -> None:
    """Without a number where nobody looks, the token stays; who wants logits gets the error."""
    runner = make(checkpoint(MANY, random_arrays(MANY)), threads=2)
    one, with_logits = streams(1, PLAIN_GREEDY), streams(1, ALL)
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
    plain = streams(count, PLAIN_GREEDY)
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
    output = runner.execute(streams(2, PLAIN_GREEDY))
    if np.isnan(factor):
        assert [output.errors[i] for i in (0, 1)] == [NOT_FINITE] * 2
    else:
        assert output.tokens == exact


def test_of_equal_logits_the_first_token_wins(make: Make) -> None:
    """Whichever thread found it."""
    model = checkpoint(PLAIN, random_arrays(PLAIN) | {"head": np.zeros((VOCAB, 24), np.float32)})
    for num_threads in (1, 2, 3):
        runner = make(model, threads=num_threads)
        greedy = work(TOKENS[:3], (0,), params=PLAIN_GREEDY)
        assert runner.execute(step(greedy)).tokens == ((0,),)


def test_logprobs_of_prompts(make: Make) -> None:
    """More of them than logits are computed at a time."""
    items = [work(TOKENS[:90], (0, 1, 2, 3, 4, 5), params=PROMPT_TOO), work(TOKENS[:6], (7,))]
    got, wanted = (runner.execute(step(*items)) for runner in (
        make("plain", "f32"), reference(checkpoint(PLAIN))
    ))  # fmt: skip
    assert len(got.prompt_logprobs[0]) == 89
    for mine, theirs in zip(got.prompt_logprobs[0], wanted.prompt_logprobs[0], strict=True):
        assert (mine.token, mine.rank) == (theirs.token, theirs.rank)
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_a_short_text_touches_its_own_blocks_only(make: Make) -> None:
    """Were layers apart, a first token would wait for a huge page from the system for each."""
    runner = make("plain", num_blocks=64)
    runner.execute(step(work(TOKENS[:20], (3, 5))))
    assert np.flatnonzero(runner.cache.reshape(64, -1).any(axis=1)).tolist() == [3, 5]


def test_a_step_in_the_middle_of_prompts_samples_nothing(make: Make) -> None:
    for end in (2, 9):
        output = make().execute(step(work(TOKENS[:20], (0, 1), end=end)))
        assert output == StepOutput(((),), {}, {}, {})


# --- the same numbers --------------------------------------------------------------------------


KINDS = ["f32", "bf16", "int8", "int8-row", "int4"]
OTHERS = ["norms behind", "norms around", "beside", "two ropes", "learnt positions", "experts"]
OTHERS += ["many experts", "experts", "kinds", "shared keys and values", "experts beside"]
OTHERS += [*LATENT, "latent"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("mixed windows", kind) for kind in KINDS]
    + [(name, KINDS[2 + i % 2]) for i, name in enumerate(OTHERS)],
)
def test_a_text_in_pieces(make: Make, name: str, kind: str) -> None:
    runner = make(name, kind, threads=2)
    whole = runner.prompt_logits(TOKENS)
    for sizes in ([1] * 20, [3, 4, 1, 2, 60], [70, 5], [16, 16, 33], [66, 2, 11], [7, 17, 15, 6]):
        runner.cache[:] = 0
        start = 0
        for size in sizes:
            part = runner.prompt_logits(TOKENS[start : start + size], start)
            assert (part == whole[start : start + size]).all()
            start += size


def crowd() -> Step:
    """All kinds of work: long and short prompts, decodes, with and without samples."""
    return step(
        work(TOKENS[:70], (0, 1, 2, 3, 4)),
        work(TOKENS[5:45], (5, 6, 7), end=30),
        work(TOKENS[20:23], (8,), params=PLAIN_GREEDY),
        work(TOKENS[40:41], (9,)),
        work(TOKENS[30:66], (10, 11, 12), params=replace(ALL, temperature=1.0, n=3), seeds=(1, 2)),
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [("plain", kind) for kind in KINDS[:-1]]
    + [(name, KINDS[3 - i % 2]) for i, name in enumerate(OTHERS)],
)
def test_any_number_of_threads(make: Make, name: str, kind: str) -> None:
    few = step(work(TOKENS[:1], (13,)), work(TOKENS[3:5], (14,)))
    some = step(work(TOKENS[2:10], (13,)), work(TOKENS[7:8], (14,)), work(TOKENS[:5], (15,)))
    wanted = None
    for num_threads in (1, 2, 3, 4):
        runner = make(name, kind, threads=num_threads)
        got = [*map(runner.execute, (crowd(), few, some)), runner.prompt_logits(TOKENS).tobytes()]
        wanted = wanted or got
        assert got == wanted
        runner.close()


def test_who_is_done_takes_rows_of_others(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that owns no rows at all does some of the other's, and nothing changes."""
    runner = make(threads=2)
    wanted = runner.prompt_logits(TOKENS)

    def to_the_first(*args: Any, **named: Any) -> Batch:
        batch = arrange(*args, **named)
        end = len(batch.blocks) - 1
        return replace(batch, block_bounds=[0, end, end], output_begins=[0, end])

    monkeypatch.setattr("ridgeline.backends.cpu.runner.arrange", to_the_first)
    counters = runner.profile()
    for _ in range(20):
        assert np.array_equal(runner.prompt_logits(TOKENS), wanted)
    assert counters.take()["linears"][1] > 0


def test_a_step_may_be_executed_again(make: Make) -> None:
    runner = make(threads=2)
    once = runner.execute(crowd())
    assert runner.execute(crowd()) == once
    alone = [runner.execute(step(item)) for item in crowd().work]
    for i, output in enumerate(alone):
        assert output.tokens[0] == once.tokens[i]
        assert output.logprobs.get(0) == once.logprobs.get(i)


@pytest.mark.parametrize("kind", ["int8", "f32, f16 cache"])
def test_any_size_of_blocks(make: Make, kind: str) -> None:
    wanted = None
    for block_size in (16, 32, 48):
        runner = make("window", kind, block_size=block_size)
        tables = [(5, 2, 9, 1, 7, 3), (0, 8, 4)]
        parts = [work(TOKENS[:50], tables[0], end=41), work(TOKENS[9:40], tables[1])]
        rest = work(TOKENS[:50], tables[0], start=41)
        got = runner.execute(step(*parts)), runner.execute(step(rest))
        wanted = wanted or got
        assert got == wanted


@pytest.mark.parametrize("block_size", [16, 32])
def test_copied_blocks_part_ways(make: Make, block_size: int) -> None:
    """And all sources are read before a target is written."""
    runner = make(block_size=block_size)
    prompts = TOKENS[:6], TOKENS[20:27]
    runner.execute(step(work(prompts[0], (0,)), work(prompts[1], (1,))))
    longer = [(*prompts[0], 11), (*prompts[0], 22), (*prompts[1], 33)]
    forked = [work(longer[0], (0,), start=6), work(longer[1], (1,), start=6)]
    forked.append(work(longer[2], (2,), start=7))
    output = runner.execute(step(*forked, copies=((0, 1), (1, 2))))
    for i, tokens in enumerate(longer):
        assert runner.execute(step(work(tokens, (10,)))).logprobs[0] == output.logprobs[i]


# --- vectors -----------------------------------------------------------------------------------


def pool(tokens: tuple[int, ...], block: int, how: str, start: int = 0) -> Work:
    table = tuple(range(block, block + 6))
    found = work(tokens, table, start=start, seeds=(), params=PLAIN_GREEDY)
    return found._replace(pool=how)


@pytest.mark.parametrize("how", ["last", "mean", "cls"])
@pytest.mark.parametrize("name", ["plain", "beside", "learnt positions"])
def test_vectors_are_the_references(make: Make, name: str, how: str) -> None:
    for kind, bound in (("f32", 1e-5), ("int8", 0.2)):
        for size in (5, 12, 40):
            text = step(pool(TOKENS[:size], 0, how))
            (wanted,) = reference(checkpoint(ARCHS[name])).execute(text).vectors.values()
            (found,) = make(name, kind).execute(text).vectors.values()
            assert error(np.array(found), np.array(wanted)) < bound


@pytest.mark.parametrize("how", ["last", "mean", "cls"])
@pytest.mark.parametrize("kind", ["f32", "int8", "int8-row", "bf16"])
def test_a_vector_depends_on_its_text_alone(make: Make, kind: str, how: str) -> None:
    """Bit for bit: beside anything, on any number of threads; the last state also in pieces."""
    (wanted,) = make("plain", kind).execute(step(pool(TOKENS[:37], 0, how))).vectors.values()
    others = crowd().work
    for num_threads in (1, 2, 3):
        runner = make("plain", kind, threads=num_threads)
        for before in (0, 1, 2, 5):
            items = (*others[:before], pool(TOKENS[:37], 16, how), *others[before:])
            assert runner.execute(step(*items)).vectors == {before: wanted}
        if how == "last":
            for cut in (1, 3, 16, 30, 36):
                runner.cache[:] = 0
                runner.execute(step(work(TOKENS[:37], tuple(range(16, 22)), end=cut)))
                rest = pool(TOKENS[:37], 16, how, start=cut)
                assert runner.execute(step(*others[:2], rest)).vectors == {2: wanted}
        runner.close()


def test_a_text_with_damaged_keys_has_no_vector(make: Make) -> None:
    arrays = random_arrays(PLAIN)
    arrays["embed"][7] = np.inf
    runner = make(checkpoint(PLAIN, arrays), "f32")
    output = runner.execute(step(pool((3, 7, 5), 0, "mean"), pool((3, 4, 5), 8, "mean")))
    assert output.errors.keys() == {0}
    assert output.vectors.keys() == {1}
