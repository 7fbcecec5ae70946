"""Adapters on disk: PEFT and GGUF, for any file of their base; what is not supported is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ridgeline.model.files.adapters import Base, read_adapter
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.families import GGUF_FAMILIES
from ridgeline.model.files.tensors import Checkpoint, ModelFileError
from tests.lora import (
    Pairs,
    llama_shapes,
    merged,
    random_pairs,
    write_gguf_adapter,
    write_peft,
)
from tests.model.files.tiny import (
    CONFIG,
    GGUF_NAMES,
    gguf_metadata,
    gguf_weights,
    hf_weights,
    interleave,
    vocabulary,
    write_gguf,
)
from tests.tiny import changed

Maker = Callable[..., Path]
LAYER = "model.layers.1."


@pytest.fixture
def plain(make_directory: Maker) -> Checkpoint:
    return load_checkpoint(make_directory("base"))


@pytest.fixture
def base(plain: Checkpoint) -> Base:
    return Base.of(plain)


@pytest.fixture
def pairs() -> Pairs:
    return random_pairs(llama_shapes(CONFIG))


def in_gguf(pairs: Pairs, arch: str) -> Pairs:
    """The same as a converter names and orders it."""
    found = {}
    for module, (a, b) in pairs.items():
        if arch == "llama" and ".q_proj" in module:
            b = interleave(b, CONFIG["num_attention_heads"])
        if arch == "llama" and ".k_proj" in module:
            b = interleave(b, CONFIG["num_key_value_heads"])
        name = f"{module}.weight"
        for hf, short in GGUF_NAMES.items():
            name = name.replace(hf, short)
        found[name] = a, b
    return found


def test_every_matrix_is_that_of_the_merged_model(
    make_directory: Maker, plain: Checkpoint, base: Base, pairs: Pairs, tmp_path: Path
) -> None:
    adapter = read_adapter(write_peft(tmp_path / "a", pairs), base)
    folder = make_directory("merged")
    save_file(merged(hf_weights(CONFIG), pairs, 6 / 4), folder / "model.safetensors")
    whole = load_checkpoint(folder)
    assert len(adapter.parts) == 14
    assert adapter.rank == 4
    for name, tensor in whole.tensors.items():
        values = plain.tensors[name].to_f32()
        if name in adapter.parts:
            values = values + adapter.parts[name].b @ adapter.parts[name].a
        np.testing.assert_allclose(values, tensor.to_f32(), atol=1e-5, rtol=0, err_msg=name)


def test_files_of_both_kinds_are_one_adapter_on_bases_of_both_kinds(
    base: Base, pairs: Pairs, tmp_path: Path, tiny_gguf: Path
) -> None:
    peft = write_peft(tmp_path / "a", pairs)
    file = write_gguf_adapter(tmp_path / "a.gguf", "llama", in_gguf(pairs, "llama"), 6.0)
    quantised = Base.of(load_checkpoint(tiny_gguf))
    found = [read_adapter(path, model) for path in (peft, file) for model in (base, quantised)]
    assert len({one.digest for one in found}) == 1
    for one in found[1:]:
        for name, part in found[0].parts.items():
            np.testing.assert_array_equal(one.parts[name].a, part.a)
            np.testing.assert_array_equal(one.parts[name].b, part.b)
    other = read_adapter(write_peft(tmp_path / "b", pairs, lora_alpha=7), base)
    assert other.digest != found[0].digest


def test_fused_matrices_are_cut(make_directory: Maker, tmp_path: Path) -> None:
    config = CONFIG | {"architectures": ["Phi3ForCausalLM"], "pad_token_id": 0}
    folder = make_directory("phi", weights=False, config=config)
    save_file(hf_weights(config, fused=True), folder / "model.safetensors")
    base = Base.of(load_checkpoint(folder))
    pairs = random_pairs(llama_shapes(CONFIG, fused=True))
    adapter = read_adapter(write_peft(tmp_path / "a", pairs), base)
    metadata = gguf_metadata(CONFIG, "phi3") | vocabulary()
    file = tmp_path / "phi.gguf"
    quantised = Base.of(
        load_checkpoint(write_gguf(file, metadata, gguf_weights(CONFIG, "phi3", fused=True)))
    )
    assert read_adapter(tmp_path / "a", quantised).digest == adapter.digest
    a, b = pairs[f"{LAYER}self_attn.qkv_proj"]
    for name, begin, end in (("q", 0, 32), ("k", 32, 48), ("v", 48, 64)):
        part = adapter.parts[f"layers.1.{name}"]
        np.testing.assert_array_equal(part.a, a)
        np.testing.assert_array_equal(part.b, b[begin:end] * np.float32(1.5))
    _, b = pairs[f"{LAYER}mlp.gate_up_proj"]
    np.testing.assert_array_equal(adapter.parts["layers.1.up"].b, b[64:] * np.float32(1.5))


def test_ranks_and_alphas_by_pattern_and_rslora(base: Base, tmp_path: Path) -> None:
    shapes = llama_shapes(CONFIG)
    pairs = random_pairs(shapes, 4) | random_pairs(
        {
            name: shape
            for name, shape in shapes.items()
            if "q_proj" in name or "layers.1.mlp" in name
        },
        9,
    )
    patterns = {"q_proj": 9, r"^model\.layers\.1\.mlp\..*": 9}
    config = {"r": 4, "rank_pattern": patterns, "alpha_pattern": {"layers.0.self_attn.q_proj": 3}}
    plain = read_adapter(write_peft(tmp_path / "a", pairs, **config), base)
    root = read_adapter(write_peft(tmp_path / "b", pairs, use_rslora=True, **config), base)
    for found, power in ((plain, 1.0), (root, 0.5)):
        for name, module, rank, alpha in (
            ("layers.0.q", "model.layers.0.self_attn.q_proj", 9, 3),
            ("layers.1.q", f"{LAYER}self_attn.q_proj", 9, 6),
            ("layers.1.down", f"{LAYER}mlp.down_proj", 9, 6),
            ("layers.0.down", "model.layers.0.mlp.down_proj", 4, 6),
        ):
            wanted = pairs[module][1] * np.float32(alpha / rank**power)
            np.testing.assert_array_equal(found.parts[name].b, wanted)


def test_some_layers_and_targets(base: Base, tmp_path: Path) -> None:
    shapes = {name: s for name, s in llama_shapes(CONFIG).items() if f"{LAYER}self_attn.v" in name}
    pairs = random_pairs(shapes)
    for i, targets in enumerate((["v_proj"], "all-linear", r".*\.v_proj", None)):
        path = write_peft(tmp_path / f"{i}", pairs, target_modules=targets, layers_to_transform=[1])
        assert list(read_adapter(path, base).parts) == ["layers.1.v"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
        ({"use_dora": True}, "use_dora is set"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias is set"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is set"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is set"),
        ({"a_new_key": 1}, "a_new_key is set"),
        ({"r": 5}, r"shape \(4, 64\), wanted \(5, 64\)"),
        ({"r": 10**6}, "not 1 to 1024"),
        ({"lora_alpha": -1}, "lora_alpha is -1"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha of .* is 'x'"),
        ({"rank_pattern": [1]}, "rank_pattern is not an object"),
        ({"rank_pattern": {"(a+)+": 1}}, "too involved"),
        ({"rank_pattern": {"(": 1}}, "is no pattern"),
        ({"target_modules": ["q_proj"]}, "not among target_modules"),
        ({"target_modules": 3}, "neither a list"),
        ({"exclude_modules": ["q_proj"]}, "not among target_modules"),
        ({"layers_to_transform": 0}, "not in layers_to_transform"),
        ({"layers_to_transform": ["x"]}, "not numbers of layers"),
    ],
)
def test_what_would_change_an_answer_is_refused_by_name(
    base: Base, pairs: Pairs, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    path = write_peft(tmp_path / "a", pairs, **config)
    with pytest.raises(ModelFileError, match=message):
        read_adapter(path, base)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("lm_head", "'lm_head' is adapted, which is not supported"),
        ("model.embed_tokens", "'model.embed_tokens' is adapted"),
        ("model.layers.2.self_attn.q_proj", "no part of this model"),
        ("model.layers.0.self_attn.qkv_proj", "no part of this model"),
    ],
)
def test_other_tensors_are_refused_by_name(
    base: Base, tmp_path: Path, module: str, message: str
) -> None:
    path = write_peft(tmp_path / "a", random_pairs({module: (40, 32)}))
    with pytest.raises(ModelFileError, match=message):
        read_adapter(path, base)


def test_damaged_files_are_one_line(base: Base, pairs: Pairs, tmp_path: Path) -> None:
    def broken(name: str, change: Callable[[dict[str, np.ndarray]], None]) -> Path:
        path = write_peft(tmp_path / name, pairs)
        file = path / "adapter_model.safetensors"
        tensors = {key: value.copy() for key, value in load_file(file).items()}
        change(tensors)
        save_file(tensors, file)
        return path

    q = f"base_model.model.{LAYER}self_attn.q_proj.lora_B.weight"
    cases: dict[str, tuple[Callable[[dict[str, np.ndarray]], Any], str]] = {
        "no B": (lambda t: t.pop(q), "lacks its matrix B"),
        "nan": (lambda t: t[q].__setitem__((0, 0), np.nan), "not finite"),
        "odd": (lambda t: t.update(odd=np.zeros(3, np.float32)), "'odd' is not part of a LoRA"),
        "dora": (
            lambda t: t.update({q.replace("lora_B", "lora_magnitude_vector"): t[q]}),
            "not part of a LoRA",
        ),
        "empty": (lambda t: t.clear(), "the adapter is empty"),
    }
    for name, (change, message) in cases.items():
        with pytest.raises(ModelFileError, match=message) as caught:
            read_adapter(broken(name, change), base)
        assert "\n" not in str(caught.value)
    cut = write_peft(tmp_path / "cut", pairs)
    file = cut / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ModelFileError, match="fetch it again"):
        read_adapter(cut, base)
    (cut / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(ModelFileError, match="not an object"):
        read_adapter(cut, base)
    (cut / "adapter_config.json").unlink()
    with pytest.raises(ModelFileError, match=r"no adapter_config\.json"):
        read_adapter(cut, base)
    file.unlink()
    (cut / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelFileError, match="pickles can run any code"):
        read_adapter(cut, base)
    with pytest.raises(ModelFileError, match="no such adapter"):
        read_adapter(tmp_path / "nothing", base)


def test_gguf_files_that_are_refused(
    base: Base, pairs: Pairs, tmp_path: Path, tiny_gguf: Path
) -> None:
    with pytest.raises(ModelFileError, match="this is not an adapter"):
        read_adapter(tiny_gguf, base)
    found = in_gguf(pairs, "llama")
    for i, (arch, changes, message) in enumerate(
        [
            ("llama", {"adapter.type": "lokr"}, "adapter.type is 'lokr'"),
            ("llama", {"adapter.alora.invocation_tokens": "x"}, "alora.invocation_tokens is set"),
            ("rwkv7", {}, "'rwkv7' are not supported"),
            ("llama", {"adapter.lora.alpha": -1.0}, "alpha is -1.0"),
        ]
    ):
        path = write_gguf_adapter(tmp_path / f"{i}.gguf", arch, found, 6.0, **changes)
        with pytest.raises(ModelFileError, match=message):
            read_adapter(path, base)
    other = write_gguf_adapter(tmp_path / "qwen.gguf", "qwen2", in_gguf(pairs, "qwen2"), 6.0)
    with pytest.raises(ModelFileError, match="for 'qwen2', but the model is 'llama'"):
        read_adapter(other, Base.of(load_checkpoint(tiny_gguf)))


def test_a_gguf_without_alpha_is_not_scaled(base: Base, pairs: Pairs, tmp_path: Path) -> None:
    path = write_gguf_adapter(tmp_path / "a.gguf", "llama", in_gguf(pairs, "llama"), 0.0)
    found = read_adapter(path, base)
    np.testing.assert_array_equal(found.parts["layers.1.v"].b, pairs[f"{LAYER}self_attn.v_proj"][1])


# GGUF's architectures, how their safetensors are called, and PEFT's name of a matrix of attention.
BASES = [
    ("command-r", "CohereForCausalLM", "model.layers.1.self_attn.o_proj"),
    ("cohere2", "Cohere2ForCausalLM", "model.layers.1.self_attn.q_proj"),
    ("deepseek2", "DeepseekV3ForCausalLM", "model.layers.1.self_attn.o_proj"),
    ("falcon", "FalconForCausalLM", "transformer.h.1.self_attention.dense"),
    ("gemma4", "Gemma4ForCausalLM", "model.language_model.layers.1.self_attn.q_proj"),
    ("gpt-oss", "GptOssForCausalLM", "model.layers.1.self_attn.q_proj"),
    ("gpt2", "GPT2LMHeadModel", "transformer.h.1.attn.c_proj"),
    ("gptneox", "GPTNeoXForCausalLM", "gpt_neox.layers.1.attention.dense"),
    ("granitehybrid", "GraniteMoeHybridForCausalLM", "model.layers.1.self_attn.q_proj"),
    ("granitemoe", "GraniteMoeForCausalLM", "model.layers.1.self_attn.q_proj"),
    ("lfm2", "Lfm2ForCausalLM", "model.layers.1.self_attn.out_proj"),
    ("lfm2moe", "Lfm2MoeForCausalLM", "model.layers.1.self_attn.out_proj"),
    ("olmoe", "OlmoeForCausalLM", "model.layers.1.self_attn.q_proj"),
    ("phi2", "PhiForCausalLM", "model.layers.1.self_attn.dense"),
    ("qwen2moe", "Qwen2MoeForCausalLM", "model.layers.1.self_attn.q_proj"),
    ("qwen35", "Qwen3_5ForCausalLM", "model.layers.1.self_attn.o_proj"),
    ("qwen35moe", "Qwen3_5MoeForCausalLM", "model.language_model.layers.1.self_attn.o_proj"),
    ("qwen3next", "Qwen3NextForCausalLM", "model.layers.1.self_attn.o_proj"),
    ("stablelm", "StableLmForCausalLM", "model.layers.1.self_attn.q_proj"),
    ("starcoder2", "Starcoder2ForCausalLM", "model.layers.1.self_attn.q_proj"),
    ("bert", "BertModel", "encoder.layer.1.attention.output.dense"),
    ("nomic-bert", "NomicBertModel", "encoder.layers.1.attn.out_proj"),
    ("gemma-embedding", "Gemma3TextModel", "model.layers.1.self_attn.q_proj"),
    ("modern-bert", "ModernBertModel", "layers.1.attn.Wo"),
]
BASES += [
    (name, f"{family}ForCausalLM", "model.layers.1.self_attn.q_proj")
    for name, family in {
        "chatglm": "Glm",
        "glm4": "Glm4",
        "glm4moe": "Glm4Moe",
        "exaone4": "Exaone4",
        "ernie4_5": "Ernie4_5",
        "ernie4_5-moe": "Ernie4_5_Moe",
        "seed_oss": "SeedOss",
        "minimax-m2": "MiniMaxM2",
        "dots1": "Dots1",
        "hunyuan-dense": "HunYuanDenseV1",
        "arcee": "Arcee",
        "gemma": "Gemma",
        "mistral3": "Ministral3",
        "nemotron": "Nemotron",
        "olmo": "Olmo",
    }.items()
]


@pytest.mark.parametrize(("in_gguf", "in_hf", "module"), BASES)
def test_an_adapter_of_peft_is_the_same_on_files_of_both_kinds(
    base: Base, tmp_path: Path, in_gguf: str, in_hf: str, module: str
) -> None:
    pairs = random_pairs({module: (32, 32)})
    path = write_peft(tmp_path / "a", pairs)
    found = [read_adapter(path, Base(base.arch, family)) for family in (in_gguf, in_hf)]
    part = "q" if module.endswith("q_proj") else "o"
    for one in found:
        assert list(one.parts) == [f"layers.1.{part}"]
        np.testing.assert_array_equal(one.parts[f"layers.1.{part}"].a, pairs[module][0])
    assert found[0].digest == found[1].digest


def test_every_gguf_family_with_matrices_to_adapt_knows_its_names_in_peft() -> None:
    known = {in_gguf for in_gguf, *_ in BASES}
    known |= {"llama", "phi3", "qwen2", "qwen3", "gemma2", "gemma3", "granite", "olmo2"}
    known |= {"smollm3", "qwen3moe", "qwen2vl", "qwen3vl", "qwen3vlmoe"}
    known |= {"nemotron_h", "nemotron_h_moe", "phimoe", "bloom", "mpt", "llama4"}
    nothing = {"mamba2"}  # has none of the matrices
    scaled = {"falcon-h1"}
    names = {name for name in GGUF_FAMILIES if " " not in name}
    assert names == known | nothing | scaled


def test_a_projection_with_a_gate_in_it_is_refused_by_name(base: Base, tmp_path: Path) -> None:
    gated = changed(base.arch, gated=True)
    for i, part in enumerate(("q", "k")):
        rows = {"q": 64, "k": 16}[part]
        pairs = random_pairs({f"{LAYER}self_attn.{part}_proj": (rows, 32)})
        path = write_peft(tmp_path / f"{i}", pairs)
        if part == "k":
            assert list(read_adapter(path, Base(gated, "qwen35")).parts) == ["layers.1.k"]
            continue
        with pytest.raises(ModelFileError, match=r"q_proj' is adapted, which is not supported"):
            read_adapter(path, Base(gated, "qwen35"))


def test_adapters_of_scaled_weights_fit_files_of_their_own_kind_alone(
    base: Base, pairs: Pairs, tmp_path: Path
) -> None:
    """Of Falcon-H1 a converter multiplies weights, of adapters too, by what the config says."""
    peft = write_peft(tmp_path / "a", pairs)
    file = write_gguf_adapter(tmp_path / "a.gguf", "falcon-h1", in_gguf(pairs, "falcon-h1"), 6.0)
    with pytest.raises(ModelFileError, match="'falcon-h1' has its multipliers within its weights"):
        read_adapter(peft, Base(base.arch, "falcon-h1"))
    with pytest.raises(ModelFileError, match="take the adapter as PEFT saved it"):
        read_adapter(file, Base(base.arch, "FalconH1ForCausalLM"))
    assert read_adapter(file, Base(base.arch, "falcon-h1")).parts
