"""The quality measure against plain statements of its definitions, on logits that are known."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ridgeline.backends.interface import Setup
from ridgeline.backends.reference import footprint
from ridgeline.backends.reference.runner import ReferenceRunner
from ridgeline.bench import quality
from ridgeline.bench.quality import (
    FORMATS,
    REFERENCE,
    Quality,
    WeightsFormat,
    chosen,
    compare,
    measure,
)
from ridgeline.engine.setup.options import Options
from ridgeline.model.cost import costs
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.model.shape.model import ModelArch
from tests.model.files.vocabularies import byte_level
from tests.tiny import ARCHS, PLAIN, Arrays, checkpoint, new_setup, plain_logits, random_arrays

Rows = NDArray[np.float64]
TEXT = "to be, or not to be: that is the question. " * 20
VOCAB = PLAIN.vocab_size
TOKENS = tuple(int(token) for token in np.random.default_rng(3).integers(0, VOCAB, 150))
PARTS = (TOKENS[:100], TOKENS[100:149], TOKENS[149:])  # longer than a chunk, shorter, one token


class Recorded:
    """A candidate that says what it was given, one window after the other."""

    def __init__(self, *logits: Rows) -> None:
        self.logits = [rows.astype(np.float32) for rows in logits]
        self.window = -1

    def prompt_logits(self, tokens: Sequence[int], start: int = 0) -> NDArray[np.float32]:
        self.window += start == 0
        assert tuple(tokens) == PARTS[self.window][start : start + len(tokens)]
        return self.logits[self.window][start : start + len(tokens)]


def runner(arrays: Arrays, arch: ModelArch = PLAIN) -> ReferenceRunner:
    return ReferenceRunner(
        checkpoint(arch, arrays), new_setup(num_blocks=7, block_size=16, max_model_len=112)
    )


def log_softmax(logits: Rows) -> Rows:
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def directly(wanted: list[Rows], found: list[Rows]) -> Quality:
    """The definitions over whole windows; the row after a window's last token has no answer."""
    p = np.concatenate([log_softmax(rows)[:-1] for rows in wanted])
    q = np.concatenate([log_softmax(rows)[:-1] for rows in found])
    answers = [token for ids in PARTS for token in ids[1:]]
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    perplexity_p, perplexity_q = (
        np.exp(-rows[np.arange(len(answers)), answers].mean()) for rows in (p, q)
    )
    return Quality(
        len(answers),
        kl.mean(),
        kl.max(),
        (p.argmax(axis=1) == q.argmax(axis=1)).mean(),
        perplexity_q,
        perplexity_q / perplexity_p,
    )


def assert_near(found: Quality, wanted: Quality, rel: float) -> None:
    assert astuple(found) == pytest.approx(astuple(wanted), rel=rel)


# --- the numbers -------------------------------------------------------------------------------


def test_numbers_are_those_of_the_definitions() -> None:
    rng = np.random.default_rng(0)
    wanted = [rng.normal(0, 3, (len(ids), VOCAB)) for ids in PARTS]
    found = [rows + rng.normal(0, 1, rows.shape) for rows in wanted]
    result = compare(Recorded(*wanted), Recorded(*found), PARTS, lambda done, total: None)
    assert_near(result, directly(wanted, found), rel=1e-6)  # logits are rounded to float32
    assert result.num_predictions == 99 + 48
    assert 0.3 < result.top1_agreement < 0.95  # neither end would show a wrong share


def test_large_logits_do_not_overflow() -> None:
    rng = np.random.default_rng(1)
    wanted = [rng.normal(0, 3, (len(ids), VOCAB)) for ids in PARTS]
    moved = [rows + 5000 for rows in wanted]
    result = compare(Recorded(*wanted), Recorded(*moved), PARTS, lambda done, total: None)
    assert result.mean_kl < 1e-6
    assert result.perplexity_ratio == pytest.approx(1, abs=1e-3)


def test_two_models_against_the_plain_computation() -> None:
    ours, theirs = random_arrays(PLAIN), random_arrays(PLAIN, seed=1)
    result = compare(runner(ours), runner(theirs), PARTS, lambda done, total: None)
    wanted, found = (
        [plain_logits(PLAIN, arrays, ids, 112) for ids in PARTS] for arrays in (ours, theirs)
    )
    assert_near(result, directly(wanted, found), rel=1e-3)


