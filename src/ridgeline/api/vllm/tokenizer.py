"""A model's tokenizer with the methods that users of vLLM's ``get_tokenizer`` call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.text.template.chat import ChatTemplate
from ridgeline.text.tokenizers.tokenizer import Tokenizer


class TokenizerView:
    """Text to token ids and back, and conversations to either, by Hugging Face's names.

    Attributes:
        bos_token_id: what begins a text, None where nothing does.
        eos_token_id: what ends an answer, None where nothing does.
        vocab_size: one more than the highest id.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, eos_ids: Sequence[int]
    ) -> None:
        """Show ``tokenizer`` and ``template``."""
        self._tokenizer, self._template = tokenizer, template
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = eos_ids[0] if eos_ids else None
        self.vocab_size: int = tokenizer.vocab_size

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
