"""Whole files: each target loads and is near its source, adapters are merged, faults leave none."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from ridgeline.backends.reference import run_observed
from ridgeline.engine.quantise.imatrix import read_imatrix, write_imatrix
from ridgeline.engine.quantise.job import QuantisedFile, QuantiseOptions, quantise_file
from ridgeline.engine.quantise.source import additions, read_source
from ridgeline.engine.quantise.targets import TARGETS, main_type
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.gguf.file import read_gguf
from ridgeline.model.files.tensors import Checkpoint, ModelFileError
from tests.lora import merged, random_pairs, write_gguf_adapter, write_peft
from tests.model.files.tiny import (
    CONFIG,
    Raw,
    converted,
    gguf_metadata,
    gguf_weights,
    hf_weights,
    vocabulary,
    write_gguf,
)

WIDE = CONFIG | {"hidden_size": 256, "intermediate_size": 512}
MOST = {"q4_k_m": 0.09, "q5_k_m": 0.05, "q6_k": 0.025, "q8_0": 0.012, "q4_0": 0.12}
WINDOWS = [tuple(np.random.default_rng(i).integers(5, 40, 64)) for i in range(8)]


def model(path: Path, raw: Raw | None = None, **changes: object) -> Path:
    raw = gguf_weights(WIDE, "llama") if raw is None else raw
    metadata = gguf_metadata(WIDE, "llama") | vocabulary() | changes
    return write_gguf(path, metadata, raw, "F16")


def quantised(source: Path, out: Path, target: str, **options: object) -> QuantisedFile:
    wanted = {"windows": (), "importance": {}, "added": {}, "threads": 2} | options
    return quantise_file(
        read_source(source), out, QuantiseOptions(target, **wanted), lambda *_: None
    )  # type: ignore[arg-type]


def lost(found: Checkpoint, wanted: Checkpoint) -> float:
    """The largest share of a matrix's size that is lost."""
    return max(
        float(np.linalg.norm(tensor.to_f32() - wanted.tensors[name].to_f32()))
        / float(np.linalg.norm(wanted.tensors[name].to_f32()))
        for name, tensor in found.tensors.items()
    )


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("target", TARGETS)
def test_each_target_is_near_its_source(target: str, calibrated: bool, tmp_path: Path) -> None:
    source, out = model(tmp_path / "a.gguf"), tmp_path / "b.gguf"
    done = quantised(source, out, target, windows=WINDOWS if calibrated else ())
    metadata, raw = read_gguf(out)
    assert metadata["general.file_type"] == TARGETS[target]
    assert raw["blk.0.attn_q.weight"].dtype == main_type(target)
    assert out.stat().st_size == done.num_bytes
    assert len(gguf.GGUFReader(out).tensors) == len(raw)
    share = lost(load_checkpoint(out), load_checkpoint(source))
    assert MOST[target] / 3 < share < MOST[target] * (1.6 if calibrated else 1)
    assert (done.calibrated > 0) == (calibrated and target != "q8_0")


def test_each_matrix_is_calibrated_by_what_those_before_it_have_become(tmp_path: Path) -> None:
    path, out = model(tmp_path / "a.gguf"), tmp_path / "b.gguf"
    spreads = quantised(path, out, "q4_0", windows=WINDOWS).spreads

    embed = load_checkpoint(path).tensors["embed"]  # which is written last

    def inputs(file: Path) -> dict[str, NDArray[np.float32]]:
        """Return mean squares of what a file's matrices read."""
        source, found = read_source(file), {}

        def note(layer: int, weight: Any, rows: Any, *names: str) -> Any:
            for name in names:
                found[source.places[f"layers.{layer}.{name}"].name] = np.square(rows).mean(axis=0)
            return weight

        tensors = {**source.checkpoint.tensors, "embed": embed}
        run_observed(replace(source.checkpoint, tensors=tensors), WINDOWS, 1, note)
        return found

    after, before = inputs(out), inputs(path)
    assert after.keys() == spreads.keys()
    for name, squares in spreads.items():
        np.testing.assert_allclose(squares, after[name], rtol=1e-3, atol=1e-6)
    for name in ("blk.0.attn_output.weight", "blk.0.ffn_down.weight", "blk.1.attn_q.weight"):
        assert np.abs(spreads[name] / before[name] - 1).max() > 0.02


