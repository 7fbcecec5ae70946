"""Encoders against transformers: tiny random ones in f32, real weights in every format."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from ridgeline import LLM
from ridgeline.engine.outputs import cosine
from tests.parity.tiny import torch, transformers
from tests.parity.tiny_encoders import word_tokenizer, write_steps
from tests.real_models import real_model

TEXTS = [
    "The cat sits outside.",
    "A man is playing the guitar.",
    "Naïve café: 北京 is a capital, 日本 is not; \u201cquotes\u201d, e-mail@example.org!",
    "",
    "x",
    "def f(a, b):\n\treturn a ** b  # unusual_identifier_names, CamelCase and 12345.678",
    " ".join(f"word{i} and some more of it, number {i * 17}." for i in range(40)),
    "The new movie is awesome. " * 12,
]
POOLS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda states: states.mean(0),
    "cls": lambda states: states[0],
    "last": lambda states: states[-1],
}


def sizes(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 300,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "max_position_embeddings": 130,
        **more,
    }


MODELS: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**sizes())),
    "bert-tanh": lambda: transformers.BertModel(
        transformers.BertConfig(**sizes(hidden_act="gelu_new", type_vocab_size=3))
    ),
    "nomic-bert": lambda: transformers.NomicBertModel(
        transformers.NomicBertConfig(
            **sizes(head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1000.0})
        )
    ),
    "roberta": lambda: transformers.RobertaModel(
        transformers.RobertaConfig(**sizes(pad_token_id=1))
    ),
    "xlm-roberta": lambda: transformers.XLMRobertaModel(
        transformers.XLMRobertaConfig(**sizes(pad_token_id=1, type_vocab_size=1))
    ),
}


def random_model(
    name: str,
    folder: Path,
    pool: str,
    *,
    normalises: bool,
    kinds: dict[str, Callable[[], Any]] = MODELS,
) -> Any:
    """Write a model with every parameter random, and return transformers' own."""
    torch.manual_seed(7)
    model = kinds[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3 if parameter.dim() > 1 else 0.5)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(word_tokenizer(300)))
    write_steps(folder, pool, normalises=normalises)
    return model


PAIRS: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertForSequenceClassification(
        transformers.BertConfig(**sizes(num_labels=1))
    ),
    "bert-identity": lambda: transformers.BertForSequenceClassification(
        transformers.BertConfig(
            **sizes(num_labels=1),
            sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"},
        )
    ),
    "roberta": lambda: transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(**sizes(num_labels=1, pad_token_id=1))
    ),
    "xlm-roberta": lambda: transformers.XLMRobertaForSequenceClassification(
        transformers.XLMRobertaConfig(**sizes(num_labels=1, pad_token_id=1, type_vocab_size=1))
    ),
}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", PAIRS)
def test_random_cross_encoders(tmp_path: Path, name: str, backend: str) -> None:
    """The ids of a pair, its types and its score are those of transformers."""
    model = random_model(name, tmp_path / "m", "cls", normalises=False, kinds=PAIRS)
    for file in ("modules.json", "1_Pooling/config.json"):
        (tmp_path / "m" / file).unlink()
    is_roberta = "roberta" in name
    spec = word_tokenizer(300, between=2 if is_roberta else 1)
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(spec))
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "m" / "tokenizer.json")
    )
    f32 = {"dtype": "f32"} if backend == "cpu" else {}
    query, documents = "w5 w9", ["w7", "w10 w11 w12 " * 9, "w5 w9", "w200 w17"]
    with LLM(tmp_path / "m", backend=backend, kv_cache_memory="8MiB", **f32) as llm:
        found = [out.outputs.score for out in llm.score(query, documents)]
        for text, score in zip(documents, found, strict=True):
            pair = theirs(query, text, return_token_type_ids=True)
            assert llm.text.encode_pair(query, text) == pair["input_ids"]
            types = None if is_roberta else pair["token_type_ids"]
            with torch.inference_mode():
                logit = model(
                    torch.tensor([pair["input_ids"]]),
                    token_type_ids=types and torch.tensor([types]),
                ).logits[0, 0]
            wanted = logit if name == "bert-identity" else logit.sigmoid()
            assert score == pytest.approx(float(wanted), abs=2e-5)
        with pytest.raises(ValueError, match="scores pairs of texts"):
            llm.embed("w5")


def states_of(model: Any, ids: Sequence[int]) -> Any:
    with torch.inference_mode():
        return model(torch.tensor([list(ids)])).last_hidden_state[0]


