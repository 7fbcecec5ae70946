"""A model's tokenizer with the methods that users of vLLM's ``get_tokenizer`` call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from ridgeline.text.template.chat import ChatTemplate
from ridgeline.text.tokenizers.tokenizer import Tokenizer


class TokenizerView:
    """Text to token ids and back, and conversations to either, by Hugging Face's names.

    Attributes:
        bos_token_id: what begins a text, None where nothing does; ``bos_token`` is its spelling.
        eos_token_id: what ends an answer, None where nothing does; ``eos_token`` is its spelling.
        vocab_size: one more than the highest id.
        chat_template: the template's source, None where the model has none.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, eos_ids: Sequence[int]
    ) -> None:
        """Show ``tokenizer`` and ``template``."""
        self._tokenizer, self._template = tokenizer, template
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = eos_ids[0] if eos_ids else None
        self.vocab_size: int = tokenizer.vocab_size
        self.chat_template = template.source or None

    @property
    def bos_token(self) -> str | None:
        """How the token that begins a text is written."""
        return None if self.bos_token_id is None else self._tokenizer.piece(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        """How the token that ends an answer is written."""
        return None if self.eos_token_id is None else self._tokenizer.piece(self.eos_token_id)

    @cached_property
    def _ids(self) -> dict[str, int]:
        pieces = ((self._tokenizer.piece(i), i) for i in range(self.vocab_size))
        return {piece: i for piece, i in pieces if piece is not None}

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token, by how the vocabulary writes it."""
        return dict(self._ids)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or of each, as the vocabulary writes it; None for no token."""
        if isinstance(tokens, str):
            return self._ids.get(tokens)
        return [self._ids.get(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        """Return how the vocabulary writes a token, or each; None for an id that is none."""
        if isinstance(ids, int):
            return self._tokenizer.piece(ids)
        return [self._tokenizer.piece(token) for token in ids]

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True
    ) -> dict[str, list[Any]]:
        """Return ``input_ids`` and ``attention_mask`` of a text, or of each.

        Raises ValueError for text that is none.
        """
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        rows = [self(each, add_special_tokens) for each in text]
        return {name: [row[name] for row in rows] for name in ("input_ids", "attention_mask")}

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        """Return the text of each row of ids."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. Raises ValueError for text that is none."""
        return self._tokenizer.encode(text, add_bos=None if add_special_tokens else False)

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False) -> str:
        """Return the text of ids. Raises ValueError for an id that is none."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int] | str:
        """Return a conversation as the model's chat template writes it: as ids, or as text.

        Raises ValueError if there is no template, or it refuses the conversation.
        """
        render = self._template.render_ids if tokenize else self._template.render_text
        return render(
            conversation,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(variables | ({"tools": tools} if tools else {})),
        )
