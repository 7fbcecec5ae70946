"""What directories say of text: those of published models, as far as it is said there, and others.

A row has the few values of a published directory's files that speak of ends, beginnings and
templates, with its own ids. Texts of templates are stand-ins: only their places count.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ridgeline.model.files.folder import Folder
from ridgeline.model.files.tensors import ModelFileError
from ridgeline.model.files.text_files import TextFacts, text_facts

DEFAULT, TOOLS = "{{ messages }}", "{{ tools }}"
NAMED = [{"name": "default", "template": DEFAULT}, {"name": "tool_use", "template": TOOLS}]


class Published(NamedTuple):
    """A directory.

    ``tokens`` are added tokens of tokenizer.json; ``in_front`` is what its post-processor puts
    there. ``ends``, ``bos`` and ``begins`` are what transformers and vLLM go by.
    """

    vocab_size: int
    config: dict[str, Any]
    generation: dict[str, Any] | None
    tokenizer: dict[str, Any]
    tokens: dict[str, int]
    ends: tuple[int, ...]
    bos: int | None
    begins: tuple[int, ...] = ()
    in_front: str = ""
    files: dict[str, str] = {}  # noqa: RUF012
    templates: tuple[str | None, str | None] = (DEFAULT, None)


def table(**tokens: int) -> dict[str, Any]:
    """Return a table of added tokens, which transformers 5 does not write any more."""
    return {"added_tokens_decoder": {str(i): {"content": name} for name, i in tokens.items()}}


QWEN = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
LLAMA_3 = {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|eot_id|>": 128009}
TEKKEN = {"<unk>": 0, "<s>": 1, "</s>": 2}
# With the bars and blanks that DeepSeek writes.
SENTENCE_BEGIN = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
SENTENCE_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
JINJA = {"chat_template.jinja": DEFAULT}
PUBLISHED = {
    "Qwen3-0.6B": Published(
        151_936,
        {"eos_token_id": 151645, "bos_token_id": 151643},
        {"eos_token_id": [151645, 151643], "bos_token_id": 151643},
        {"eos_token": "<|im_end|>", "bos_token": None, "add_bos_token": False,
         "chat_template": DEFAULT} | table(**QWEN),
        QWEN,
        ends=(151645, 151643),
        bos=151643,
    ),
    "a fine-tune of Qwen2.5, saved by transformers 5": Published(
        151_936,
        {"eos_token_id": 151643, "bos_token_id": None},
        {"eos_token_id": 151643},
        {"backend": "tokenizers", "eos_token": "<|im_end|>", "model_max_length": 32768,
         "tokenizer_class": "Qwen2Tokenizer"},
        QWEN,
        ends=(151645, 151643),
        bos=None,
        files=JINJA,
    ),
    "Llama-3.1-8B-Instruct": Published(
        128_256,
        {"eos_token_id": [128001, 128008, 128009], "bos_token_id": 128000},
        {"eos_token_id": [128001, 128008, 128009], "bos_token_id": 128000},
        {"eos_token": "<|eot_id|>", "bos_token": "<|begin_of_text|>", "chat_template": DEFAULT}
        | table(**LLAMA_3),
        LLAMA_3,
        ends=(128009, 128001, 128008),
        bos=128000,
        begins=(128000,),
        in_front="<|begin_of_text|>",
    ),
    "gemma-3-4b-it": Published(
        262_208,
        {"eos_token_id": [1, 106], "text_config": {"hidden_size": 2560}},
        {"eos_token_id": [1, 106], "bos_token_id": 2},
        {"eos_token": "<eos>", "bos_token": "<bos>", "add_bos_token": True,
         "chat_template": DEFAULT} | table(**{"<eos>": 1, "<bos>": 2}),
        {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<end_of_turn>": 106},
        ends=(1, 106),
        bos=2,
        begins=(2,),
        files={"chat_template.json": json.dumps({"chat_template": "older"})},
    ),
    "Mistral-Small-3.1-24B-Instruct-2503": Published(
        131_072,
        {"text_config": {"hidden_size": 5120}},
        {"eos_token_id": 2, "bos_token_id": 1},
        {"eos_token": "</s>", "bos_token": "<s>"} | table(**TEKKEN),
        TEKKEN,
        ends=(2,),
        bos=1,
        begins=(1,),
        in_front="<s>",
        files={"chat_template.json": json.dumps({"chat_template": DEFAULT})},
    ),
    "gpt-oss-20b": Published(
        201_088,
        {"eos_token_id": 200002},
        {"eos_token_id": [200002, 199999, 200012], "bos_token_id": 199998},
        {"eos_token": "<|return|>", "bos_token": "<|startoftext|>"}
        | table(**{"<|startoftext|>": 199998, "<|return|>": 200002}),
        {"<|startoftext|>": 199998, "<|endoftext|>": 199999, "<|return|>": 200002,
         "<|call|>": 200012},
        ends=(200002, 199999, 200012),
        bos=199998,
        files=JINJA,
    ),
    "DeepSeek-R1-Distill-Qwen-1.5B": Published(
        151_936,
        {"eos_token_id": 151643, "bos_token_id": 151643},
        {"eos_token_id": 151643, "bos_token_id": 151646},
        {"eos_token": {"content": SENTENCE_END}, "add_eos_token": False,
         "bos_token": {"content": SENTENCE_BEGIN}, "add_bos_token": True,
         "chat_template": DEFAULT},
        {SENTENCE_END: 151643, SENTENCE_BEGIN: 151646},
        ends=(151643,),
        bos=151646,
        begins=(151646,),
    ),
    "Phi-4-mini-instruct": Published(
        200_064,
        {"eos_token_id": 199999, "bos_token_id": 199999},
        {"eos_token_id": [200020, 199999], "bos_token_id": 199999},
        {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "add_bos_token": False,
         "chat_template": DEFAULT} | table(**{"<|endoftext|>": 199999}),
        {"<|endoftext|>": 199999, "<|end|>": 200020},
        ends=(199999, 200020),
        bos=199999,
    ),
    "Hermes-2-Pro-Mistral-7B": Published(
        32_032,
        {"eos_token_id": 32000, "bos_token_id": 1},
        {"eos_token_id": 32000, "bos_token_id": 1},
        {"eos_token": "<|im_end|>", "bos_token": "<s>", "add_bos_token": True,
         "chat_template": NAMED} | table(**{"<s>": 1, "<|im_end|>": 32000}),
        {"<s>": 1, "</s>": 2, "<|im_end|>": 32000},
        ends=(32000,),
        bos=1,
        begins=(1,),
        templates=(DEFAULT, TOOLS),
    ),
    "the same, saved by transformers 5": Published(
        32_032,
        {"eos_token_id": 2, "bos_token_id": 1},
        {"eos_token_id": 2, "bos_token_id": 1},
        {"eos_token": "<|im_end|>", "bos_token": "<s>"},
        {"<s>": 1, "</s>": 2, "<|im_end|>": 32000},
        ends=(32000, 2),
        bos=1,
        begins=(1,),
        in_front="<s>",
        files=JINJA | {"additional_chat_templates/tool_use.jinja": TOOLS},
        templates=(DEFAULT, TOOLS),
    ),
}  # fmt: skip


def written(folder: Path, **files: Any) -> Folder:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return Folder(folder)


def facts(folder: Path, config: dict[str, Any], vocab_size: int = 100, **files: Any) -> TextFacts:
    return text_facts(written(folder, **files), config, vocab_size)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_directories(name: str, tmp_path: Path) -> None:
    one = PUBLISHED[name]
    front = [{"SpecialToken": {"id": one.in_front}}] if one.in_front else []
    tokenizer = {
        "added_tokens": [{"id": i, "content": token} for token, i in one.tokens.items()],
        "model": {"vocab": {}},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*front, {"Sequence": {"id": "A"}}],
            "special_tokens": {token: {"ids": [i]} for token, i in one.tokens.items()},
        },
    }
    for file, text in one.files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    files = {"tokenizer": tokenizer, "tokenizer_config": one.tokenizer}
    files |= {"generation_config": one.generation} if one.generation else {}
    found = facts(tmp_path, one.config, one.vocab_size, **files)
    assert found.eos_ids == one.ends
    assert (found.bos_id, found.begin_ids) == (one.bos, one.begins)
    assert (found.chat_template, found.tool_template) == one.templates
    assert found.notes == ()


END, ADDED = {"eos_token": "<e>"}, {"added_tokens": [{"id": 7, "content": "<e>"}]}


@pytest.mark.parametrize(
    "tokenizer",
    [
        ADDED,
        {"added_tokens": [], "model": {"vocab": {"<e>": 7}}},
        {"model": {"vocab": [["a", 0.0]] * 7 + [["<e>", 0.0]]}},
    ],
)
@pytest.mark.parametrize("files", [
    {"tokenizer_config": END},
    {"special_tokens_map": END},
    {"tokenizer_config": {"eos_token": "<other>"}, "special_tokens_map": END},
    {"tokenizer_config": END | table(), "special_tokens_map": {"eos_token": "<other>"}},
    {"tokenizer_config": {"eos_token": {"content": "<e>", "lstrip": False}}},
])  # fmt: skip
def test_an_end_that_only_the_tokenizer_names(
    files: dict[str, Any], tokenizer: dict[str, Any], tmp_path: Path
) -> None:
    found = facts(tmp_path, {}, tokenizer=tokenizer, **files)
    assert (found.eos_ids, found.notes) == ((7,), ())
    assert facts(tmp_path, {"eos_token_id": [3, 7]}).eos_ids == (7, 3)


def test_ends_of_the_text_half_and_of_each_file_are_all_ends(tmp_path: Path) -> None:
    config = {"eos_token_id": None, "text_config": {"eos_token_id": 5, "bos_token_id": 9}}
    generation = {"eos_token_id": [6, 5], "bos_token_id": None}
    found = facts(tmp_path, config, generation_config=generation)
    assert (found.eos_ids, found.bos_id) == ((6, 5), 9)


def test_an_end_that_is_of_no_use_is_named(tmp_path: Path) -> None:
    found = facts(tmp_path, {"eos_token_id": 200}, tokenizer=ADDED, tokenizer_config={
        "eos_token": "<gone>", "bos_token": "<e>"})  # fmt: skip
    assert (found.eos_ids, found.bos_id) == ((), 7)
    missing, beyond = found.notes
    assert missing == "the tokenizer's eos_token is '<gone>', which is none of its tokens"
    assert beyond == "eos token 200 is beyond the vocabulary of 100"


def test_the_first_place_of_templates_that_has_any_counts(tmp_path: Path) -> None:
    def templates(**files: Any) -> tuple[str | None, str | None]:
        found = facts(tmp_path, {}, **files)
        return found.chat_template, found.tool_template

    assert templates() == (None, None)
    older = {"chat_template": {"default": "older"}}
    assert templates(chat_template=older) == ("older", None)
    alone = {"chat_template": [{"name": "tool_use", "template": TOOLS}]}
    assert templates(tokenizer_config=alone) == (None, TOOLS)
    assert templates(tokenizer_config={"chat_template": NAMED}) == (DEFAULT, TOOLS)
    (tmp_path / "chat_template.jinja").write_text("own ü", encoding="utf-8")
    assert templates() == ("own ü", None)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("own tools")
    assert templates() == ("own ü", "own tools")
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFileError, match=r"tool_use\.jinja: not UTF-8"):
        templates()


@pytest.mark.parametrize("template", [5, [{"name": "default", "template": 5}], {"tool_use": []}])
def test_a_template_that_is_no_text_is_refused(template: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer_config\.json: chat_template is \["):
        facts(tmp_path, {}, tokenizer_config={"chat_template": template})
