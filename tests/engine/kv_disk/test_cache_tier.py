"""Answers after a restart: the same to the bit, from the blocks of a process before."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams
from tests.answers.tiny_families import write_family
from tests.engine.test_llm import model
from tests.waiting import started

__all__ = ["model"]  # a fixture

DRAWN = SamplingParams(max_tokens=8, temperature=0.8, seed=7, logprobs=2, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=8, temperature=0, logprobs=2, ignore_eos=True)
PROMPTS = [[5 + (i * 7 + j * j) % 90 for j in range(90)] for i in range(3)]
CACHED = 80  # tokens of each: at least one is computed


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with layers that keep a state, and layers of attention."""
    return write_family(tmp_path_factory.mktemp("recurrent") / "model", "qwen3.5")


def engine(model: Path, folder: Path | None, **options: Any) -> LLM:
    kept = {"kv_disk": f"{folder}:64MiB", "kv_disk_min": 32} if folder else {}
    return LLM(model, **{"kv_cache_memory": "1MiB", "threads": 1} | kept | options)


def answers(llm: LLM) -> tuple[list[Any], list[int]]:
    """What is drawn with all log-probabilities, and how much was cached."""
    outputs = [llm.generate([prompt], DRAWN, progress=False)[0] for prompt in PROMPTS]
    if llm.kv_disk:
        llm.kv_disk.settle()
    llm.engine.check()
    drawn = [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]
    return drawn, [one.num_cached_tokens for one in outputs]


def assert_same(drawn: list[Any], expected: list[Any], *, tolerance: float) -> None:
    """The same tokens and logprobs; numpy's products differ a little by how many rows they have."""
    assert [tokens for tokens, _ in drawn] == [tokens for tokens, _ in expected]
    for (_, ours), (_, theirs) in zip(drawn, expected, strict=True):
        for here, there in zip(ours, theirs, strict=True):
            assert {token: one.rank for token, one in here.items()} == {
                token: one.rank for token, one in there.items()
            }
            for token, one in here.items():
                assert abs(one.logprob - there[token].logprob) <= tolerance


@pytest.mark.parametrize(
    "formats",
    [
        {"backend": "cpu"},
        {"backend": "cpu", "kv_cache_dtype": "int8-int4"},
        {"backend": "cpu", "dtype": "f32", "kv_cache_dtype": "f32"},
        {"backend": "cpu", "kv_cache_dtype": "f16"},
        {"backend": "reference"},
    ],
    ids=lambda formats: "-".join(formats.values()),
)
def test_a_restart_finds_its_blocks(model: Path, tmp_path: Path, formats: dict[str, Any]) -> None:
    with engine(model, None, **formats) as llm:
        alone, _ = answers(llm)
    with engine(model, tmp_path, **formats) as llm:
        first, cached = answers(llm)
        assert cached == [0] * 3
        assert llm.kv_disk is not None
        assert llm.kv_disk.counts["written"] >= 3 * CACHED // 16
    with engine(model, tmp_path, **formats) as llm:
        again, cached = answers(llm)
        assert cached == [CACHED] * 3
        assert llm.kv_disk is not None
        assert llm.kv_disk.counts["written"] == 0, "it was there"
    assert alone == first
    assert_same(again, first, tolerance=1e-4 if formats["backend"] == "reference" else 0.0)


def test_a_sleep_finds_them_too(model: Path, tmp_path: Path) -> None:
    with engine(model, tmp_path) as llm:
        first, _ = answers(llm)
        llm.sleep(2)
        assert answers(llm) == (first, [CACHED] * 3)


def test_other_formats_and_roots_have_blocks_of_their_own(model: Path, tmp_path: Path) -> None:
    with engine(model, tmp_path) as llm:
        answers(llm)
    with engine(model, tmp_path, kv_cache_dtype="f32", dtype="f32") as llm:
        assert answers(llm)[1] == [0] * 3
    with engine(model, tmp_path) as llm:
        assert llm.kv_disk is not None
        assert llm.kv_disk.wanted(PROMPTS[0], b"") is not None
        assert llm.kv_disk.wanted(PROMPTS[0], b"another key") is None


def test_short_prompts_are_not_kept(model: Path, tmp_path: Path) -> None:
    with engine(model, tmp_path, kv_disk_min=91) as llm:
        answers(llm)
        assert llm.kv_disk is not None
        assert llm.kv_disk.counts == {"written": 0, "read": 0, "dropped": 0}


def test_nothing_is_read_that_is_computed_sooner(model: Path, tmp_path: Path) -> None:
    with engine(model, tmp_path) as llm:
        answers(llm)
    with engine(model, tmp_path) as llm:
        assert llm.kv_disk is not None
        llm.kv_disk._tokens_per_s = 1e12
        assert answers(llm)[1] == [0] * 3


def test_a_prompt_that_goes_on_reads_what_memory_lacks(model: Path, tmp_path: Path) -> None:
    with engine(model, tmp_path) as llm:
        first, _ = answers(llm)
    with engine(model, tmp_path) as llm:
        begin = SamplingParams(max_tokens=1)
        llm.generate([PROMPTS[0][:40]], begin, progress=False)
        assert answers(llm) == (first, [CACHED] * 3)


