"""A tiny Gemma 4 behind the engine: what its cache takes, and that company changes no bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ridgeline import LLM, SamplingParams
from ridgeline.model.cost.costs import weight_params
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.families import GGUF_FAMILIES, HF_FAMILIES, arch_from_config
from ridgeline.model.files.summary import summarise
from ridgeline.text.messages.message import REASONINGS, MessageForm, MessageReader
from ridgeline.text.messages.tools import Tool, ToolUse
from tests.engine.test_tools import written
from tests.model.files.test_gemma4 import CONFIG, EXPERTS, META
from tests.model.files.tiny import vocabulary, write_gguf
from tests.tiny import plain_logits, random_arrays

OPTIONS: dict[str, Any] = {"backend": "reference", "kv_cache_memory": "64KiB", "block_size": 4}
PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=5, ignore_eos=True)
WEATHER = {
    "type": "object",
    "properties": {"days": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["city"],
}
TEXTS = [
    [int(token) for token in np.random.default_rng(n).integers(3, 40, n)] for n in (30, 7, 1, 18)
]


def directory(path: Path, config: dict[str, Any]) -> Path:
    """Write a model with random weights, stacks of experts as one tensor, and 40 words."""
    arch = arch_from_config(config, {}, "x")
    family = HF_FAMILIES[
        "Gemma4ForCausalLM" + " of experts" * config.get("enable_moe_block", False)
    ]
    raw: dict[str, list[np.ndarray]] = {}
    for name, array in random_arrays(arch).items():
        if name in family.outer:
            raw[family.outer[name]] = [array]
        else:
            _, index, part = name.split(".")
            raw.setdefault(family.prefix.format(index) + family.layer[part], []).append(array)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({n: np.concatenate(parts) for n, parts in raw.items()}, path / "model.safetensors")
    tokenizer = Tokenizer(models.BPE({f"w{i}": i for i in range(40)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_shared_keys_and_values_halve_what_the_ledger_holds(tmp_path: Path) -> None:
    alone = CONFIG | {"num_kv_shared_layers": 0, "use_double_wide_mlp": False}
    taken = []
    for name, config in (("shared", CONFIG), ("alone", alone)):
        with LLM(directory(tmp_path / name, config), **OPTIONS) as llm:
            lines = {line.name: line.num_bytes for line in llm.memory().lines}
            assert lines["kv_cache"] == llm.config.kv_bytes
            of_block = llm.config.kv_bytes / llm.config.num_blocks
            taken.append([of_block, *(len(group.layers) for group in llm.config.groups)])
    # Blocks of 4 tokens in f32. 3 of 6 layers have keys and values, of 2 heads of 8, 16, 8: one
    # that sees all, and two with a window in a block as large. Alone, three of these in a block.
    assert taken == [[4 * 4 * 2 * 2 * 16, 1, 2], [4 * 4 * 2 * 2 * 3 * 8, 1, 1, 1, 3]]


@pytest.mark.parametrize("config", [{**CONFIG}, {**EXPERTS}], ids=["dense", "experts"])
def test_an_answer_is_the_same_in_company_and_in_pieces(
    config: dict[str, Any], tmp_path: Path
) -> None:
    config["tie_word_embeddings"] = False  # else a random model repeats what it reads
    path = directory(tmp_path / "model", config)
    with LLM(path, **OPTIONS, enable_prefix_caching=False) as llm:
        alone = [llm.generate([ids], PARAMS)[0] for ids in TEXTS]
    with LLM(path, **OPTIONS, max_num_batched_tokens=5) as llm:
        together = llm.generate(TEXTS, PARAMS)
        again = llm.generate(TEXTS, PARAMS)  # out of shared blocks
    assert len({token for one in alone for token in one.outputs[0].token_ids}) > 4
    for one, other, third in zip(alone, together, again, strict=True):
        ids = one.outputs[0].token_ids
        assert ids == other.outputs[0].token_ids == third.outputs[0].token_ids


def test_experts_stay_in_their_file_and_are_counted(tmp_path: Path) -> None:
    """Gates and inner values of each expert stand in turn in one tensor."""
    checkpoint = load_checkpoint(directory(tmp_path / "model", EXPERTS))
    assert summarise(checkpoint).num_parameters == weight_params(checkpoint.arch)
    both = load_file(tmp_path / "model" / "model.safetensors")[
        "model.layers.2.experts.gate_up_proj"
    ]
    for half, name in enumerate(("gate", "up")):
        stack = checkpoint.tensors[f"layers.2.{name}"]
        assert len(stack.parts) == 5
        assert all(not part.stored.flags.owndata for part in stack.parts)
        wanted = both.reshape(5, 2, 24, 32)[:, half].reshape(-1, 32)
        np.testing.assert_array_equal(stack.to_f32(), wanted)


def test_a_gguf_file_in_eight_bits_answers_like_its_weights(tmp_path: Path) -> None:
    """The table of inputs is read row by row as it is encoded."""
    config = CONFIG | {"hidden_size_per_layer_input": 32, "tie_word_embeddings": False}
    config |= {"intermediate_size": 64, "hidden_size": 64, "global_head_dim": 16, "head_dim": 8}
    arch = arch_from_config(config, {}, "x")
    family, raw = GGUF_FAMILIES["gemma4"], {}
    for name, array in random_arrays(arch).items():
        in_file = family.outer.get(name, "")
        if not in_file:
            _, index, part = name.split(".")
            in_file = family.prefix.format(index) + family.layer[part]
        raw[in_file] = array
    raw["rope_freqs.weight"] = np.array([1] * 4 + [1e30] * 4, np.float32)
    meta = (
        META
        | vocabulary("gemma4")
        | {
            "gemma4.embedding_length": 64,
            "gemma4.embedding_length_per_layer_input": 32,
            "gemma4.feed_forward_length": [64] * 3 + [128] * 3,
            "gemma4.attention.sliding_window_pattern": [True, False] * 3,
            "tokenizer.ggml.merges": ["t 1"],
        }
    )
    path = write_gguf(tmp_path / "tiny.gguf", meta, raw)
    tensors = load_checkpoint(path).tensors
    assert tensors["inputs"].dtype == "Q8_0"
    arrays = {name: tensor.to_f32() for name, tensor in tensors.items()}
    with LLM(path, **OPTIONS) as llm:
        (out,) = llm.generate([TEXTS[0]], replace(PARAMS, prompt_logprobs=40))
    rows = out.prompt_logprobs[1:]
    got = np.array([[row[token].logprob for token in range(40)] for row in rows])
    logits = plain_logits(arch, arrays, tuple(TEXTS[0]), 64)[:-1]
    wanted = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(got, wanted, atol=2e-4)


MARKERS = ("<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>",
           "<tool_call|>", '<|"|>')  # fmt: skip
# What Gemma 4's template says of calls and thoughts, in short.
TEMPLATE = """{% for m in messages %}{{ '<|turn>' + m.role + '\n' + m.content + '<turn|>\n' }}
{%- for call in m.tool_calls %}{{ '<|tool_call>call:<|"|>' }}{% endfor %}{% endfor -%}
{{ '<|turn>model\n' }}
{%- if not enable_thinking %}{{ '<|channel>thought\n<channel|>' }}{% endif %}"""


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model whose markers are control tokens, and whose other tokens are single bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*MARKERS, *letters]
    config = CONFIG | {"vocab_size": len(names), "vocab_size_per_layer_input": len(names)}
    path = directory(tmp_path_factory.mktemp("talking") / "m", config | {"eos_token_id": 0})
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in MARKERS])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    with LLM(path, **OPTIONS) as llm:
        yield llm


def test_its_template_tells_how_it_calls_and_thinks(talking: LLM) -> None:
    side = talking.text
    assert (side.tool_format.name, side.reasoning) == ("gemma4", REASONINGS["gemma4"])
    use = ToolUse((Tool("weather", WEATHER),), is_required=True, is_parallel=False)
    hello = [{"role": "user", "content": "<|channel>Hi"}]
    told = {thinks: side.chat_template.render_ids(hello, enable_thinking=thinks)
            for thinks in (True, False)}  # fmt: skip
    forms = {thinks: side.message_form(ids, use, continues=False) for thinks, ids in told.items()}
    assert forms[True] == MessageForm(REASONINGS["gemma4"], tools=(side.tool_format, use))
    assert forms[False] == MessageForm(tools=(side.tool_format, use))
    assert told[True].count(MARKERS.index("<|channel>")) == 0  # what users write is text


@pytest.mark.parametrize("thinks", [True, False])
def test_a_call_of_control_tokens_parses_and_fits(talking: LLM, thinks: bool) -> None:
    side = talking.text
    use = ToolUse((Tool("weather", WEATHER),), is_required=True, is_parallel=False)
    form = MessageForm(REASONINGS["gemma4"] if thinks else None, tools=(side.tool_format, use))
    call = '<|tool_call>call:weather{city:<|"|>A "b" {c}<|"|>,days:3}<tool_call|>'
    said = ("<|channel>thought\nHm, <b>.\n<channel|>" if thinks else "") + call
    new = side.new_constraint(SamplingParams(max_tokens=200), form)
    assert new is not None
    ids = tuple(side.tokenizer.encode(said, add_bos=False))
    assert len(ids) < len(said) - 20  # markers are one token each
    assert new().num_valid(ids) == len(ids)
    spelled = side.tokenizer.encode(said, add_bos=False, parse_special=False)
    assert new().num_valid(tuple(spelled)) < len(spelled)
    text = side.new_text((), SamplingParams(), form)
    for token in ids:
        text.feed(token, False)
    text.finish()
    shown = text.take()
    reader = MessageReader(form)
    pieces = reader.feed(shown) + reader.finish()
    arguments = "".join(piece.text for piece in pieces if piece.kind == "arguments")
    assert json.loads(arguments) == {"city": 'A "b" {c}', "days": 3}
    assert [p.text for p in pieces if p.kind == "reasoning"] == ["Hm, <b>."] * thinks
    random = written(side, form, "", 3)
    assert random is None or "call:weather{city:" in random


def test_the_cpu_backend_refuses_biases_by_name(tmp_path: Path) -> None:
    """No published model has them."""
    path = directory(tmp_path / "model", CONFIG | {"attention_bias": True})
    with pytest.raises(ValueError, match="layer 0 has a bias before a norm behind: use --backend"):
        LLM(path, backend="cpu", kv_cache_memory="64KiB")