def embedded(llm: LLM, texts: Any, **how: Any) -> NDArray[np.float64]:
    return np.array([out.outputs.embedding for out in llm.embed(texts, **how)])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_random_encoders(tmp_path: Path, name: str, backend: str) -> None:
    for pool, normalises in (("mean", False), ("cls", True), ("last", False)):
        folder = tmp_path / pool
        model = random_model(name, folder, pool, normalises=normalises)
        ids = [[int(i) for i in np.random.default_rng(n).integers(3, 300, n)] for n in (1, 7, 128)]
        f32 = {"dtype": "f32"} if backend == "cpu" else {}
        llm = LLM(folder, backend=backend, kv_cache_memory="8MiB", **f32)
        assert llm.config.max_model_len == (130 if "roberta" not in name else 128)
        for row, found in zip(ids, embedded(llm, ids), strict=True):
            wanted = POOLS[pool](states_of(model, row)).double()
            wanted = wanted / wanted.norm() if normalises else wanted
            assert np.abs(found - wanted.numpy()).max() < 1e-4
            assert cosine(found.tolist(), wanted.tolist()) > 0.999999


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"backend": "reference"}, 0.9999),
        ({"dtype": "f32"}, 0.999999),
        ({"dtype": "bf16"}, 0.9999),
        ({}, 0.999),
        ({"dtype": "int8"}, 0.999),
        ({"dtype": "int8-row"}, 0.999),
    ],
)
def test_all_minilm_with_its_real_weights(options: dict[str, str], least: float) -> None:
    path = real_model("all-minilm")
    model = transformers.BertModel.from_pretrained(path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    llm = LLM(path, kv_cache_memory="64MiB", **options)
    for out, text in zip(llm.embed(TEXTS), TEXTS, strict=True):
        ids = tokenizer(text, truncation=False, padding=False)["input_ids"]
        assert out.prompt_token_ids == ids
        wanted = states_of(model, ids).mean(0).tolist()
        # Of an empty text, which nobody sends, int8 weights keep a little less.
        assert cosine(out.outputs.embedding, wanted) >= (least if text else least - 0.001)
        assert sum(value * value for value in out.outputs.embedding) == pytest.approx(1, abs=1e-6)


GGUF_NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}


GGUF_NAMES |= {
    "attention.q_lin": "attn_q",
    "attention.k_lin": "attn_k",
    "attention.v_lin": "attn_v",
    "attention.out_lin": "attn_output",
    "sa_layer_norm": "attn_output_norm",
    "ffn.lin1": "ffn_up",
    "ffn.lin2": "ffn_down",
    "output_layer_norm": "layer_output_norm",
}
NOMIC_NAMES = GGUF_NAMES | {
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "attn_output_norm",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.down_proj": "ffn_down",
    "post_mlp_layernorm": "layer_output_norm",
}


def write_gguf(model: Any, path: Path, pooling_type: int, kind: str = "bert") -> Path:
    """Write a BERT in float32 as llama.cpp's converter does."""
    config = model.config
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", 0) or config.hidden_dim)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", 1e-12))
    writer.add_causal_attention(False)
    writer.add_uint32(f"{kind}.pooling_type", pooling_type)
    if kind == "nomic-bert":
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        for i, layer in enumerate(model.layers):
            parts = (getattr(layer.self_attn, f"{name}_proj").weight for name in "qkv")
            fused = torch.cat(list(parts)).detach().numpy()
            writer.add_tensor(f"blk.{i}.attn_qkv.weight", fused)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    words = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", *(f"\u2581w{i}" for i in range(4, 300))]
    writer.add_token_list(words)
    writer.add_token_types([3] * 4 + [1] * 296)
    writer.add_token_type_count(getattr(config, "type_vocab_size", 1))
    for role, number in (("bos", 0), ("sep", 2), ("unk", 3), ("pad", 1)):
        getattr(writer, f"add_{role}_token_id")(number)
    for name, parameter in model.named_parameters():
        stem, kind = name.rsplit(".", 1)
        if stem.startswith("pooler") or stem.endswith(("q_proj", "k_proj", "v_proj")):
            continue
        if "layer" in stem:
            of_layers = stem.removeprefix("encoder.").removeprefix("transformer.")
            number, inner = of_layers.split(".", 2)[1:]
            out = f"blk.{number}.{NOMIC_NAMES[inner]}"
        else:
            out = GGUF_NAMES[stem]
        writer.add_tensor(f"{out}.{kind}", parameter.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("kind", "number", "pool"),
    [("bert", 1, "mean"), ("bert", 2, "cls"), ("bert", 3, "last"), ("nomic-bert", 1, "mean")],
)
def test_a_gguf_encoder(tmp_path: Path, backend: str, kind: str, number: int, pool: str) -> None:
    model = random_model(kind, tmp_path / "m", pool, normalises=True)
    path = write_gguf(model, tmp_path / "m.gguf", number, kind)
    f32 = {"dtype": "f32"} if backend == "cpu" else {}
    with LLM(path, backend=backend, kv_cache_memory="8MiB", **f32) as llm:
        assert llm.tokenizer.encode("w7 w200") == [0, 7, 200, 2]
        ids = [[0, *range(4, 4 + n), 2] for n in (1, 60)]
        for row, found in zip(ids, embedded(llm, ids), strict=True):
            wanted = POOLS[pool](states_of(model, row)).double()
            assert np.abs(found - (wanted / wanted.norm()).numpy()).max() < 1e-4