def test_against_the_weights_that_a_model_was_made_of() -> None:
    ours, theirs = checkpoint(PLAIN), checkpoint(PLAIN, random_arrays(PLAIN, seed=1))
    form = WeightsFormat("cpu", "f32", "f32")
    result = measure(theirs, [form, REFERENCE], {"t": PARTS}, Options(), ours)
    both = [random_arrays(PLAIN), random_arrays(PLAIN, seed=1)]
    wanted, found = ([plain_logits(PLAIN, one, ids, 112) for ids in PARTS] for one in both)
    for of_format in result.values():  # the reference backend is a candidate too then
        assert_near(of_format["t"], directly(wanted, found), rel=1e-3)
    small = checkpoint(replace(PLAIN, vocab_size=40))
    with pytest.raises(ValueError, match="tiny has 40 tokens, and tiny has 50: they cannot be"):
        measure(ours, [form], {"t": PARTS}, Options(), small)


def test_a_small_error_costs_half_its_variance() -> None:
    """KL of a small change of the logits is Var_p(change) / 2, so four times for twice as much."""
    arrays = random_arrays(PLAIN)
    noise = np.random.default_rng(9).normal(0, 1, arrays["head"].shape).astype(np.float32)
    logits = [plain_logits(PLAIN, arrays, ids, 112)[:-1] for ids in PARTS]
    means = []
    for size in (0.002, 0.004):
        changed = arrays | {"head": arrays["head"] + np.float32(size) * noise}
        changes = [
            plain_logits(PLAIN, changed, ids, 112)[:-1] - rows
            for ids, rows in zip(PARTS, logits, strict=True)
        ]
        p, change = np.exp(log_softmax(np.concatenate(logits))), np.concatenate(changes)
        variance = (p * change**2).sum(1) - (p * change).sum(1) ** 2
        found = compare(runner(arrays), runner(changed), PARTS, lambda done, total: None)
        assert found.mean_kl == pytest.approx(variance.mean() / 2, rel=0.05)
        assert found.max_kl > 2 * found.mean_kl
        means.append(found.mean_kl)
    assert means[1] == pytest.approx(4 * means[0], rel=0.05)


def test_progress_ends_with_all_predictions() -> None:
    seen: list[tuple[int, int]] = []
    model = runner(random_arrays(PLAIN))
    compare(model, model, PARTS, lambda done, total: seen.append((done, total)))
    assert seen == [(64, 147), (99, 147), (147, 147)]


@pytest.mark.parametrize("name", ["plain", "mixed windows", "scaled rope"])
def test_prompt_logits_continue_a_text_and_forget_the_last_one(name: str) -> None:
    arch, arrays = ARCHS[name], random_arrays(ARCHS[name])
    model = runner(arrays, arch)
    for tokens in (TOKENS[:100], TOKENS[100:140]):
        rows = [model.prompt_logits(tokens[i : i + 30], i) for i in range(0, len(tokens), 30)]
        assert all(part.dtype == np.float32 for part in rows)
        wanted = plain_logits(arch, arrays, tokens, 112)
        np.testing.assert_allclose(np.concatenate(rows), wanted, atol=1e-3)


# --- from a model and options to results -------------------------------------------------------


def test_the_reference_is_no_distance_from_itself() -> None:
    kinds = {"long": PARTS, "short": PARTS[1:]}
    found = measure(checkpoint(PLAIN), [REFERENCE], kinds, Options(block_size=5, threads=1))
    result = found[REFERENCE]["long"]
    assert found[REFERENCE]["short"].num_predictions == 48
    assert result.max_kl < 1e-9
    assert (result.top1_agreement, result.num_predictions) == (1, 147)
    assert result.perplexity_ratio == pytest.approx(1, rel=1e-6)


def test_a_damaged_model_is_an_error() -> None:
    arrays = random_arrays(PLAIN)
    arrays["norm"][3] = np.inf
    with pytest.raises(ValueError, match="reference/f32/f32: logits are not finite"):
        measure(checkpoint(PLAIN, arrays), [REFERENCE], {"text": PARTS}, Options())