@pytest.mark.parametrize("target", ["q8_0", "q4_0"])
def test_plain_types_are_those_of_the_reference_quantiser(target: str, tmp_path: Path) -> None:
    source, out = model(tmp_path / "a.gguf"), tmp_path / "b.gguf"
    quantised(source, out, target)
    _, before = read_gguf(source)
    _, after = read_gguf(out)
    name, kind = "blk.1.ffn_down.weight", gguf.GGMLQuantizationType[target.upper()]
    wanted = gguf.quants.quantize(before[name].to_f32(), kind)
    assert (after[name].data == wanted).all()
    assert (after["output_norm.weight"].data == before["output_norm.weight"].data).all()


def shapes(names: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    found = hf_weights(WIDE)
    return {
        name.removesuffix(".weight"): array.shape
        for name, array in found.items()
        if name.endswith(tuple(f"{part}.weight" for part in names))
    }


def test_an_adapter_is_merged_as_if_it_had_been_trained_into_the_weights(tmp_path: Path) -> None:
    pairs = random_pairs(shapes(("q_proj", "k_proj", "o_proj", "down_proj")))
    adapter = write_peft(tmp_path / "adapter", pairs, lora_alpha=8)
    source = model(tmp_path / "a.gguf")
    added = additions(adapter, read_source(source))
    assert len(added) == 8
    quantised(source, tmp_path / "b.gguf", "q8_0", added=added)
    by_hand = merged(hf_weights(WIDE), pairs, 2.0)
    wanted = model(tmp_path / "c.gguf", converted(by_hand, WIDE, "llama"))
    assert lost(load_checkpoint(tmp_path / "b.gguf"), load_checkpoint(wanted)) < 0.012


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    pairs = random_pairs({"blk.0.attn_q.weight": (32, 32)})
    adapter = write_gguf_adapter(tmp_path / "adapter.gguf", "llama", pairs, 4.0)
    with pytest.raises(ModelFileError, match="is the adapter for this model"):
        additions(adapter, read_source(model(tmp_path / "a.gguf")))


def test_importance_is_written_and_read_and_changes_what_is_kept(tmp_path: Path) -> None:
    source = model(tmp_path / "a.gguf")
    done = quantised(source, tmp_path / "b.gguf", "q4_k_m", windows=WINDOWS)
    write_imatrix(tmp_path / "i.gguf", done.spreads, 512, "text")
    found = read_imatrix(tmp_path / "i.gguf", read_source(source).raw)
    assert found.keys() == done.spreads.keys()
    for name, mean in found.items():
        np.testing.assert_allclose(mean, done.spreads[name], rtol=1e-4, atol=1e-5)
    weighed = quantised(source, tmp_path / "c.gguf", "q4_k_m", importance=found)
    assert weighed.calibrated == done.calibrated
    _, before = read_gguf(source)
    quantised(source, tmp_path / "d.gguf", "q4_k_m")
    errors = []
    for path in ("c.gguf", "d.gguf"):
        name = "blk.0.ffn_down.weight"
        change = read_gguf(tmp_path / path)[1][name].to_f32() - before[name].to_f32()
        errors.append(float((found[name] * change**2).sum()))
    assert errors[0] < errors[1]


def test_an_importance_matrix_of_another_model_is_refused(tmp_path: Path) -> None:
    raw = read_source(model(tmp_path / "a.gguf")).raw
    for name, width, words in (
        ("blk.9.attn_q.weight", 256, "the model has not"),
        ("blk.0.attn_q.weight", 64, "64 inputs there, and 256"),
    ):
        write_imatrix(tmp_path / "i.gguf", {name: np.ones(width, np.float32)}, 10, "t")
        with pytest.raises(ModelFileError, match=words):
            read_imatrix(tmp_path / "i.gguf", raw)
    with pytest.raises(ModelFileError, match="no importance matrix"):
        read_imatrix(tmp_path / "a.gguf", raw)


@pytest.mark.parametrize("calibrated", [False, True])
def test_weights_that_are_not_finite_are_named_and_leave_no_file(
    calibrated: bool, tmp_path: Path
) -> None:
    raw = gguf_weights(WIDE, "llama")
    raw["blk.1.ffn_up.weight"][3, :32] = np.inf
    out = tmp_path / "out" / "b.gguf"
    out.parent.mkdir()
    with np.errstate(all="ignore"):
        source = model(tmp_path / "a.gguf", raw)
    with pytest.raises(ValueError, match=r"not finite"), np.errstate(all="ignore"):
        quantised(source, out, "q4_k_m", windows=WINDOWS if calibrated else ())
    assert list(out.parent.iterdir()) == []


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    source, out = model(tmp_path / "a.gguf"), tmp_path / "out" / "b.gguf"
    out.parent.mkdir()
    out.write_text("before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            quantised(source, out, "q8_0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in out.parent.iterdir()] == ["b.gguf"]
    assert out.read_text() == "before"
