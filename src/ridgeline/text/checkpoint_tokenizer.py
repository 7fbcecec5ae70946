"""A model's tokenizer, from what its files say."""

from __future__ import annotations

from ridgeline.model.files.tensors import Checkpoint
from ridgeline.text.infill import FIM_SPELLINGS
from ridgeline.text.tokenizers.tokenizer import Tokenizer, load_tokenizer


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """Return the tokenizer; control tokens are also those that templates or infilling name.

    Raises:
        ModelFileError: damaged, hostile or not supported; the message says what.
    """
    return load_tokenizer(
        checkpoint.tokenizer,
        checkpoint.bos_id,
        checkpoint.begin_ids,
        checkpoint.end_ids,
        checkpoint.eos_ids,
        named_in=" ".join(
            (FIM_SPELLINGS, checkpoint.chat_template or "", checkpoint.tool_template or "")
        ),
    )