def test_no_memory_for_a_window_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    kv_bytes = 64 * costs.kv_bytes_per_token(PLAIN, 4)
    setup = Setup("f32", "f32", 16, 1, 100, 1, 64)
    room = costs.weight_bytes(PLAIN, 4) + footprint(PLAIN, setup).step_bytes + kv_bytes
    resolving = "ridgeline.engine.setup.resolve"
    monkeypatch.setattr(f"{resolving}.available_bytes", lambda: room * 20 // 19 + 20)
    with pytest.raises(ValueError, match=r"not 100: .*--max-model-len"):
        measure(checkpoint(PLAIN), [REFERENCE], {"text": PARTS}, Options())


def test_options_narrow_the_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    formats = (REFERENCE, WeightsFormat("cpu", "int8", "int8"), WeightsFormat("cpu", "int8", "f16"))
    monkeypatch.setattr(quality, "FORMATS", formats)
    assert chosen(Options()) == list(formats)
    assert chosen(Options(dtype="f32")) == [REFERENCE]
    assert chosen(Options(dtype="int8")) == [*formats[1:]]
    assert chosen(Options(backend="cpu", kv_cache_dtype="f16")) == [formats[2]]
    with pytest.raises(ValueError, match=r"there are reference/f32/f32, cpu/int8/int8, "):
        chosen(Options(backend="reference", dtype="int8"))


def test_every_format_is_one_that_options_can_ask_for() -> None:
    for format in FORMATS:
        assert format in chosen(Options(**format._asdict()))


@pytest.mark.parametrize(("bos_id", "begin"), [(None, ()), (1, (1,))])
def test_windows_hold_the_text_once(
    bos_id: int | None, begin: tuple[int, ...], tmp_path: Path
) -> None:
    model = replace(reader(tmp_path), bos_id=bos_id, begin_ids=begin)
    whole = quality.windows(model, TEXT, 90, 1000)[0]
    assert whole == (*begin, *quality.windows(reader(tmp_path), TEXT, 90, 90)[0])
    assert len(whole) == 90 + len(begin)
    parts = quality.windows(model, TEXT, 90, 40)
    assert [len(part) for part in parts[:-1]] == [40, 40]
    assert all(part[: len(begin)] == begin for part in parts)
    assert sum((part[len(begin) :] for part in parts), ()) == whole[len(begin) :]


def test_the_spelling_of_a_control_token_is_text(tmp_path: Path) -> None:
    assert len(quality.windows(reader(tmp_path), "<|end|>", 2, 512)[0]) == 2


def test_a_short_text_of_our_own_is_taken_as_it_is(tmp_path: Path) -> None:
    whole = quality.windows(reader(tmp_path), TEXT, 100_000, 100_000, whole=False)
    assert len(whole) == 1
    assert len(whole[0]) > 200


def test_too_short_a_text_names_its_length(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has \d+ tokens, fewer than --tokens 2048"):
        quality.windows(reader(tmp_path), TEXT, 2048, 512)


def test_the_manual_is_long_enough_and_python_without_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(quality.manual()) > 150_000  # even at 8 letters a token, more than 2,048
    assert quality.manual().startswith("Objects, values and types\n")
    kinds = quality.texts()
    assert list(kinds) == ["prose", "code", "scripts", "repeats"]
    assert all(len(text) > 1000 for text in kinds.values())
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match="--text FILE"):
        quality.manual()


# --- a real model: its bounds are in tests/answers/test_quality.py ------------------------------


@pytest.mark.full
@pytest.mark.engine
def test_the_command_prints_a_table_and_one_json_document(tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("The cat sat on the mat, and the dog lay at the door. " * 4)
    arguments = ["smollm2", "--text", str(text), "--tokens", "40", "--max-model-len", "16"]
    done = bench_quality(*arguments, "--backend", "reference")
    assert done.returncode == 0
    # On a busy machine loading takes so long that it says how far it is.
    assert [line for line in done.stderr.splitlines() if not line.startswith("Loading ")] == []
    *table, last = done.stdout.splitlines()
    assert table[0].startswith("own.txt: ")
    assert "mean KL" in table[0]
    assert "reference/f32/f32" in table[1]
    result = json.loads(last)
    assert (result["tokens"], result["window"]) == (40, 16)
    found = result["formats"]["reference/f32/f32"]["own.txt"]
    assert found["num_predictions"] == 15 + 15 + 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["smollm2", "--backend", "reference", "--dtype", "int4"], "no format has this"),
        (["smollm2", "--text", "/no/such/text"], "/no/such/text"),
        (["/no/such/model.gguf"], "/no/such/model.gguf"),
    ],
)
def test_errors_are_one_line(arguments: list[str], words: str) -> None:
    done = bench_quality(*arguments)
    assert done.returncode == 1
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"\x89PNG\xff")
    done = bench_quality("smollm2", "--text", str(tmp_path / "picture"))
    assert "picture: not UTF-8 text" in done.stderr


def reader(folder: Path) -> Checkpoint:
    """A model that has a tokenizer."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(byte_level()))
    return replace(checkpoint(PLAIN), tokenizer=path)


def bench_quality(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "ridgeline"), "bench", "quality", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
