"""The profile on a random model: what is counted, that it adds up, and the picture. No speeds."""

from __future__ import annotations

import ctypes
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ridgeline import LLM, SamplingParams
from ridgeline.backends.arrays import address
from ridgeline.backends.cpu.kernels import threads
from ridgeline.backends.cpu.kernels.clock import KINDS, CycleCounters
from ridgeline.backends.cpu.kernels.compile import assembly, host_target
from ridgeline.backends.cpu.measure.roofs import Rates, Roof
from ridgeline.backends.cpu.runner import CpuRunner
from ridgeline.backends.interface import Traffic
from ridgeline.bench import offline as profiling
from ridgeline.bench.offline import (
    BenchShape,
    Phase,
    RooflinePoint,
    attainable_ops_per_s,
    measure_phase,
    profile,
    roofline_svg,
)
from ridgeline.core.records import StepRecord
from tests.bench.test_offline import EMPTY
from tests.model.files.tiny import CONFIG, hf_weights
from tests.model.files.vocabularies import byte_level
from tests.tiny import ARCHS, checkpoint, new_setup
from tests.waiting import eventually

SVG = "{http://www.w3.org/2000/svg}"
VOCAB = 410
_RATES = Rates(1e12, 1e15, None, 1e14)  # far above what any test reaches
RNG = random.Random(1)  # one for all: no prompt comes twice, none is in the prefix cache
ROOF = Roof(2, _RATES, _RATES)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "random<b>"
    path.mkdir()
    config = CONFIG | {"vocab_size": VOCAB, "eos_token_id": 0, "bos_token_id": None}
    save_file(hf_weights(config), path / "model.safetensors")
    files: dict[str, Any] = {
        "config": config,
        "tokenizer": byte_level(),
        "tokenizer_config": {"add_bos_token": False},
    }
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, kv_cache_memory="1MiB", threads=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def runner(llm: LLM) -> CpuRunner:
    assert isinstance(llm.runner, CpuRunner)
    return llm.runner


@pytest.fixture(scope="module")
def counters(runner: CpuRunner) -> CycleCounters:
    return runner.profile()


def measured(llm: LLM, counters: CycleCounters, shape: BenchShape, is_prefill: bool) -> Phase:
    return measure_phase(llm, counters, shape, RNG, is_prefill=is_prefill)


def settled(runner: CpuRunner, counters: CycleCounters) -> Mapping[str, NDArray[np.int64]]:
    """What was counted, once the worker sleeps until the next step: it noted the last one's end."""
    sync = address(runner._buffers.scratch["sync"])
    num_asleep = ctypes.c_int32.from_address(sync + threads._CALL_SLEEPERS)
    eventually(lambda: num_asleep.value == 1)
    return counters.take()


# --- counting ----------------------------------------------------------------------------------


def test_only_profiled_kernels_read_the_clock(runner: CpuRunner) -> None:
    def source(profiled: bool) -> str:
        sizes = replace(runner.sizes, profiled=profiled)
        return assembly(sizes, runner.weights.kinds, 1e-5, host_target())

    assert "counter" not in source(False)
    assert "counter" in source(True)


def test_profiled_kernels_give_the_same_answer(path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3)
    prompts = [list(range(3, 3 + n)) for n in (1, 5, 40)]
    with LLM(path, kv_cache_memory="1MiB", threads=2) as llm:
        assert isinstance(llm.runner, CpuRunner)
        before = llm.generate(prompts, params, progress=False)
        llm.runner.profile()
        after = llm.generate(prompts, params, progress=False)
    assert [a.outputs for a in before] == [b.outputs for b in after]


