"""A model in stages: bits of one process, parts of steps, what stages say, and how they end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline import LLM, SamplingParams
from ridgeline.backends.cpu.buffers import HiddenRows
from ridgeline.backends.cpu.pipeline.parts import LEAST_ROWS, cut, merged, piece_of
from ridgeline.backends.cpu.pipeline.process import _serve, written_setup
from ridgeline.backends.cpu.pipeline.runner import Stages, StagesRunner
from ridgeline.backends.cpu.pipeline.split import bounds, check_stages, layers_of, setup_of
from ridgeline.backends.cpu.pipeline.wire import Link, bare, key_of, read_written, rows_of
from ridgeline.backends.cpu.runner import load_runner
from ridgeline.backends.interface import BackendContext
from ridgeline.backends.step_codec import StepDecoder, StepEncoder
from ridgeline.core.step import StepOutput, Work, sampled_from
from ridgeline.model.shape.cache_groups import cache_groups
from ridgeline.system.machine import DeviceLost
from tests.backends.runners import CPU_FORMATS, MODELS, TOKENS, Make, make, step, work
from tests.engine.test_llm import model  # noqa: F401  (a fixture)
from tests.kept_kernels import KERNELS
from tests.tiny import BY_LAYER, ENCODERS, PLAIN, RECURRENT, changed, checkpoint, new_setup
from tests.waiting import PATIENCE_S, eventually, free_port

__all__ = ["make"]  # a fixture
FREQUENT = ("int8", "int8-int4 cache")

# --- bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param("plain", kind, marks=() if kind in FREQUENT else pytest.mark.full)
        for kind in CPU_FORMATS
    ]
    + [
        pytest.param(name, "int8", marks=pytest.mark.full)
        for name in ("all biases", "norms around", "learnt positions", "experts", "latent")
    ],
)
def test_two_stages_have_the_logits_of_one_process(make: Make, name: str, kind: str) -> None:
    whole, of_all = make(name, kind), checkpoint(MODELS[name])
    first, last = (make(layers_of(of_all, *ends), kind) for ends in ((0, 1), (1, 2)))

    def before(item: Work) -> HiddenRows:
        return first.rows(step(item), None)

    for start, end in ((0, 68), (68, 80), (80, 83), (83, 84), (84, 96)):
        tokens = TOKENS[start:end]
        wanted = whole.prompt_logits(tokens, start)
        assert np.array_equal(last.prompt_logits(tokens, start, before), wanted)


def test_three_stages_with_windows_and_after_a_step_that_was_given_up(make: Make) -> None:
    """The one in the middle has no layer that sees all, and waits for the rows of the first."""
    arch = changed(PLAIN, windows=(None, 5, 5))
    of_all, ends = checkpoint(arch), ((0, 1), (1, 2), (2, 3))
    whole = make(of_all, groups=cache_groups(arch))
    setup = new_setup(
        dtype="auto",
        kv_cache_dtype="int8",
        num_blocks=24,
        max_model_len=96,
        max_num_batched_tokens=256,
        groups=cache_groups(arch),
    )
    context = BackendContext(lambda: KERNELS.parent)
    links, ours = [], []
    for first, end in ends[:-1]:
        link, other = linked()
        start = {"setup": written_setup(setup), "first": first, "end": end}
        args = (other, json.loads(json.dumps(start)), lambda: of_all, context)
        ours.append(threading.Thread(target=served, args=args))
        ours[-1].start()
        links.append(link)
    own = setup_of(setup, arch, *ends[-1])
    last = load_runner(layers_of(of_all, *ends[-1]), own, context)
    runner = StagesRunner(arch, last, Stages(links, []), setup.max_model_len)
    others = ((17, 18, 19),) * (len(cache_groups(arch)) - 1)
    for start, end in ((0, 60), (60, 62), (62, 96)):
        given_up = step(work(TOKENS[:40], (20, 21, 22))._replace(others=others))
        runner._tell(given_up, cut(given_up.work, 2))
        wanted = whole.prompt_logits(TOKENS[start:end], start)
        assert np.array_equal(runner.prompt_logits(TOKENS[start:end], start), wanted)
    runner.close()
    for thread in ours:
        thread.join(PATIENCE_S)


def served(link: Link, *args: Any) -> None:
    with closing(link), suppress(EOFError, OSError):
        _serve(link, *args)


def answers(llm: LLM) -> Any:
    """Greedy and drawn, several answers, a cached prefix, prompts longer than a part."""
    prompts = [[40 + i] * (3 + 9 * i) for i in range(8)]
    params = [
        SamplingParams(
            max_tokens=20,
            ignore_eos=True,
            logprobs=3,
            prompt_logprobs=2 if i == 5 else None,
            seed=i,
            temperature=0.0 if i % 2 else 0.9,
            n=2 if i % 4 == 3 else 1,
        )
        for i in range(8)
    ]
    found = llm.generate(prompts, params, progress=False)
    found += llm.generate(prompts[6:], params[6:], progress=False)
    return [
        (one.prompt_logprobs, answer.token_ids, answer.text, answer.logprobs)
        for one in found
        for answer in one.outputs
    ]


OPTIONS: dict[str, Any] = {"kv_cache_memory": "1MiB", "threads": 2, "max_model_len": 128}


@pytest.fixture
def staged(model: Path) -> Iterator[LLM]:  # noqa: F811
    with LLM(model, stages=2, **OPTIONS) as llm:
        yield llm
        llm.runner.close()  # type: ignore[attr-defined]


def test_processes_give_the_answers_of_one_and_end(model: Path, staged: LLM) -> None:  # noqa: F811
    with LLM(model, **OPTIONS) as llm:
        wanted = answers(llm)
        logits = llm.runner.prompt_logits([40, 41, 42])
    assert answers(staged) == wanted
    runner: Any = staged.runner
    assert np.array_equal(runner.prompt_logits([40, 41, 42]), logits)
    assert any(name.startswith("stage 1.weights") for name in runner.memory())
    with pytest.raises(ValueError, match="does not sleep"):
        staged.sleep()
    [process] = runner.stages.processes
    runner.close()
    assert process.returncode == 0


def test_a_stage_that_is_killed_ends_the_engine_with_one_line(staged: LLM) -> None:
    runner: Any = staged.runner
    runner.stages.processes[0].send_signal(signal.SIGKILL)
    eventually(lambda: runner.stages.lost)
    with pytest.raises(DeviceLost, match=r"^stage 1 of 2 has ended, and no step"):
        staged.generate([40, 41], progress=False)


# --- who joins -----------------------------------------------------------------------------------


def test_a_stage_joins_with_the_same_key_and_model(model: Path, tmp_path: Path) -> None:  # noqa: F811
    key, wrong = tmp_path / "key", tmp_path / "wrong"
    key.write_text("secret" * 6)
    wrong.write_text("guessed" * 6)
    port = free_port()

    def stage(file: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "ridgeline", "stage", str(model), "--threads", "1"]
        command += ["--join", f"127.0.0.1:{port}", "--stage-key-file", str(file)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    stranger = stage(wrong)
    found: list[Any] = []

    def load() -> None:
        flags = {"stages": 2, "stage_port": port, "stage_key_file": key}
        with LLM(model, **OPTIONS, **flags) as llm:
            found.append(answers(llm))
            llm.runner.close()  # type: ignore[attr-defined]

    loading = threading.Thread(target=load)
    loading.start()
    _, said = stranger.communicate(timeout=PATIENCE_S)
    assert (stranger.returncode, "--stage-key-file" in said) == (1, True), said
    joined = stage(key)
    loading.join(PATIENCE_S)
    _, said = joined.communicate(timeout=PATIENCE_S)
    assert (joined.returncode, "layers 1 to 1 of 2" in said) == (0, True), said
    with LLM(model, **OPTIONS) as llm:
        assert found == [answers(llm)]


def linked() -> tuple[Link, Link]:
    ours, theirs = socket.socketpair()
    return Link(ours), Link(theirs)


@pytest.mark.parametrize(("key", "is_same"), [(b"a", True), (b"b", False)])
def test_both_ends_prove_that_they_know_the_key(key: bytes, is_same: bool) -> None:
    engine, stage = linked()
    told: list[str] = []

    def prove(link: Link, key: bytes, *names: str) -> None:
        try:
            link.prove(key, *names)
            told.append("in")
        except PermissionError:
            told.append("out")

    other = threading.Thread(target=prove, args=(stage, key, "stage", "engine"))
    other.start()
    prove(engine, b"a", "engine", "stage")
    other.join()
    assert told == (["in", "in"] if is_same else ["out", "out"])
    engine.close()
    stage.close()


def test_an_empty_key_lets_nobody_in(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("\n")
    with pytest.raises(ValueError, match="a key of 0 bytes, but it needs at least 32"):
        key_of(tmp_path / "key")
    assert key_of(None) == b""


def test_messages_are_the_same_at_the_other_end_and_garbage_ends_the_connection() -> None:
    one, other = linked()
    rows = HiddenRows(np.arange(6, dtype=np.float32).reshape(2, 3), np.array([0, 1], np.float32))
    one.send("rows", [3, 0, 2], rows)
    kind, what, body = other.receive()
    found = rows_of(body, what[2])
    assert (kind, what) == ("rows", [3, 0, 2])
    assert np.array_equal(found.x, rows.x)
    assert np.array_equal(found.non_finite, rows.non_finite)
    with pytest.raises(ValueError, match="another length"):
        rows_of(body, 3)
    one._socket.sendall(b"\xff" * 12)
    with pytest.raises(EOFError, match="not a message"):
        other.receive()
    one._socket.sendall(b"\x02\0\0\0" + bytes(8) + b"x{")
    with pytest.raises(EOFError, match="not a message"):
        other.receive()
    one.close()
    with pytest.raises((EOFError, OSError)):
        other.receive()
    other.close()


def test_a_stage_is_told_what_layers_need_and_nothing_else() -> None:
    encoder, decoder = StepEncoder(), StepDecoder()
    first = step(work(TOKENS[:20], (3, 4)), work(TOKENS[:5], (5,)), copies=((1, 2),))
    grown = first.work[0]._replace(start=20, tokens=(7,), table=(3, 4, 6), history=TOKENS[:21])
    for one in (first, step(grown), first):
        written = json.loads(json.dumps(encoder.write(bare(one))))
        found = decoder.read(read_written(written))
        assert found == bare(one)
        assert all(item.sampling is None and not item.history for item in found.work)


# --- parts ---------------------------------------------------------------------------------------

ITEMS = st.lists(
    st.tuples(st.integers(1, 70), st.sampled_from(["drawn", "middle", "ranked", "drafts"])),
    min_size=1,
    max_size=12,
)


def item_of(index: int, length: int, kind: str) -> Work:
    tokens = tuple(range(length))
    item = work(tokens, (index,), seeds=() if kind == "middle" else (7,))
    if kind == "ranked":
        return item._replace(targets=tokens)
    return item._replace(drafts=min(3, length - 1)) if kind == "drafts" else item


@settings(max_examples=300, deadline=None)
@given(ITEMS, st.integers(1, 9))
def test_parts_have_each_token_once_and_results_where_they_were(items: Any, most: int) -> None:
    step_work = tuple(item_of(i, *one) for i, one in enumerate(items))
    parts = cut(step_work, most)
    assert 1 <= len(parts) <= most
    assert len(parts) == 1 or sum(len(w.tokens) for w in step_work) >= len(parts) * LEAST_ROWS
    reached = [0] * len(items)
    outputs = []
    for pieces in parts:
        assert pieces
        found = [piece_of(step_work[piece.item], piece) for piece in pieces]
        for piece, one in zip(pieces, found, strict=True):
            whole = step_work[piece.item]
            assert piece.low == reached[piece.item] < piece.high
            assert one.start == whole.start + piece.low
            reached[piece.item] = piece.high
            if piece.high < len(whole.tokens):
                assert piece.high <= sampled_from(whole)
                assert not (one.seeds + one.history + whole.targets)
                assert not one.drafts
            else:
                assert (one.seeds, one.targets) == (whole.seeds, whole.targets)
        outputs.append((pieces, StepOutput(tuple((p.item,) * bool(w.seeds) for p, w in
                                                 zip(pieces, found, strict=True)),
                                           errors={0: f"part of {pieces[0].item}"})))  # fmt: skip
    assert reached == [len(item.tokens) for item in step_work]
    result = merged(len(items), outputs)
    assert result.tokens == tuple((i,) * bool(w.seeds) for i, w in enumerate(step_work))
    assert set(result.errors) == {pieces[0].item for pieces in parts}


# --- which layers --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_each_stage_has_a_layer_and_the_last_one_fewer(count: int) -> None:
    arch = replace(PLAIN, layers=PLAIN.layers[:1] * 8, vocab_size=400)
    ends = bounds(arch, count)
    assert (ends[0], ends[-1], len(ends)) == (0, 8, count + 1)
    sizes = [high - low for low, high in pairwise(ends)]
    assert min(sizes) >= 1
    assert sizes[-1] <= max(sizes)  # it has the head
    of_all = checkpoint(arch)
    names = [
        name
        for low, high in pairwise(ends)
        for name in layers_of(of_all, low, high).tensors
        if name.startswith("layers.")
    ]
    assert len(names) == sum(name.startswith("layers.") for name in of_all.tensors)


@pytest.mark.parametrize(
    ("arch", "changes", "why"),
    [
        (PLAIN, {"stages": 3}, "the model has 2 layers"),
        (RECURRENT["states alone"], {}, "layers with states"),
        (ENCODERS["encoder"], {}, "reads texts whole"),
        (BY_LAYER["shared keys and values"], {}, "inputs of their own"),
        (BY_LAYER["keys and values of layer 0"], {}, "read the keys of others"),
        (PLAIN, {"max_lora_rank": 4}, "no adapters"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(arch: Any, changes: Any, why: str) -> None:
    setup = new_setup(**{"stages": 2} | changes)
    with pytest.raises(ValueError, match=f"^--stages {setup.stages}: .*{why}"):
        check_stages(arch, setup)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"stages": 0}, "--stages is 0"),
        ({"stage_port": 9000}, "need --stages 2"),
        ({"stages": 2, "stage_port": 65536}, "--stage-port is 65536"),
        ({"stages": 2, "kv_disk": "kept:1MiB"}, "--kv-disk cannot be used with --stages yet"),
        ({"stages": 2, "backend": "reference"}, "the reference backend has no stages"),
    ],
)
def test_options_that_contradict_are_refused(
    model: Path,  # noqa: F811
    options: Any,
    why: str,
) -> None:
    with pytest.raises(ValueError, match=why):
        LLM(model, **options)
