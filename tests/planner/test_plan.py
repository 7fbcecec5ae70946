"""Plans from end to end: from files, for devices, with wishes; and what is refused in one line."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import gguf
import numpy as np
import pytest

from ridgeline.backends.cpu.layout.model_sizes import model_sizes
from ridgeline.backends.cpu.layout.model_weights import load_weights
from ridgeline.backends.cpu.layout.packed_sizes import packed_bytes
from ridgeline.model.cost.shapes import weight_params
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.counting import shape_of_config, shape_of_gguf
from ridgeline.model.files.tensors import Tensor
from ridgeline.model.hub.local_models import ModelStores
from ridgeline.planner import plan
from ridgeline.planner.catalogue import devices
from ridgeline.planner.memory.model_spec import read_model_spec
from ridgeline.planner.memory.pictures import memory_svg
from ridgeline.planner.memory.placement import sentence
from ridgeline.system.report import gib
from tests.model.cost.published_configs import PUBLISHED
from tests.model.files import quantizers
from tests.model.files.test_quantized import FORMATS, model
from tests.model.files.tiny import CONFIG, gguf_metadata, gguf_weights, vocabulary, write_gguf
from tests.tiny import ARCHS, BY_LAYER, LATENT, changed, checkpoint

LLAMA = PUBLISHED["llama-3.1-8b"]["config"]
SVG = "{http://www.w3.org/2000/svg}"


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def write_safetensors(path: Path, sizes: dict[str, int]) -> Path:
    """A file of bytes under these names."""
    header, at = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))
    return path


def test_a_config_says_what_fits_on_a_device() -> None:
    found = plan(LLAMA, on="l4", concurrency=3)
    document = found.as_dict()
    assert list(document) == ["model", "answer", "memory", "devices", "time",
                              "choices", "offload", "published", "assumptions",
                              "warnings"]  # fmt: skip
    assert document["model"]["num_params"] == 8030261248
    memory = document["memory"]
    assert memory["fits"] is True
    assert memory["weights_bytes"] == 2 * 8030261248
    assert memory["kv_bytes"] == 3 * 4096 * 131072
    assert memory["kv_bytes_per_further_token"] == 131072
    device = memory["per_device"]
    assert sum(line["bytes"] for line in memory["lines"]) == device["total_bytes"]
    assert device["kv_blocks"] * 16 <= device["kv_tokens"] < (device["kv_blocks"] + 1) * 16
    assert memory["max_concurrency"] == int(memory["max_concurrency_exact"])
    json.dumps(document)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 1), (1, 2), (2, 2)])
def test_the_document_says_what_the_whole_model_takes_and_what_a_device(tp: int, pp: int) -> None:
    sizes = {"tensor_parallel_size": str(tp), "pipeline_parallel_size": str(pp)}
    memory = plan(LLAMA, on="l4", concurrency=3, **sizes).as_dict()["memory"]
    assert memory["weights_bytes"] == 2 * 8030261248
    assert memory["kv_bytes"] == 3 * 4096 * 131072
    assert memory["kv_bytes_per_further_token"] == 131072
    device = memory["per_device"]
    assert device["kv_bytes"] == memory["kv_bytes"] // (tp * pp)
    assert device["kv_bytes_per_further_token"] == 131072 // (tp * pp)
    assert device["weights_bytes"] == pytest.approx(2 * 8030261248 / (tp * pp), rel=0.05)
    wishes = {"weights_memory": "5GiB", "kv_cache_memory": "2GiB", **sizes}
    given = plan(LLAMA, on="l4", **wishes).as_dict()["memory"]
    assert given["weights_bytes"] == (5 << 30) * tp * pp
    assert given["kv_bytes"] == (2 << 30) * tp * pp


def test_the_sentence_answers() -> None:
    found = plan(LLAMA, on="l4").best
    assert sentence(found) == (
        f"fits on one NVIDIA L4 with {gib(found.ledger.spare_bytes)} to spare: 7 sequences of "
        f"4,096 tokens, or one sequence of 32,672"
    )
    large = plan(PUBLISHED["llama-3.1-70b"]["config"], on="h100-sxm").best
    assert sentence(large).startswith("does not fit on one NVIDIA H100 SXM5: ")
    assert sentence(large).endswith("it would with --tensor-parallel-size 2 or --dtype fp8")


@pytest.mark.parametrize("name", ["llama-3.1-70b", "phi-4", "mixtral-8x7b"])
@pytest.mark.parametrize("device", ["l4", "h100-sxm"])
def test_what_is_said_to_help_does(name: str, device: str) -> None:
    config = PUBLISHED[name]["config"]
    found = plan(config, on=device, concurrency=64).best
    if found.ledger.fits:
        return
    for flag in found.would_help:
        key, value = flag.removeprefix("--").replace("-", "_").split(" ")
        wishes: dict[str, Any] = {"on": device, "concurrency": 64}
        wishes[key] = int(value) if key in ("context", "concurrency") else value
        assert plan(config, **wishes).best.ledger.fits, flag


def test_no_model_takes_more_than_it_was_trained_for_and_a_state_has_no_end() -> None:
    assert plan(PUBLISHED["phi-4"]["config"], on="h100-sxm").best.max_context == 16384
    endless = plan(PUBLISHED["mamba-2.8b"]["config"], on="l4")
    assert endless.best.max_context is None
    assert endless.as_dict()["memory"]["max_context_tokens"] is None
    assert "or one sequence of any length" in sentence(endless.best)


def test_a_cache_that_was_made_too_small_is_named_in_the_answer() -> None:
    found = plan(PUBLISHED["phi-4"]["config"], on="h100-sxm", kv_cache_memory="1GiB", concurrency=8)
    assert found.best.ledger.spare_bytes > 0
    assert "5.25 GiB too much" in sentence(found.best)  # 8 x 4,096 x 204,800 bytes are 6.25 GiB


def test_over_all_devices_the_smallest_that_fits_is_the_answer() -> None:
    found = plan(LLAMA, on="all", tensor_parallel_size="1")
    fitting = [p for p in found.placements if p.ledger.fits]
    assert found.best in fitting
    assert all(p.device.usable_bytes >= found.best.device.usable_bytes for p in fitting)
    assert {p.device.id for p in found.placements} == {
        d.id for d in devices().values() if d.is_rented
    }


def test_auto_takes_the_fewest_ranks_and_skips_what_does_not_divide() -> None:
    large = PUBLISHED["llama-3.1-70b"]["config"]
    found = plan(large, on="h100-sxm", tensor_parallel_size="auto").best
    assert (found.memory.tp, found.ledger.fits) == (2, True)
    phi = plan(PUBLISHED["phi-4"]["config"], on="t4", tensor_parallel_size="auto").best
    assert not phi.ledger.fits  # 2 are too few; 4 divide neither 10 heads nor are divided by them
    stages = plan(
        PUBLISHED["phi-4"]["config"], on="t4", pipeline_parallel_size="auto"
    ).best  # without ranks it fits by stages
    assert (stages.memory.tp, stages.memory.pp, stages.ledger.fits) == (1, 4, True)


def test_formats_and_caches_as_wished() -> None:
    def weights(**wishes: Any) -> int:
        return plan(LLAMA, on="l4", **wishes).best.ledger.weights_bytes

    outside = 2 * 128256 * 4096 + 65 * 4096  # embedding, head, norms
    linear = 8030261248 - outside
    assert weights(dtype="bf16") == 2 * 8030261248
    assert weights(dtype="fp8") == pytest.approx(linear + 2 * outside, rel=1e-5)
    assert weights(dtype="q4_k") == weights(dtype="Q4_K_M")
    assert weights(dtype="q4_k_m") == pytest.approx(4.58 * 2**30, rel=0.01)  # the file's size
    assert plan(LLAMA, on="l4", kv_cache_dtype="fp8").best.ledger.kv_bytes == 4096 * 65536
    ours = plan(LLAMA, on="cpu-epyc-9654", kv_cache_dtype="int8-int4")
    assert ours.best.ledger.kv_bytes == 4096 * 65536 * 3 // 4
    ours = plan(LLAMA, on="cpu-epyc-9654", dtype="f32")
    assert ours.best.ledger.kv_bytes == 4096 * 65536 * 4  # f32 means the cache too
    ours = plan(LLAMA, on="cpu-epyc-9654", dtype="f32", kv_cache_dtype="f16")
    assert ours.best.ledger.kv_bytes == 4096 * 65536 * 2


def test_layers_that_read_other_layers_caches_take_none() -> None:
    """Gemma 4 E2B: 3 of 7 layers that see everything keep keys and values, and 12 of 28 others."""
    path = Path(__file__).parents[1] / "data" / "family_configs.json"
    text = json.loads(path.read_text())["gemma-4-e2b"]["config"]["text_config"]
    alone = text | {"num_kv_shared_layers": 0}

    def cache_bytes(config: dict[str, Any]) -> dict[str, int]:
        lines = plan(config, on="cpu-epyc-9654", kv_cache_dtype="f16").best.ledger.lines
        return {line.name: line.num_bytes for line in lines if line.name.startswith("KV cache")}

    own, every = cache_bytes(text), cache_bytes(alone)
    full, sliding = 4096 * 2 * 2 * 512, 528 * 2 * 2 * 256  # of one layer; of a window 33 blocks
    assert own == {"KV cache, full attention": 3 * full, "KV cache, sliding window": 12 * sliding}
    assert every == {"KV cache, full attention": 7 * full, "KV cache, sliding window": 28 * sliding}


def test_a_model_of_the_engine_is_known_from_its_file(tmp_path: Path) -> None:
    metadata = gguf_metadata(CONFIG, "llama") | vocabulary()
    path = write_gguf(tmp_path / "tiny.gguf", metadata, gguf_weights(CONFIG, "llama"))
    stored = plan(path, on="l4")
    assert stored.spec.name == "tiny"
    lines = stored.best.ledger.lines
    on_disk = load_checkpoint(path).nbytes
    assert sum(n for name, n, how in lines if how == "from the file") == on_disk
    here = plan(path)
    assert here.best.device.id == "here"
    assert here.best.ledger.weights_bytes == sum(
        packed_bytes(load_checkpoint(path), "auto", "int8").values()
    )
    assert weight_params(here.spec.shape) == weight_params(stored.spec.shape)
    assert not any("read from the disk" in warning for warning in here.warnings)
    missing = plan(path, overhead_memory="99999GiB").warnings  # what fits on no machine
    (warning,) = [one for one in missing if "read from the disk whenever" in one]
    assert warning.startswith("it starts here all the same, with a short cache: weights that")


@pytest.mark.parametrize("dtype", ["auto", "f32", "bf16", "int8", "int8-row", "int4"])
@pytest.mark.parametrize(
    "name", ["plain", "tied", "all biases", "qk norm", "one kv head", "kinds", *BY_LAYER, *LATENT]
)
def test_packed_weights_have_the_size_that_was_foretold(name: str, dtype: str) -> None:
    """The bytes of the arrays that the backend makes: exactly, whatever the format."""
    model = checkpoint(replace((ARCHS | BY_LAYER | LATENT)[name], vocab_size=70))
    weights = load_weights(
        model, model_sizes(model.arch, dtype, "int8"), dtype, 64, None, lambda done, total: None
    )
    real = sum(array.data.nbytes for array in weights.arrays.values())
    assert sum(packed_bytes(model, dtype, "int8").values()) == real


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gptq", "gptq 4 bits"),
        ("awq", "awq 4 bits"),
        ("w8a8", "int 8 bits"),
        ("fp8 in blocks", "fp8 in blocks"),
        ("nf4", "bitsandbytes 4 bits"),
        ("hqq", "hqq 4 bits"),
    ],
)
def test_quantised_safetensors_are_stored_as_their_config_says(
    name: str, dtype: str, tmp_path: Path
) -> None:
    config, stored, _ = model(FORMATS[name][0])
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    quantizers.write_safetensors(tmp_path / "model.safetensors", stored)
    gpu, here = (plan(tmp_path, on=on) for on in ("h100-sxm", "here"))
    assert gpu.best.storage.name == dtype
    checkpoint = load_checkpoint(tmp_path)
    weights = sum(packed_bytes(checkpoint, "auto", "int8").values())
    lines = [size for name, size, _ in here.best.ledger.lines if name.startswith("weights")]
    assert sum(lines) == weights


def test_a_quantised_model_s_head_is_counted_as_its_file_has_it(tmp_path: Path) -> None:
    config, stored, _ = model(FORMATS["gptq"][0])
    (tmp_path / "tokenizer.json").write_text("{}")
    quantizers.write_safetensors(tmp_path / "model.safetensors", stored)
    shapes = []
    for tied in (False, True):
        said = config | {"tie_word_embeddings": tied}
        (tmp_path / "config.json").write_text(json.dumps(said))
        none = ModelStores.of(tmp_path, {}, tmp_path)
        shapes.append(read_model_spec(tmp_path, none).shape)
        assert shape_of_config(said).is_tied is tied  # a config alone goes by its word
    assert [shape.is_tied for shape in shapes] == [False, False]
    assert shapes[0].end == shapes[1].end
    assert weight_params(shapes[0]) == weight_params(shapes[1])


def test_blocks_that_padding_breaks_up_are_foretold_too() -> None:
    """Heads of 8 channels are padded, so the columns of o move, and its blocks of 32 with them."""
    arch = changed(ARCHS["plain"], hidden_size=64, size=64, vocab_size=70)
    plain = checkpoint(arch)
    kind = gguf.GGMLQuantizationType.Q4_0
    tensors = {
        name: Tensor(name, "Q4_0", t.shape, gguf.quants.quantize(t.to_f32(), kind))
        if len(t.shape) == 2
        else t
        for name, t in plain.tensors.items()
    }
    model = replace(plain, tensors=tensors)
    weights = load_weights(
        model, model_sizes(arch, "auto", "int8"), "auto", 64, None, lambda done, total: None
    )
    assert {weights.arrays[f"layers.0.{part}"].kind for part in ("q", "o")} == {"s4", "w8"}
    real = sum(array.data.nbytes for array in weights.arrays.values())
    assert sum(packed_bytes(model, "auto", "int8").values()) == real


def test_a_format_that_is_asked_for_spares_what_the_config_spares() -> None:
    config = PUBLISHED["gpt-oss-20b"]["config"]
    asis = plan(config, on="h100-sxm").best.ledger.lines
    wished = plan(config, on="h100-sxm", dtype="int8").best.ledger.lines
    names = "weights, attention", "weights, experts"
    before, after = ({n: size for n, size, _ in lines} for lines in (asis, wished))
    assert after[names[0]] == before[names[0]]
    assert after[names[1]] > before[names[1]] * 1.8


def test_ggufs_of_latent_attention_and_of_mixtral() -> None:
    names = {"token_embd.weight": Tensor("e", "F32", (40, 32), np.zeros((40, 128), np.uint8))}
    latent = gguf_metadata(CONFIG, "deepseek2") | {
        "deepseek2.attention.kv_lora_rank": 16, "deepseek2.attention.q_lora_rank": 24,
        "deepseek2.attention.key_length": 24, "deepseek2.attention.value_length": 16,
        "deepseek2.attention.key_length_mla": 12, "deepseek2.attention.value_length_mla": 10,
        "deepseek2.rope.dimension_count": 8, "deepseek2.expert_count": 4,
        "deepseek2.expert_used_count": 2, "deepseek2.expert_shared_count": 1,
        "deepseek2.expert_feed_forward_length": 16, "deepseek2.leading_dense_block_count": 1,
    }  # fmt: skip
    shape = shape_of_gguf(latent, names, "x.gguf")
    assert shape.layers[0].cache.values_per_token() == 16 + 8
    sizes = {m.name.rpartition(".")[2]: (m.rows, m.columns) for m in shape.layers[0].matrices}
    assert sizes["kv_b_proj"] == (4 * (4 + 10), 16)
    assert sizes["q_b_proj"] == (4 * 12, 24)
    assert "moe" in shape.kinds
    mixtral = gguf_metadata(CONFIG, "llama") | {
        "llama.expert_count": 8, "llama.expert_used_count": 2,
    }  # fmt: skip
    assert shape_of_gguf(mixtral, names, "x.gguf").kinds == ("gqa", "moe")
    layers = np.array([2, 1], np.uint32)
    for key, value, message in (
        ("general.architecture", "rwkv7", "'rwkv7' is not understood"),
        (
            "llama.attention.head_count_kv",
            layers,
            "must have one number, or 0, for each",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            shape_of_gguf(mixtral | {key: value}, names, "x.gguf")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (struct.pack("<Q", 1 << 40), "a header of 1099511627776 bytes"),
        (struct.pack("<Q", 4) + b"nope", "its header is damaged"),
        (struct.pack("<Q", 12) + b'{"w": [1, 2]}'[:12], "its header is damaged"),
        (
            struct.pack("<Q", 41) + b'{"w": {"data_offsets": [0, 9]}}'.ljust(41) + bytes(8),
            "tensor 'w' ends behind the file's end",
        ),
    ],
)
def test_a_damaged_file_of_a_directory_is_refused(
    content: bytes, message: str, tmp_path: Path
) -> None:
    write(tmp_path / "config.json", PUBLISHED["deepseek-v3"]["config"])
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        plan(tmp_path)


def test_a_gguf_of_another_family_is_planned_by_its_header(tmp_path: Path) -> None:
    config = {**CONFIG, "num_experts": 4}
    metadata = gguf_metadata(config, "qwen3moe") | {
        "qwen3moe.expert_count": 4,
        "qwen3moe.expert_used_count": 2,
        "qwen3moe.expert_feed_forward_length": 64,
    }
    raw = {"token_embd.weight": np.ones((40, 32), np.float32),
           "blk.0.ffn_up_exps.weight": np.ones((4 * 64, 32), np.float32),
           "blk.0.attn_norm.weight": np.ones(32, np.float32)}  # fmt: skip
    found = plan(write_gguf(tmp_path / "moe.gguf", metadata, raw), on="l4")
    assert found.spec.shape.kinds == ("gqa", "moe")
    lines = {line.name: line.num_bytes for line in found.best.ledger.lines}
    assert lines["weights, experts"] == 4 * 64 * 34  # Q8_0: 34 bytes for 32
    # 128 tokens, two layers, keys and values, two heads of eight channels, two bytes
    assert found.best.ledger.kv_bytes == 128 * 2 * 2 * 2 * 8 * 2


def test_a_damaged_gguf_says_what_is_wrong(tmp_path: Path) -> None:
    metadata = gguf_metadata(CONFIG, "llama") | vocabulary()
    raw = gguf_weights(CONFIG, "llama")
    del raw["blk.1.attn_q.weight"]
    path = write_gguf(tmp_path / "cut.gguf", metadata, raw)
    with pytest.raises(ValueError, match=r"blk\.1\.attn_q\.weight"):
        plan(path)
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"fetch it again|past the end|claimed"):
        plan(path)


def test_a_directory_of_another_family_has_the_sizes_of_its_headers(tmp_path: Path) -> None:
    config = {**PUBLISHED["deepseek-v3"]["config"], "num_hidden_layers": 4}
    write(tmp_path / "config.json", config)
    write_safetensors(
        tmp_path / "model-00001-of-00001.safetensors",
        {
            "model.embed_tokens.weight": 1000,
            "model.layers.3.mlp.experts.7.up_proj.weight": 300,
            "model.layers.3.mlp.experts.7.up_proj.weight_scale_inv": 20,
            "model.layers.3.self_attn.o_proj.weight": 50,
            "model.layers.4.self_attn.o_proj.weight": 7,  # predicts several tokens
            "lm_head.weight": 900,
        },
    )
    found = plan(tmp_path, on="h200-sxm").best.ledger
    lines = [(n.removeprefix("weights, "), size) for n, size, how in found.lines if "file" in how]
    assert dict(lines) == {
        "embedding": 1000, "experts": 300, "scales": 20, "attention": 50, "head": 900,
    }  # fmt: skip
    assert found.weights_bytes == 2270


def test_a_directory_without_weights_needs_its_config_alone(tmp_path: Path) -> None:
    write(tmp_path / "config.json", LLAMA)
    found = plan(tmp_path, on="l4")
    assert found.best.ledger.weights_bytes == 2 * 8030261248
    assert found.spec.name == tmp_path.name


def test_warnings_and_assumptions_name_what_may_mislead() -> None:
    found = plan(PUBLISHED["deepseek-v3"]["config"], on="a100-80-sxm", tensor_parallel_size="16")
    text = "\n".join([*found.assumptions, *found.warnings])
    assert "11.6 B parameters that predict several tokens are not counted" in text
    assert "each of 16 ranks keeps all of the latent cache" in text
    assert "a100-80-sxm has no fp8 units" in text
    found = plan(PUBLISHED["qwen3-235b-a22b"]["config"], on="b200-sxm", tensor_parallel_size="8")
    assert any("8 ranks share 4 key and value heads: 2 of them" in a for a in found.assumptions)
    found = plan(PUBLISHED["llama-3.1-8b"]["config"], on="gaudi3")
    assert any("label in decimal GB" in warning for warning in found.warnings)
    lpu = plan(PUBLISHED["mistral-7b-v0.1"]["config"], on="groq-lpu-v1")
    chips = -(-(lpu.best.ledger.weights_bytes + lpu.best.ledger.kv_bytes) // 230_000_000)
    assert any(f"need {chips} chips" in warning for warning in lpu.warnings)
    ours = plan(LLAMA, on="mi300x", engine="ridgeline")
    assert any("computes on processors, and on NVIDIA GPUs" in line for line in ours.warnings)
    gemma = plan(PUBLISHED["gemma-2-9b"]["config"], on="l40s", engine="ridgeline")
    assert "blocks that have left the sliding window are given back" in gemma.assumptions
    mistral = PUBLISHED["mistral-7b-v0.1"]["config"]
    freed = [plan(mistral, on="l40s", engine="ridgeline", context=n) for n in (8192, 32_768)]
    assert all(
        "blocks that have left the sliding window are given back" in f.assumptions for f in freed
    )
    assert len({f.best.ledger.sequence_kv_bytes for f in freed}) == 1


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"on": "l5"}, "there is no device 'l5': did you mean l4"),
        ({"on": "h100-sxm/2g.20gb", "tensor_parallel_size": "2"}, "has no link to other devices"),
        ({"on": "l4", "tensor_parallel_size": "3"}, "3 does not divide 32 heads"),
        ({"on": "l4", "tensor_parallel_size": "many"}, "--tensor-parallel-size is 'many'"),
        ({"on": "l4", "context": 200_000}, "more than the 131072 tokens"),
        ({"on": "l4", "context": 0}, "--context is 0"),
        ({"on": "l4", "engine": "tgi"}, "--engine is 'tgi', not one of ridgeline, vllm"),
        ({"on": "l4", "gpu_memory_utilization": 1.5}, "--gpu-memory-utilization is 1.5"),
        ({"on": "l4", "dtype": "int3"}, "there is no format 'int3'"),
        ({"on": "l4", "kv_cache_dtype": "int3"}, "cannot be kept in 'int3'"),
        ({"on": "l4", "kv_cache_dtype": "int8-int4"}, "int8-int4: vllm has none; give fp8"),
        ({"on": "l4", "weights_memory": "much"}, "--weights-memory: 'much' is not a size"),
        ({"on": "l4", "dtype": "fp8", "weights_memory": "3GiB"}, "both say how large"),
        (
            {"on": "l4", "kv_cache_memory": "3GiB", "gpu_memory_utilization": 0.5},
            "both say how large the cache is",
        ),
    ],
)
def test_wishes_that_make_no_sense_are_refused_in_one_line(
    wishes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        plan(LLAMA, **wishes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"[1]", "the JSON is not an object"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"{}", "num_hidden_layers is missing"),
    ],
)
def test_a_damaged_config_is_refused_in_one_line(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        plan(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_that_is_not_here_says_what_to_give_instead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"HF_HUB_OFFLINE.*its config\.json is enough"):
        plan("someone/else")
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"run `ridgeline pull smollm2` first"):
        plan("smollm2")
    with pytest.raises(ValueError, match=r"nowhere\.json: no such file"):
        plan("nowhere.json")


def test_the_picture_has_a_bar_for_each_device_in_one_scale() -> None:
    found = plan(LLAMA, on="l4,h100-sxm")
    image = ElementTree.fromstring(memory_svg("a < b", found.placements))
    texts = [element.text for element in image.iter(f"{SVG}text")]
    assert {"a < b", "l4", "h100-sxm"} <= set(texts)
    boxes = [box for box in image.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    assert len(boxes) == 10
    widths = [float(box.get("width", "0")) for box in boxes]
    weights = widths[0], widths[5]
    assert weights[0] == pytest.approx(weights[1], abs=0.2)  # the same bytes, the same length
    for i, placement in enumerate(found.placements):
        share = sum(widths[5 * i : 5 * i + 5]) / sum(widths[5:])
        total = placement.ledger.total_bytes / found.placements[1].ledger.total_bytes
        assert share == pytest.approx(total, abs=0.01)