def test_what_a_shorter_prompt_left_is_kept_too(model: Path, tmp_path: Path) -> None:
    with engine(model, tmp_path, kv_disk_min=64) as llm:
        llm.generate([PROMPTS[0][:40]], GREEDY, progress=False)
        assert answers(llm)[1] == [32, 0, 0]
    with engine(model, tmp_path, kv_disk_min=64) as llm:
        assert answers(llm)[1] == [CACHED] * 3


def test_a_prompt_goes_on_behind_the_last_state(recurrent: Path, tmp_path: Path) -> None:
    longer = PROMPTS[0] + PROMPTS[1][:20]
    with engine(recurrent, None) as llm:
        (alone,) = llm.generate([longer], GREEDY, progress=False)
    with engine(recurrent, tmp_path) as llm:
        llm.generate([PROMPTS[0]], GREEDY, progress=False)
    for cached in (CACHED, 96):  # behind the shorter prompt, and then behind itself
        with engine(recurrent, tmp_path) as llm:
            (found,) = llm.generate([longer], GREEDY, progress=False)
            assert found.outputs[0] == alone.outputs[0]
            assert found.num_cached_tokens == cached
            assert llm.kv_disk is not None
            assert llm.kv_disk.counts["read"] == cached // 16 + 1


def test_memory_that_has_blocks_and_no_state_reads_it(recurrent: Path, tmp_path: Path) -> None:
    with engine(recurrent, tmp_path) as llm:
        first, _ = answers(llm)
        slots = llm.engine.scheduler.queues.kv.states
        assert slots is not None
        slots.retract()
        assert answers(llm) == (first, [CACHED] * 3)
        assert llm.kv_disk is not None
        assert llm.kv_disk.counts["read"] == 3


def test_a_cache_that_is_too_small_takes_what_fits(model: Path, tmp_path: Path) -> None:
    with engine(model, tmp_path) as llm:
        first, _ = answers(llm)
        size = llm.config.kv_bytes // llm.config.num_blocks
    with engine(model, tmp_path, kv_cache_memory=str(7 * size), max_model_len=98) as llm:
        assert answers(llm) == (first, [CACHED] * 3)


def test_damaged_files_change_no_answer(recurrent: Path, tmp_path: Path) -> None:
    dice = Random(5)
    with engine(recurrent, tmp_path) as llm:
        first, _ = answers(llm)
    files = {path: path.read_bytes() for path in sorted(tmp_path.glob("*/*.kv"))}
    assert len(files) == 2, "of blocks and of states"
    for number in range(12):
        for path, whole in files.items():
            path.write_bytes(whole)
        path = [*files][number % 2]
        data = bytearray(files[path])
        for _ in range(dice.choice((1, 3, 200))):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(data[: dice.choice((len(data), dice.randrange(len(data))))])
        with engine(recurrent, tmp_path) as llm:
            assert answers(llm)[0] == first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_disk": "nowhere"}, "write PATH:SIZE"),
        ({"kv_disk": "{}:much"}, "is not a size"),
        ({"kv_disk": "{}:10"}, "give at least"),
        ({"kv_disk": "{}/file:1GiB"}, "File exists|Not a directory"),
        ({"kv_disk": "{}:1GiB", "trace": "{}/trace"}, "cannot be used together"),
        ({"kv_disk": "{}:1GiB", "enable_prefix_caching": False}, "prefix caching"),
        ({"kv_disk": "{}:1GiB", "kv_disk_min": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_is_said_at_the_start(
    model: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    (tmp_path / "file").write_text("x")
    given = {
        name: value.format(tmp_path) if isinstance(value, str) else value
        for name, value in options.items()
    }
    with pytest.raises(ValueError, match=message):
        engine(model, None, **given)


KILLED = """
import sys
from pathlib import Path
from tests.engine.kv_disk.test_cache_tier import answers, engine
print("begun", flush=True)
with engine(Path(sys.argv[1]), Path(sys.argv[2])) as llm:
    while True:
        print(answers(llm)[1], flush=True)
        llm.sleep(1)
"""


@pytest.mark.parametrize(
    ("kind", "num_kills"),
    [
        ("recurrent", 3),
        pytest.param("recurrent", 50, marks=pytest.mark.full),
        pytest.param("model", 50, marks=pytest.mark.full),
    ],
)
def test_a_process_that_is_killed_leaves_no_wrong_answer(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, num_kills: int
) -> None:
    dice, model = Random(9), request.getfixturevalue(kind)
    with engine(model, None) as llm:
        alone, _ = answers(llm)
    for number in range(num_kills):
        folder = tmp_path / str(number % 5)
        command = [sys.executable, "-c", KILLED, str(model), str(folder)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with started(command, **pipes) as process:
            assert process.stdout is not None
            for _ in range(dice.randint(1, 3)):
                assert process.stdout.readline(), "it could not start"
            time.sleep(dice.random() * 0.3)  # any moment will do
        with engine(model, folder) as llm:
            assert answers(llm)[0] == alone


def test_without_the_flag_nothing_of_it_is_loaded(model: Path) -> None:
    code = "import sys; from pathlib import Path\n"
    code += "from tests.engine.kv_disk.test_cache_tier import LLM\n"
    code += "LLM(Path(sys.argv[1]), kv_cache_memory='1MiB', threads=1).close()\n"
    code += (
        "print(sorted(name for name in sys.modules if 'kv_disk.' in name and 'tests' not in name))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