def test_a_gguf_ranker_is_refused(tmp_path: Path) -> None:
    model = random_model("bert", tmp_path / "m", "cls", normalises=True)
    path = write_gguf(model, tmp_path / "m.gguf", 4)
    with pytest.raises(ValueError, match="pooling_type is 4"):
        LLM(path)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_decoder_without_its_head(tmp_path: Path, backend: str) -> None:
    """As Qwen3-Embedding is saved: no prefix, no head, the last token's state, an end token."""
    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        **sizes(num_key_value_heads=2, head_dim=16, tie_word_embeddings=True)
    )
    model = transformers.Qwen3Model(config).eval()
    random_model("bert", tmp_path / "m", "last", normalises=True)
    model.save_pretrained(tmp_path / "m")
    values = json.loads((tmp_path / "m" / "config.json").read_text())
    values["architectures"] = ["Qwen3ForCausalLM"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(values))
    spec = json.loads((tmp_path / "m" / "tokenizer.json").read_text())
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"[SEP]": {"id": "[SEP]", "ids": [2], "tokens": ["[SEP]"]}},
    }
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(spec))
    f32 = {"dtype": "f32"} if backend == "cpu" else {}
    with LLM(tmp_path / "m", backend=backend, kv_cache_memory="8MiB", **f32) as llm:
        outs = llm.embed(["w7 w9 w200", "w7 w9 w200 w5"])
        assert [out.prompt_token_ids for out in outs] == [[7, 9, 200, 2], [7, 9, 200, 5, 2]]
        for out in outs:
            wanted = states_of(model, out.prompt_token_ids)[-1].double()
            found = np.array(out.outputs.embedding)
            assert np.abs(found - (wanted / wanted.norm()).numpy()).max() < 1e-4


def test_nomic_configs_with_their_older_keys(tmp_path: Path) -> None:
    """What the config says in GPT-2's words; no key may be left that nobody knows."""
    random_model("nomic-bert", tmp_path / "m", "mean", normalises=True)
    with LLM(tmp_path / "m", backend="reference", kv_cache_memory="8MiB") as llm:
        wanted = embedded(llm, [[5, 6, 7, 8]])
    older = {
        "activation_function": "swiglu",
        "architectures": ["NomicBertModel"],
        "causal": False,
        "dense_seq_output": True,
        "fused_bias_fc": True,
        "layer_norm_epsilon": 1e-12,
        "max_trained_positions": 130,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "model_type": "nomic_bert",
        "n_embd": 64,
        "n_head": 4,
        "n_inner": 96,
        "n_layer": 3,
        "n_positions": 520,
        "pad_vocab_size_multiple": 64,
        "parallel_block": False,
        "prenorm": False,
        "qkv_proj_bias": False,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "scale_attn_weights": True,
        "type_vocab_size": 2,
        "use_flash_attn": True,
        "use_rms_norm": False,
        "vocab_size": 300,
    }
    (tmp_path / "m" / "config.json").write_text(json.dumps(older))
    with LLM(tmp_path / "m", backend="reference", kv_cache_memory="8MiB") as llm:
        assert llm.config.max_model_len == 130
        assert (embedded(llm, [[5, 6, 7, 8]]) == wanted).all()
    (tmp_path / "m" / "config.json").write_text(json.dumps(older | {"prenorm": True}))
    with pytest.raises(ValueError, match="prenorm is True"):
        LLM(tmp_path / "m")
