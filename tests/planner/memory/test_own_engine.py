"""Our engine on a GPU: a plan says what the cuda backend counts, and refuses what that refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline.backends import cuda
from ridgeline.backends.interface import Setup
from ridgeline.model.cost.format_bytes import storage_of_dtype
from ridgeline.model.cost.hardware import Device
from ridgeline.model.cost.layers import shape_of_arch
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.families import arch_from_config
from ridgeline.model.shape.cache_groups import cache_groups
from ridgeline.model.shape.model import ModelArch
from ridgeline.planner import Plan, PlanFlags, plan
from ridgeline.planner.catalogue import devices
from ridgeline.planner.memory.model_spec import ModelSpec
from ridgeline.planner.memory.own_engine import computes_on
from ridgeline.planner.memory.placement import engine_on
from ridgeline.planner.plan import plan_for
from tests.answers.tiny_families import write_family
from tests.model.cost.published_configs import PUBLISHED
from tests.model.files.tiny import CONFIG, gguf_metadata, gguf_weights, vocabulary, write_gguf
from tests.tiny import ARCHS, ENCODERS, changed, checkpoint

LLAMA = PUBLISHED["llama-3.1-8b"]["config"]
NUM_LINEAR = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
NUM_HEAD, NUM_NORMS = 128256 * 4096, 65 * 4096


def ours(model: Any, on: str = "h100-sxm", **wishes: Any) -> Plan:
    return plan(model, on=on, engine="ridgeline", **wishes)


def sizes(found: Plan) -> dict[str, int]:
    return {line.name: line.num_bytes for line in found.best.ledger.lines}


def weights(found: Plan) -> dict[str, int]:
    lines = sizes(found).items()
    return {n.removeprefix("weights, "): size for n, size in lines if n.startswith("weights, ")}


def setup_of(arch: ModelArch, dtype: str, count: int = 1) -> Setup:
    """The setup of a server whose flags are left alone."""
    wanted = Setup(dtype, "auto", 16, 2, 4096, 256, 2048)
    wanted = replace(wanted, groups=cache_groups(arch), tensor_parallel_size=count)
    return cuda.settle(wanted, arch)


def read_model_spec(arch: ModelArch) -> ModelSpec:
    shape = shape_of_arch(arch, "tiny")
    return ModelSpec("tiny", shape, storage_of_dtype("bf16", shape), checkpoint=checkpoint(arch))


def written(folder: Path, name: str) -> Path:
    if name == "gguf":
        metadata = gguf_metadata(CONFIG, "llama") | vocabulary()
        return write_gguf(folder / "tiny.gguf", metadata, gguf_weights(CONFIG, "llama"))
    return write_family(folder / name, name)


@pytest.mark.parametrize("dtype", ["auto", "f32", "int8", "int4"])
@pytest.mark.parametrize("name", ["gguf", "gpt-oss", "kimi", "falcon-h1"])
def test_a_model_on_disk_takes_what_the_backend_counts(
    name: str, dtype: str, tmp_path: Path
) -> None:
    path = written(tmp_path, name)
    opened = load_checkpoint(path)
    setup = setup_of(opened.arch, dtype)
    footprint = cuda.footprint(opened.arch, setup)
    found = ours(path, dtype=dtype)
    lines, context = sizes(found), found.best.memory.context
    assert weights(found) == cuda.packed_bytes(opened, setup)
    assert lines["activations (2,048 tokens)"] == footprint.step_bytes
    assert lines.get("state of sequences", 0) == footprint.state_bytes_per_seq
    windows = [group.window or context for group in setup.groups]
    held = [min(context, -(-(window - 1) // 16) * 16 + 16) for window in windows]
    assert lines["KV cache"] == footprint.kv_bytes_per_token * sum(held)
    assert found.best.memory.kv_value_bytes == (4 if dtype == "f32" else 2)
    assert found.best.storage.name == setup.dtype


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "gpt-oss-20b", "gemma-2-9b"])
def test_of_a_config_a_rank_takes_what_the_backend_counts(name: str, count: int) -> None:
    config = PUBLISHED[name]["config"]
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    arch = arch_from_config(plain, {}, "config.json")
    setup = setup_of(arch, "int4", count)
    footprint = cuda.footprint(arch, setup)
    found = ours(config, dtype="int4", tensor_parallel_size=str(count))
    assert weights(found) == cuda.expected_bytes(arch, setup)
    assert sizes(found)["activations (2,048 tokens)"] == footprint.step_bytes
    assert found.best.ledger.further_token_bytes % footprint.kv_bytes_per_token == 0
    alone = ours(config, dtype="int4")
    assert found.best.whole.weights_bytes == alone.best.ledger.weights_bytes


@pytest.mark.parametrize(
    ("dtype", "linear", "head"),
    [("auto", 2, 2), ("f32", 4, 4), ("int8", 1 + 2 / 32, 1 + 2 / 32), ("int4", 5 / 8, 1 + 2 / 32)],
)
def test_a_config_is_planned_in_the_formats_of_the_backend(
    dtype: str, linear: float, head: float
) -> None:
    """Scales of packed weights stand beside each 32; the head has 8 bits, and norms are f32."""
    found, wide = ours(LLAMA, dtype=dtype), 4 if dtype == "f32" else 2
    by_part = weights(found)
    assert by_part["attention"] + by_part["mlp"] == NUM_LINEAR * linear
    assert (by_part["embedding"], by_part["head"]) == (NUM_HEAD * wide, NUM_HEAD * head)
    assert by_part["norms"] == 4 * NUM_NORMS
    assert found.best.ledger.kv_bytes == 4096 * 65536 * wide


def test_what_the_driver_takes_and_what_stays_free_are_the_backends_own() -> None:
    found = ours(LLAMA)
    lines, capacity = sizes(found), devices()["h100-sxm"].usable_bytes
    assert lines["driver, runtime and graphs"] == cuda.CONTEXT_BYTES
    assert lines["margin (2% of the device)"] == pytest.approx(cuda.KEPT_SHARE * capacity, abs=1)
    assert sum(lines.values()) == found.best.ledger.total_bytes
    assert "collectives" not in lines
    assert "collectives" in sizes(ours(LLAMA, tensor_parallel_size="2"))


def test_a_quantised_file_is_widened_unless_a_format_is_given() -> None:
    config = PUBLISHED["gpt-oss-20b"]["config"]
    found = ours(config)
    assert found.best.storage.name == "bf16"
    assert found.best.ledger.weights_bytes > 2 * 20e9
    assert any("weights in bf16" in line for line in found.assumptions)
    assert not any("weights in bf16" in line for line in ours(config, dtype="int8").assumptions)
    assert not any("weights in bf16" in line for line in ours(LLAMA).assumptions)


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"dtype": "fp8"}, "--dtype fp8: the cuda backend has bf16, f32, int8, int4"),
        ({"dtype": "int8-row"}, "--dtype int8-row: the cuda backend has"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8: the cuda backend has bf16 with"),
        ({"dtype": "f32", "kv_cache_dtype": "bf16"}, "cuda backend has f32 with --dtype f32"),
        ({"block_size": 8}, "--block-size is 8: the cuda backend needs a multiple of 16"),
        ({"pipeline_parallel_size": "2"}, "--pipeline-parallel-size 2: the cuda backend has no"),
        ({"tensor_parallel_size": "3"}, "--tensor-parallel-size 3 does not divide 32 heads"),
    ],
)
def test_what_the_backend_refuses_is_refused_by_name(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ours(LLAMA, **wishes)
    assert "\n" not in str(caught.value)


def test_ranks_that_do_not_divide_a_layer_are_refused_and_auto_skips_them() -> None:
    odd = LLAMA | {"intermediate_size": 14330}
    with pytest.raises(ValueError, match="4 does not divide 14330 inner channels"):
        ours(odd, tensor_parallel_size="4")
    found = ours(LLAMA, "rtx3080-10", tensor_parallel_size="auto", pipeline_parallel_size="auto")
    assert (found.best.memory.tp, found.best.memory.pp) == (4, 1)
    none = ours(odd, "rtx3080-10", tensor_parallel_size="auto", pipeline_parallel_size="auto")
    assert (none.best.memory.tp, none.best.ledger.fits) == (1, False)


@pytest.mark.parametrize("arch", ENCODERS.values(), ids=list(ENCODERS))
def test_encoders_are_refused_with_the_backends_reason(arch: ModelArch) -> None:
    spec = read_model_spec(arch)
    with pytest.raises(ValueError, match=r"has no models that read texts whole \(encoders\) yet"):
        plan_for(spec, PlanFlags(on="h100-sxm", engine="ridgeline"))
    found = plan_for(spec, PlanFlags(on="h100-sxm,l4,here", engine="ridgeline"))
    assert [one.device.id for one in found.placements] == ["here"]
    (line,) = [line for line in found.warnings if line.startswith("left out: ")]
    assert line.startswith("left out: h100-sxm, l4: --backend cuda has no models that read")


def test_what_is_said_to_help_does() -> None:
    found = ours(LLAMA, "rtx3080-10", dtype="f32").best
    assert not found.ledger.fits
    assert "--dtype int4" in found.would_help
    for flag in found.would_help:
        key, value = flag.removeprefix("--").replace("-", "_").split(" ")
        assert ours(LLAMA, "rtx3080-10", **{"dtype": "f32"} | {key: value}).best.ledger.fits, flag


def test_what_is_measured_and_what_is_not_is_said() -> None:
    new = "ridgeline has not been measured on any GPU yet"
    for device in ("l4", "h100-sxm/3g.40gb", "rtx5090"):
        assert any(new in line for line in ours(LLAMA, device).warnings)
    for device in ("mi300x", "tpu-v5e", "dgx-spark", "m4-max-128", "t4"):
        warnings = ours(LLAMA, device).warnings
        assert any(f"from Ampere on: on {device} this is" in line for line in warnings)
        assert not any(new in line for line in warnings)
    for wishes in ({"on": "l4"}, {"on": "cpu-epyc-9654", "engine": "ridgeline"}):
        assert not any("ridgeline" in line for line in plan(LLAMA, **wishes).warnings)
    (line,) = [one for one in ours(PUBLISHED["jamba-v0.1"]["config"]).warnings if "Jamba" in one]
    assert line.startswith("ridgeline does not know how it would run this model (config.json: ")


def test_generations_that_the_backend_computes_on_are_nvidias_alone() -> None:
    able = [device for device in devices().values() if computes_on(device)]
    assert len(able) > 50
    assert all(device.name.startswith("NVIDIA ") for device in able)
    refused = {device.id for device in devices().values()} - {device.id for device in able}
    assert {"t4", "v100-sxm2-16", "p40", "titan-rtx", "mi300x", "arc-b60", "gaudi3"} <= refused


def test_a_device_that_a_user_describes_counts_as_an_nvidia_gpu() -> None:
    found = ours(LLAMA, "mine", memory="24GiB", dtype="int4")
    assert "driver, runtime and graphs" in sizes(found)


def engine_name(spec: ModelSpec, device: Device, **wishes: Any) -> str:
    return engine_on(spec, device, PlanFlags(**wishes)).name


def test_a_gpu_here_runs_our_engine_once_it_has_passed() -> None:
    spec, known = read_model_spec(ARCHS["plain"]), devices()["h100-sxm"]
    passed = replace(known, has_passed=True)
    assert engine_name(spec, known) == "vllm"
    assert engine_name(spec, passed) == "ridgeline"
    assert engine_name(spec, passed, engine="sglang") == "sglang"
    assert engine_name(spec, passed, dtype="fp8") == "vllm"  # which the backend has not
    assert engine_name(read_model_spec(next(iter(ENCODERS.values()))), passed) == "vllm"
    jamba = plan(PUBLISHED["jamba-v0.1"]["config"], on="l4").spec
    assert engine_name(jamba, passed) == "vllm"


def test_a_model_with_windows_is_counted_by_its_groups() -> None:
    arch = changed(ARCHS["plain"], windows=(None, 64), max_position=4096)
    found = plan_for(read_model_spec(arch), PlanFlags(on="l4", engine="ridgeline"))
    groups = cache_groups(arch)
    of_token = cuda.footprint(arch, setup_of(arch, "auto")).kv_bytes_per_token
    assert [group.window for group in groups] == [None, 64]
    assert sizes(found)["KV cache"] == of_token * (4096 + 80)


@pytest.mark.parametrize(
    ("cache", "message"), [("fp8", "this engine has f32, f16, bf16"), ("bf16", "backend has f16")]
)
def test_what_processors_refuse_is_refused_for_any_ranks(cache: str, message: str) -> None:
    wishes = PlanFlags(on="cpu-epyc-9654", kv_cache_dtype=cache, tensor_parallel_size="auto")
    with pytest.raises(ValueError, match=f"--kv-cache-dtype {cache}: .*{message}"):
        plan_for(read_model_spec(ARCHS["plain"]), wishes)