@pytest.mark.parametrize("length", [1, 30])
def test_each_threads_kinds_add_up_to_its_step(
    llm: LLM, runner: CpuRunner, counters: CycleCounters, length: int
) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    settled(runner, counters)
    llm.generate([list(range(3, 3 + length))], params, progress=False)
    cycles = settled(runner, counters)
    assert tuple(cycles) == KINDS
    *parts, step, experts = KINDS  # this model has none of these
    counted = sum(cycles[kind] for kind in parts)
    assert all(cycles[kind].min() > 0 for kind in (*parts, step))
    assert not cycles[experts].any()
    assert (counted <= cycles["step"]).all()
    assert (counted > cycles["step"] // 10).all()
    assert not any(kind.any() for kind in settled(runner, counters).values())  # taken


def test_a_cycle_is_a_steady_fraction_of_a_second(counters: CycleCounters) -> None:
    first, second = counters.seconds_per_cycle(), counters.seconds_per_cycle()
    assert 1e-11 < first < 1e-6
    assert first == pytest.approx(second, rel=0.05)


# --- phases ------------------------------------------------------------------------------------

SHAPES = [
    (BenchShape("single", 1, 20, 12), False),
    (BenchShape("some", 5, 20, 6), False),
    (BenchShape("one token", 1, 1, 3), False),
    (BenchShape("prefill", 1, 60, 2), True),
]


@pytest.mark.parametrize(("shape", "is_prefill"), SHAPES)
def test_seconds_add_up_to_the_span(
    llm: LLM, counters: CycleCounters, shape: BenchShape, is_prefill: bool
) -> None:
    phase = measured(llm, counters, shape, is_prefill)
    assert all(seconds >= 0 for seconds in phase.seconds.values())
    assert sum(phase.seconds.values()) == pytest.approx(phase.span_s, rel=0.1)
    assert {"linears", "head", "attention", "schedule", "detokenise"} < set(phase.seconds)
    if is_prefill:
        assert phase.num_tokens == shape.prompt_tokens * phase.num_steps
    else:
        assert phase.num_steps == shape.new_tokens - 1
        assert phase.num_tokens == shape.num_streams * phase.num_steps


def test_traffic_is_what_the_weights_and_the_cache_are(
    llm: LLM, counters: CycleCounters, runner: CpuRunner
) -> None:
    shape = BenchShape("single", 1, 20, 3)
    traffic = measured(llm, counters, shape, False).traffic
    arch, steps = llm.arch, 2
    assert runner.weights.proxy is not None
    assert traffic["head"].read_bytes == steps * runner.weights.proxy.data.nbytes
    assert traffic["head"].ops == steps * 2 * arch.vocab_size * arch.hidden_size
    arrays = runner.weights.arrays
    outside = sum(
        arrays[name].data.nbytes for name in ("head", "proxy", "distances", "embedding", "norm")
    )
    packed = sum(array.data.nbytes for array in arrays.values()) - outside
    assert traffic["linears"].read_bytes == steps * packed
    record = runner.sizes.kinds[0].heads.record_bytes / 16  # with padding and scales
    positions = (20 + 1) + (20 + 2)
    mixer = arch.layers[0].mixer
    wanted = positions * record * mixer.num_kv_heads * arch.num_layers
    assert traffic["attention"].read_bytes == pytest.approx(wanted, abs=steps)


def test_a_prompt_leaves_most_of_the_last_layer_out(llm: LLM, counters: CycleCounters) -> None:
    arch = llm.arch
    phase = measured(llm, counters, BenchShape("prefill", 1, 40, 1), True)
    mixer = arch.layers[0].mixer
    keys_and_values = 2 * mixer.num_kv_heads * mixer.head_dim * arch.hidden_size
    queries = mixer.num_heads * mixer.head_dim * arch.hidden_size
    rest = queries + 3 * arch.layers[0].ffn.size * arch.hidden_size  # o is as large as q
    layer = keys_and_values + queries + rest
    wanted = 40 * ((arch.num_layers - 1) * layer + keys_and_values + queries) + rest
    assert phase.traffic["linears"].ops == phase.num_steps * 2 * wanted


def test_the_roof_is_the_lower_of_memory_and_arithmetic() -> None:
    roof = Roof(1, Rates(1.0, 1.0, None, 1.0), Rates(10e9, 800e9, None, 200e9))
    assert attainable_ops_per_s(Traffic(100, 300, "int8"), roof) == 30e9
    assert attainable_ops_per_s(Traffic(1, 300, "int8"), roof) == 800e9
    assert attainable_ops_per_s(Traffic(1, 300, "f32"), roof) == 200e9
    assert attainable_ops_per_s(Traffic(1, 300, "bf16"), roof) == 200e9  # there is no roof for it


@pytest.mark.parametrize(
    ("options", "forms"),
    [
        ({}, ("int8", "int8", "int8")),
        ({"dtype": "f32"}, ("f32", "f32", "f32")),
        ({"dtype": "f32", "kv_cache_dtype": "int8"}, ("f32", "f32", "int8")),
        ({"dtype": "bf16", "kv_cache_dtype": "f16"}, ("bf16", "bf16", "f32")),
    ],
)
def test_work_is_set_against_the_roof_of_what_it_multiplies(
    path: Path, options: dict[str, Any], forms: tuple[str, ...]
) -> None:
    records: list[StepRecord] = []
    with LLM(path, kv_cache_memory="1MiB", threads=1, **options) as llm:
        llm.engine.listeners.append(
            lambda r: records.append(r) if isinstance(r, StepRecord) else None
        )
        llm.generate([[5, 6]], SamplingParams(max_tokens=2), progress=False)
        found = llm.runner.traffic(records[0])
    assert tuple(found[kind].form for kind in ("linears", "head", "attention")) == forms


def test_experts_that_no_row_met_count_as_not_read(tmp_path: Path) -> None:
    runner = CpuRunner(
        checkpoint(ARCHS["experts"]),
        new_setup(
            dtype="f32",
            kv_cache_dtype="f32",
            num_blocks=4,
            block_size=16,
            max_model_len=64,
            max_num_batched_tokens=64,
            threads=1,
        ),
        kernel_cache=tmp_path,
    )
    step = replace(EMPTY, work=(((0, 0), 3, 1),), sampled=((1,),))
    read = [runner.traffic(step, met)["linears"].read_bytes for met in (0, 4, 10, None)]
    runner.close()
    none, met, every, likely = read  # one row meets 2 of 5 in both layers
    assert none < met == likely < every
    assert every - none == pytest.approx(2.5 * (met - none), rel=1e-6)


def test_guesses_are_counted_apart_from_what_lasts(path: Path) -> None:
    config = {"method": "lookahead", "num_speculative_tokens": 4, "always": True}
    with LLM(path, kv_cache_memory="1MiB", threads=2, speculative_config=config) as llm:
        assert isinstance(llm.runner, CpuRunner)
        phase = measured(llm, llm.runner.profile(), BenchShape("single", 1, 20, 100), False)
    assert 0 <= phase.num_accepted_tokens < phase.num_draft_tokens
    assert phase.num_lasting_tokens == 99
    assert phase.num_tokens == 99 + phase.num_draft_tokens - phase.num_accepted_tokens


# --- what is printed and drawn -----------------------------------------------------------------


def test_the_command_prints_a_table_draws_a_picture_and_ends_with_json(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "measure_roof", lambda threads, report: ROOF)
    picture = tmp_path / "picture.svg"
    with LLM(path, kv_cache_memory="1MiB", threads=2, max_num_seqs=6) as llm:
        profile(llm, prompt_tokens=20, new_tokens=5, picture=picture)
    lines = capsys.readouterr().out.splitlines()
    for words in ("decode, 1 stream", "decode, 6 streams", "prefill, 126 tokens", "  attention"):
        assert any(line.startswith(words) for line in lines), words
    facts = json.loads(lines[-1])
    for phase in facts["phases"].values():
        assert sum(kind["share"] for kind in phase["kinds"].values()) == pytest.approx(1, abs=0.1)
        for name in ("linears", "head", "attention"):
            assert 0 < phase["kinds"][name]["share_of_roof"] < 1
        assert "gb_per_s" not in phase["kinds"]["barrier"]
    image = ElementTree.parse(picture).getroot()
    assert len(image.findall(f"{SVG}circle")) == 3 + 9  # the legend, and three kinds thrice
    assert f"{path.name}, 2 threads" in [text.text for text in image.findall(f"{SVG}text")]


def test_the_reference_backend_has_nothing_to_look_into(path: Path, tmp_path: Path) -> None:
    with LLM(path, backend="reference", kv_cache_memory="1MiB") as llm:
        with pytest.raises(ValueError, match="reference backend counts no cycles"):
            profile(llm, prompt_tokens=20, new_tokens=5, picture=tmp_path / "x.svg")
        assert not list(tmp_path.iterdir())


def test_a_shape_that_does_not_fit_is_refused_before_measuring(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--max-model-len 128"):
        profile(llm, prompt_tokens=120, new_tokens=9, picture=tmp_path / "x.svg")


def test_the_picture_has_every_dot_inside_and_no_label_over_another() -> None:
    rng = np.random.default_rng(0)
    dots = [
        RooflinePoint(
            label, f"series {series}", 10 ** rng.uniform(-1, 3.5), 10 ** rng.uniform(9, 12.5)
        )
        for series in "abc"
        for label in ("linears", "head", "attention")
    ]
    dots.append(replace(dots[0], series="on top of & another"))
    image = ElementTree.fromstring(roofline_svg("a < b", dots, 4e10, {"int8": 2e12, "f32": 5e11}))
    width, height = float(image.attrib["width"]), float(image.attrib["height"])
    circles = image.findall(f"{SVG}circle")
    assert len(circles) == len(dots) + 4
    assert all(0 < float(c.attrib["cx"]) < width for c in circles)
    assert all(0 < float(c.attrib["cy"]) < height for c in circles)
    coloured = [
        t for t in image.findall(f"{SVG}text") if t.text in ("linears", "head", "attention")
    ]
    boxes = [(float(t.attrib["x"]), float(t.attrib["y"]), 7 * len(t.text or "")) for t in coloured]
    assert len(boxes) == len(dots)
    for i, (x, y, w) in enumerate(boxes):
        for a, b, c in boxes[:i]:
            assert x + w <= a or a + c <= x or abs(y - b) >= 12


def test_dots_on_the_roof_lie_on_its_lines() -> None:
    bandwidth, peak = 4e10, 2e12
    dots = [
        RooflinePoint("slope", "s", 2.0, 2 * bandwidth),
        RooflinePoint("level", "s", 500.0, peak),
    ]
    image = ElementTree.fromstring(roofline_svg("t", dots, bandwidth, {"int8": peak}))
    slope, level = image.findall(f"{SVG}circle")[-2:]
    lines = [
        {key: float(line.attrib[key]) for key in ("x1", "y1", "x2", "y2")}
        for line in image.findall(f"{SVG}line")
    ]
    rising = next(p for p in lines if p["x1"] != p["x2"] and p["y1"] != p["y2"])
    part = (float(slope.attrib["cx"]) - rising["x1"]) / (rising["x2"] - rising["x1"])
    at = rising["y1"] + part * (rising["y2"] - rising["y1"])
    assert float(slope.attrib["cy"]) == pytest.approx(at, abs=0.5)
    assert float(level.attrib["cy"]) == pytest.approx(rising["y2"], abs=0.5)
