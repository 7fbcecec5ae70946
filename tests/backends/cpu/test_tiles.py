"""Products by matrix tiles: the bits of the twin, by AMX and by an emulated tile unit."""

from __future__ import annotations

import platform
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from llvmlite import ir

from ridgeline.backends.cpu.kernels.tiles import Emulated, emit_linear_tiles
from ridgeline.system.machine import tiles_refusal
from tests.backends.cpu.machine import TARGETS, Machine, at, build, same_bits
from tests.backends.cpu.test_gemm import (
    GARBAGE,
    NOWHERE,
    RECORDS,
    TILES,
    activations,
    packed,
    wanted,
)
from tests.engine.test_llm import write_model
from tests.tile_grants import REFUSALS, output_of

UNITS = ["amx", *TARGETS]
HAS_TILES = TARGETS["host"].processor.has_tiles


@pytest.fixture(scope="module", params=UNITS)
def machine(request: pytest.FixtureRequest) -> Machine:
    """``linear_tiles`` by the unit of this processor, or emulated on each."""
    if request.param == "amx":
        if not HAS_TILES:
            pytest.skip(f"no matrix tiles here: {tiles_refusal()}")
        return build(emit_linear_tiles)
    form = TARGETS[request.param].processor.dot

    def emit(module: ir.Module) -> None:
        emit_linear_tiles(module, partial(Emulated, form=form))

    return build(emit, request.param)


@pytest.mark.parametrize("num_rows", [16, 17, 31, 32, 33, 48, 50, 300])
@pytest.mark.parametrize("tiles", [(0, TILES), (1, 3)])
def test_the_bits_are_the_twins(machine: Machine, num_rows: int, tiles: tuple[int, int]) -> None:
    """In all rows of the tiles that were asked for; what is beside them stays."""
    x, act_scales = activations("r8", RECORDS["r8"])
    y = at(np.full((num_rows, TILES * 32 + 16), GARBAGE, np.float32))
    machine.run(
        "linear_tiles", packed("r8"), *tiles, RECORDS["r8"], num_rows, x, x.strides[0],
        act_scales, act_scales.strides[0], y, y.strides[0], NOWHERE,
    )  # fmt: skip
    mine = slice(32 * tiles[0], 32 * tiles[1])
    assert same_bits(y[:, mine].copy(), wanted("r8")[:num_rows, mine].copy())
    y[:, mine] = GARBAGE
    assert (y == GARBAGE).all()


is_asked = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="only Linux is asked"
)
_SAID = """
from pathlib import Path
from ridgeline.backends.cpu.kernels.compile import host_target
from ridgeline.cli.commands.doctor import facts
print(host_target().processor.has_tiles, dict(facts(Path.home()))["matrix tiles"])
"""
_ANSWERS = """
from ridgeline import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=1)
prompts = ["Once upon a time there was a long prompt of many small pieces.", "Hello"] * 3
with LLM({path!r}, dtype="int8-row", kv_cache_memory="1MiB", threads=2) as llm:
    for result in llm.generate(prompts, params, progress=False):
        print(result.prompt_logprobs, [(o.token_ids, o.logprobs) for o in result.outputs])
"""


@is_asked
@pytest.mark.parametrize("how", REFUSALS)
def test_doctor_says_why_tiles_are_refused(how: str) -> None:
    """And kernels are compiled without them: the first tile would end the process."""
    before, reason = REFUSALS[how]
    has_tiles, said = output_of(_SAID, before=before).split(maxsplit=1)
    assert has_tiles == "False"
    assert "not used: " in said
    assert reason in said or not HAS_TILES  # where there are none Linux says that


def test_doctor_says_that_tiles_are_granted() -> None:
    has_tiles, said = output_of(_SAID).split(maxsplit=1)
    assert (has_tiles == "True") == HAS_TILES
    assert said.startswith("granted" if HAS_TILES else "not used: ")


@is_asked
def test_a_refused_process_answers_the_same(tmp_path: Path) -> None:
    """With the kernels' cache of one that was granted them."""
    body = _ANSWERS.format(path=str(write_model(tmp_path / "tiny")))
    answers = output_of(body)
    assert len(answers.splitlines()) == 6
    before, _ = REFUSALS["a filter of system calls"]
    assert output_of(body, before=before) == answers
