"""What a GGUF file says of a model's texts: tokens, which ones begin and end texts, a template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ridgeline.model.files.checkpoint import eos_ids_of
from ridgeline.model.files.facts import Facts
from ridgeline.model.files.tensors import Checkpoint, ModelFileError
from ridgeline.text.of_checkpoint import tokenizer_of
from ridgeline.text.tokenizers.gguf_keys import gguf_vocabulary
from ridgeline.text.tokenizers.tokenizer import Tokenizer, read_spec


def text_keys(checkpoint: Checkpoint, architecture: str) -> dict[str, Any]:
    """Return keys and values that make of a file's reader the same tokenizer and template.

    ``architecture`` is GGUF's name of the model's.

    Raises:
        ModelFileError: no GGUF file can say it.
    """
    assert isinstance(checkpoint.tokenizer, Path)
    spec, own = read_spec(checkpoint.tokenizer), tokenizer_of(checkpoint)

    def loaded(keys: Mapping[str, Any]) -> Tokenizer:
        known = {"general.architecture": architecture, **keys}
        return tokenizer_of(replace(checkpoint, tokenizer=known))

    try:
        values = gguf_vocabulary(spec, own, loaded, checkpoint.arch.vocab_size)
    except ModelFileError as error:
        raise ModelFileError(f"{checkpoint.path}: {error}") from None
    bos, begin = checkpoint.bos_id, checkpoint.begin_ids
    if begin not in ((), (bos,)) or own.end_ids:
        raise ModelFileError(
            f"{checkpoint.path}: its texts begin with the tokens {list(begin)} and end with "
            f"{list(own.end_ids)}; GGUF files of decoders can say one token, in front"
        )
    values["general.name"] = checkpoint.path.resolve().name
    values["tokenizer.ggml.add_bos_token"] = bool(begin)
    if bos is not None:
        values["tokenizer.ggml.bos_token_id"] = bos
    if checkpoint.chat_template is not None:
        values["tokenizer.chat_template"] = checkpoint.chat_template
    if checkpoint.tool_template is not None:
        values["tokenizer.chat_template.tool_use"] = checkpoint.tool_template
    return values | _ends(checkpoint, values)


def _ends(checkpoint: Checkpoint, values: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of tokens that end an answer, but for those that any reader takes for ends.

    Raises ModelFileError: there are more than keys.
    """
    found: dict[str, Any] = {}
    roles = iter(("eos", "eot", "eom"))
    for token in checkpoint.eos_ids:
        facts = Facts(values | found, str(checkpoint.path))
        if found and token in eos_ids_of(facts, checkpoint.arch.vocab_size):
            continue
        role = next(roles, None)
        if role is None:
            facts.fail(f"{len(checkpoint.eos_ids)} tokens end an answer, more than a GGUF file can "
                       f"say: shorten eos_token_id in generation_config.json")  # fmt: skip
        found[f"tokenizer.ggml.{role}_token_id"] = token
    return found
