"""Rope tables: close to the truth, and the same bits with any instructions of the processor."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tools.record_rope_tables import CONFIGS, HEAD_DIM, PATH, digests, rope_of

from ridgeline.model.files.rope_tables import cos_and_sin, query_scales, rope_tables
from ridgeline.model.shape.model import Rope

RECORDED: dict[str, str] = json.loads(PATH.read_text())
FOUND = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])


def test_tables_are_what_was_recorded_once() -> None:
    assert digests() == RECORDED


@pytest.mark.parametrize(
    "environment",
    [
        {"NPY_DISABLE_CPU_FEATURES": " ".join(FOUND)},
        {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX2,-AVX,-FMA,-FMA4"},
    ],
    ids=["numpy", "the C library"],
)
def test_tables_do_not_depend_on_what_the_processor_can(environment: dict[str, str]) -> None:
    code = "import json; from tools.record_rope_tables import digests; print(json.dumps(digests()))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[3],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(found.stdout) == RECORDED


@pytest.mark.parametrize("name", CONFIGS)
def test_an_entry_is_the_cosine_of_position_times_frequency(name: str) -> None:
    rope, num_positions = rope_of(name), 700
    cos, sin = rope_tables(rope, num_positions)
    assert cos.shape == sin.shape == (num_positions, rope.dim // 2)
    assert cos.dtype == sin.dtype == np.float32
    assert rope.dim in (HEAD_DIM, HEAD_DIM * 3 // 4)
    divisors = rope.divisors_for(num_positions)
    for position in (0, 1, 2, 255, 256, 699):
        for pair, divisor in enumerate(divisors):
            angle = position * rope.theta ** (-2 * pair / rope.dim) / divisor
            for table, function in ((cos, math.cos), (sin, math.sin)):
                wanted = np.float32(function(angle) * rope.attention_factor)
                assert table[position, pair] == pytest.approx(wanted, rel=1.3e-7, abs=1e-12)


def test_longer_tables_begin_with_shorter_ones() -> None:
    rope = Rope(10_000.0, 128)
    for short, long in zip(rope_tables(rope, 300), rope_tables(rope, 1000), strict=True):
        assert (short == long[:300]).all()


def test_cosine_and_sine_are_within_an_ulp_of_one_in_every_quarter() -> None:
    rng = np.random.default_rng(0)
    multiples = np.arange(1, 100_000) * (math.pi / 4)
    angles = np.concatenate([[0.0], rng.uniform(0, 2**20, 100_000), rng.random(1000), multiples])
    for ours, function in zip(cos_and_sin(angles), (math.cos, math.sin), strict=True):
        exact = np.array([function(angle) for angle in angles.tolist()])
        assert np.abs(ours - exact).max() < 2.0**-51
        assert np.abs(ours).max() <= 1
        same = ours.astype(np.float32) == exact.astype(np.float32)
        assert np.count_nonzero(~same) <= 1  # one in 300,000 may be on the edge between two floats


def test_queries_grow_by_the_logarithm_of_how_often_the_context_was_filled() -> None:
    scales = query_scales(Rope(1e4, 8, original_max_position=4, query_growth=0.5), 13)
    assert scales.dtype == np.float32
    wanted = [1 + 0.5 * math.log(1 + position // 4) for position in range(13)]
    np.testing.assert_allclose(scales, wanted, rtol=1e-7)
    assert scales[:4].tolist() == [1.0] * 4
