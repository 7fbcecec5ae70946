"""The text side of a model: prompts become token ids, tokens become text.

What ``LLM`` and the server share beside the engine. It computes nothing and schedules nothing.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.core.decoding.search import with_recommended
from ridgeline.core.decoding.text import TextStream
from ridgeline.core.params import SamplingParams
from ridgeline.core.request import Constraint, Text
from ridgeline.core.structured import StructuredOutputsParams
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.system.machine import give_back, memory_in_use
from ridgeline.text.checkpoint_tokenizer import tokenizer_of
from ridgeline.text.grammar.export import tokenizer_config
from ridgeline.text.infill import File, InfillPrompt, find_fim_tokens, infill_prompt
from ridgeline.text.messages.call_bounds import BoundedCalls
from ridgeline.text.messages.json_repeats import EndingRepeats, JsonTokens, json_tokens
from ridgeline.text.messages.message import REASONINGS, MessageForm
from ridgeline.text.messages.tool_grammar import message_grammar
from ridgeline.text.messages.tools import ToolFormat, ToolUse, format_named
from ridgeline.text.template.chat import ChatTemplate
from ridgeline.text.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ridgeline.text.grammar.grammars import Grammars

REASONING_PARSERS = ("auto", "none", *REASONINGS)

Message = Mapping[str, Any]
Prompt = str | Sequence[int]
AnyPrompt = Prompt | Mapping[str, Any] | Sequence[Message]  # vLLM's forms, and a conversation
_IN_PROMPT = ("prompt", "prompt_token_ids")  # the keys of vLLM's forms, of which the ids count


@dataclass(frozen=True, slots=True)
class ConstraintFactory:
    """What makes the constraint of each answer.

    Attributes:
        new: makes one.
        ignored: paths of what the schemas of tools say and no answer is held to.
    """

    new: Callable[[], Constraint]
    ignored: tuple[str, ...] = ()

    def __call__(self) -> Constraint:
        """Return the constraint of one answer."""
        return self.new()


class TextProcessor:
    """A model's tokenizer, chat template and recommended sampling.

    Attributes:
        tokenizer: text to token ids, and back.
        chat_template: conversations to token ids.
        lexicon: what sampling parameters say of tokens, in ids.
        can_chat: whether the model has a chat template.
        vocab_size: token ids are below this.
        fim: the model's tokens for filling in the middle, None where it has none.
        generation_defaults: sampling parameters that the model's files or its card recommend.
        tokenizer_config: the facts of its tokenizer, by Hugging Face's names.
        tool_format: how the model writes calls of tools.
        reasoning: how it marks its reasoning, if it does.
        pooling: which final state is a text's vector (``SamplingParams.pool``).
        normalises: whether such vectors are scaled to length 1.
        has_head: whether it answers; else it makes vectors alone, or scores.
        vector_size: values of a text's vector.
        has_scores: whether it gives scores of pairs of texts, and no vectors.
        library_bytes: by how much the process grew for the library's tokenizer, built when needed.
    """

    def __init__(self, checkpoint: Checkpoint, card: Mapping[str, Any]) -> None:
        """Take what the model's files say; ``card`` holds sampling that they leave open."""
        self.vocab_size = checkpoint.arch.vocab_size
        self.pooling = checkpoint.arch.pooling or "last"
        self.normalises = checkpoint.normalises
        self.has_head = checkpoint.arch.has_head
        self.vector_size = checkpoint.vector_size
        self.has_scores = bool(checkpoint.arch.scores)
        self._between = checkpoint.between_ids
        self.tokenizer = tokenizer_of(checkpoint)
        self.library_bytes = 0
        self.tokenizer.building = self._measured
        self.fim = find_fim_tokens(self.tokenizer, checkpoint.tokenizer)
        self.chat_template = _chat_template(checkpoint, self.tokenizer)
        self.can_chat = checkpoint.can_chat
        self.tokenizer_config = tokenizer_config(checkpoint, self.tokenizer)
        from ridgeline.text.token_rules import (
            Lexicon,  # here: behind numpy, or that takes 50 ms more
        )

        self.lexicon = Lexicon(self.tokenizer, checkpoint.eos_ids, self.vocab_size)
        self._eos_ids = checkpoint.eos_ids
        self._lock = threading.Lock()
        self._grammars: Grammars | None = None
        self._grammar_limits: dict[str, Any] = {}
        self.generation_defaults: dict[str, Any] = {**card, **checkpoint.generation_defaults}
        self.choose_parsers("auto", "auto")

    @contextmanager
    def _measured(self) -> Iterator[None]:
        before = memory_in_use()
        yield
        give_back()
        self.library_bytes = max(0, memory_in_use() - before)

    def use_chat_template(self, file: Path) -> None:
        """Have prompts written by the chat template in a file; to be called before others read it.

        Raises OSError, and ValueError for one that cannot write a greeting.
        """
        own, self.chat_template = self.chat_template, self.chat_template.rewritten(file.read_text())
        own.close()
        self.can_chat = True
        try:
            self.chat_template.render_text([{"role": "user", "content": "Hello"}])
        except ValueError as error:
            raise ValueError(f"--chat-template {file}: {error}") from None

    def choose_parsers(self, tool_call: str, reasoning: str) -> None:
        """Say how the model writes calls and reasoning; ``auto`` looks into its chat template.

        ``reasoning`` is one of ``REASONING_PARSERS``. Raises ValueError for a tool-call parser that
        is not known.
        """
        template = self.chat_template.sources
        self.tool_format: ToolFormat = format_named(tool_call, self.chat_template.tool_source)
        self.reasoning = REASONINGS.get(reasoning)
        if reasoning == "auto":
            markers = REASONINGS.values()
            self.reasoning = next((marks for marks in markers if marks.end in template), None)
        form, marks = self.tool_format, self.reasoning or REASONINGS["qwen3"]
        ids = {
            marker: self.tokenizer.special_id(marker)
            for marker in (form.begin, form.end, form.quote, marks.begin, marks.end)
        }
        self._marker_ids = {marker: token for marker, token in ids.items() if token is not None}

    def default_params(self, **changes: Any) -> SamplingParams:
        """Return the recommended sampling with ``changes``. Raises ValueError if out of range."""
        return with_recommended(self.generation_defaults, **changes)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt. Raises ValueError if it is neither text nor ids."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not is_list(prompt) or not all(type(token) is int for token in prompt):
            raise ValueError(f"a prompt must be text or a list of token ids, not {prompt!r:.80}")
        for token in prompt:
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"the prompt has token {token}, but this model's ids are "
                    f"0 to {self.vocab_size - 1}"
                )
        return list(prompt)

    def encode_any(self, prompt: AnyPrompt) -> list[int]:
        """Return the token ids of a prompt in any of its forms, or of a conversation.

        Raises ValueError as ``encode`` does, for a form that is not known, and if the model has no
        chat template, or that refuses.
        """
        if is_chat(prompt):
            return self.chat_template.render_ids(prompt)  # type: ignore[arg-type]
        if not isinstance(prompt, Mapping):
            return self.encode(prompt)  # type: ignore[arg-type]
        others = [name for name, value in prompt.items() if name not in _IN_PROMPT and _says(value)]
        value = next((prompt[n] for n in reversed(_IN_PROMPT) if prompt.get(n) is not None), None)
        if others or value is None:
            wrong = f"has {', '.join(map(repr, others))}" if others else "has neither"
            raise ValueError(
                f"a prompt is {{'prompt'}} or {{'prompt_token_ids'}}: this one {wrong}"
            )
        return self.encode(value)

    def encode_whole(self, text: Prompt, most: int | None = None) -> list[int]:
        """Return the token ids of a text that becomes a vector.

        Of more than ``most`` it keeps the first, and what the model ends a text with. Raises
        ValueError as ``encode`` does.
        """
        ids = self.encode(text)
        if most is None or len(ids) <= most:
            return ids
        ends = self.tokenizer.end_ids if isinstance(text, str) else ()
        return [*ids[: max(0, most - len(ends))], *ends]

    def encode_pair(self, one: str, other: str, most: int | None = None) -> list[int]:
        """Return the token ids of two texts that are read together; of too many the last go.

        What spells a control token is text. Raises ValueError if the first leaves no room.
        """
        tokenizer = self.tokenizer
        first, second = (
            tokenizer.encode(text, parse_special=False, add_bos=False) for text in (one, other)
        )
        first = [*tokenizer.begin_ids, *first, *self._between]
        if most is not None:
            room = most - len(first) - len(tokenizer.end_ids)
            if room < 1:
                raise ValueError(f"the first text of a pair has {len(first)} tokens of {most}")
            second = second[:room]
        return [*first, *second, *tokenizer.end_ids]

    def check_vectors(self) -> None:
        """Raise ValueError if the model gives scores of pairs, and no vectors."""
        if self.has_scores:
            raise ValueError(
                "this model scores pairs of texts and makes no embeddings: use /v1/rerank, "
                "/v1/score, or LLM.score"
            )

    def check_task(self, params: SamplingParams) -> None:
        """Raise ValueError if the model has no answers, and one is asked for."""
        if not self.has_head and not params.pool:
            raise ValueError(
                "this model cannot generate text: it makes embeddings, or scores pairs of "
                "texts; use /v1/embeddings or /v1/rerank, LLM.embed or LLM.score"
            )

    def encode_infill(
        self, prefix: Prompt, suffix: str, files: Sequence[File] = (), room: int = sys.maxsize
    ) -> InfillPrompt:
        """Return the prompt for what belongs between two texts (``text.infill``).

        Raises ValueError if the model has no tokens for it, or for texts that are none.
        """
        if self.fim is None:
            raise ValueError(
                "suffix cannot be used: this model has no fill-in-the-middle tokens; "
                "models for code have them, such as Qwen2.5-Coder"
            )
        if not isinstance(suffix, str):
            raise ValueError(f"suffix must be text, not {suffix!r:.80}")
        if not isinstance(prefix, str):
            prefix = self.encode(prefix)
        return infill_prompt(self.tokenizer, self.fim, prefix, suffix, files, room)

    def ending_at_fim(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters of an answer between two texts: it also ends where it marks one."""
        if self.fim is None or params.ignore_eos:
            return params
        return replace(params, stop_token_ids=(*params.stop_token_ids, *self.fim.stops))

    def encode_prediction(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the token ids of what the answer will be like, if that was said."""
        if not params.prediction:
            return ()
        return tuple(self.tokenizer.encode(params.prediction, add_bos=False))

    def spell(self, token: int) -> str:
        """Return what a token stands for; bytes that are not UTF-8 come out as U+FFFD."""
        return self.tokenizer.token_bytes(token).decode("utf-8", errors="replace")

    def begun_text(self, prompt: Sequence[int]) -> str:
        """Return the text that an answer to a prompt goes on with, as far as it is shown with it.

        It begins behind the last control token; between two texts it is the one before.
        """
        ids, fim = list(prompt), self.fim
        if fim is not None and ids and ids[-1] == fim.middle and fim.suffix in ids:
            del ids[len(ids) - 1 - ids[::-1].index(fim.suffix) :]
        is_special, start = self.tokenizer.is_special, len(ids)
        while start and not is_special(ids[start - 1]):
            start -= 1
        return self.tokenizer.decode(ids[start:])

    def message_form(
        self, prompt: Sequence[int], use: ToolUse | None, *, continues: bool
    ) -> MessageForm | None:
        """Return what the answer to a conversation may have, None for text alone.

        Args:
            prompt: its token ids.
            use: the tools that may be called.
            continues: whether the answer goes on with a message that has begun.
        """
        tools = (self.tool_format, use) if use else None
        reasoning = None if continues else self.reasoning
        tail = self.tokenizer.decode(prompt[-8:], skip_special=False).rstrip()
        if reasoning is not None and tail.endswith(reasoning.end):  # it was told not to
            reasoning = None
        if reasoning is None and tools is None:
            return None
        begun = reasoning is not None and tail.endswith(reasoning.begin)
        return MessageForm(reasoning, begun, tools)

    def new_constraint(
        self,
        params: SamplingParams,
        form: MessageForm | None = None,
        *,
        may_compile: bool = True,
    ) -> ConstraintFactory | None:
        """Return what makes the constraint of each answer, for ``Engine.add``; None for none.

        ``form`` is what a message may have besides. Raises ValueError, with the reason, for a form
        that cannot be had, and ``NotCached`` if a grammar must not be compiled and is not cached.
        """
        structured = params.structured_outputs
        if structured is None and (form is None or form.tools is None):
            return None
        body = _grammar_of(structured) if structured else {"kind": "lark", "text": ""}
        if form is None:
            return self._constraint(body, may_compile=may_compile)
        try:
            return self._constraint(body, form, may_compile=may_compile)
        except ValueError:
            simpler, lost = self._without_unknown(form, may_compile)
            if not lost:
                raise
        return self._constraint(body, simpler, lost, may_compile=may_compile)

    def _constraint(
        self,
        body: Mapping[str, str],
        form: MessageForm | None = None,
        lost: tuple[str, ...] = (),
        *,
        may_compile: bool,
    ) -> ConstraintFactory:
        """Return what makes constraints. ``lost`` are paths of what is left out already."""
        from ridgeline.text.grammar.grammars import Grammars, Source  # here: most starts need none

        with self._lock:
            if self._grammars is None:
                self._grammars = Grammars(
                    self.tokenizer, self._eos_ids, give_back=give_back, **self._grammar_limits
                )
        source = Source(**body)
        if form is not None:
            framed = message_grammar(form, self._marker_ids)
            source = source._replace(frame=framed.text, schemas=json.dumps(framed.schemas))
            lost += framed.ignored
        new = self._grammars.constraint(source, may_compile=may_compile)
        has_json, ignored = source.kind == "json", (*lost, *new.ignored)
        if form is None and not has_json:
            return ConstraintFactory(new, ignored)
        spell, tokens = self.tokenizer.token_bytes, self._json_tokens
        return ConstraintFactory(
            lambda: EndingRepeats(new(), spell, tokens, form, has_json=has_json), ignored
        )

    @cached_property
    def _json_tokens(self) -> JsonTokens:
        return json_tokens(map(self.spell, range(self.tokenizer.vocab_size)))

    def _without_unknown(
        self, form: MessageForm, may_compile: bool
    ) -> tuple[MessageForm, tuple[str, ...]]:
        """Return the form with any object as arguments of tools whose grammar cannot be had.

        Also returns the paths of their schemas. Raises ValueError, which names the tool, if such a
        tool is strict.
        """
        if form.tools is None:
            return form, ()
        tool_format, use = form.tools
        tools, lost = list(use.tools), list[str]()
        for i, tool in enumerate(tools):
            alone = form._replace(tools=(tool_format, use._replace(tools=(tool,))))
            try:
                self._constraint({"kind": "lark", "text": ""}, alone, may_compile=may_compile)
            except ValueError as error:
                at = f"tools[{i}].function.parameters"
                if tool.is_strict:
                    raise ValueError(f"{at}: {error}") from None
                tools[i] = tool._replace(parameters={})
                lost.append(at)
        return form._replace(tools=(tool_format, use._replace(tools=tuple(tools)))), tuple(lost)

    def limit_grammars(self, *, max_bytes: int, timeout_s: float) -> None:
        """Bound the grammars that are compiled from now on: bytes of text, seconds each."""
        self._grammar_limits = {"max_bytes": max_bytes, "timeout_s": timeout_s}

    def new_text(
        self, prompt: tuple[int, ...], params: SamplingParams, form: MessageForm | None = None
    ) -> TextStream:
        """Return what turns an answer's tokens into text, for ``Engine.add``.

        The markers of a ``form`` are text, also those that are control tokens.
        """
        shown = self._marker_ids.values() if form else ()
        decoder = self.tokenizer.new_decoder(prompt, params.skip_special_tokens, shown)
        shows_stop = params.include_stop_str_in_output
        return TextStream(decoder, tuple(params.stop), shows_stop=shows_stop)

    def new_answer(
        self, prompt: tuple[int, ...], params: SamplingParams, form: MessageForm | None = None
    ) -> Text:
        """Return the same for an answer that its calls may end, if its ``form`` has some."""
        text = self.new_text(prompt, params, form)
        return BoundedCalls(text, form) if form and form.tools else text

    def close(self) -> None:
        """End the processes of the chat template and of grammars, if there are such."""
        self.chat_template.close()
        if self._grammars is not None:
            self._grammars.close()


def _grammar_of(structured: StructuredOutputsParams) -> dict[str, str]:
    """Return the grammar that is asked for, as ``text.grammar.grammars.Source`` has it."""
    if structured.regex is not None:
        return {"kind": "regex", "text": structured.regex}
    if structured.grammar is not None:
        return {"kind": "grammar", "text": structured.grammar}
    if structured.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in structured.choice)
        return {"kind": "lark", "text": f"start: {texts}"}
    schema = '{"type": "object"}' if structured.json is None else str(structured.json)
    source = {"kind": "json", "text": schema}
    if structured.disable_any_whitespace:
        return source | {"whitespace": ""}
    if structured.whitespace_pattern is not None:
        return source | {"whitespace": structured.whitespace_pattern}
    return source


def _chat_template(checkpoint: Checkpoint, tokenizer: Tokenizer) -> ChatTemplate:
    def spell(token: int | None) -> str:
        return "" if token is None else tokenizer.token_bytes(token).decode()

    eos = checkpoint.eos_ids[0] if checkpoint.eos_ids else None
    return ChatTemplate(
        checkpoint.chat_template,
        tokenizer,
        spell(checkpoint.bos_id),
        spell(eos),
        tool_source=checkpoint.tool_template,
    )


def cut(ids: Sequence[int], sampling: SamplingParams, max_model_len: int) -> tuple[int, ...]:
    """Return the last tokens of a prompt, where it is to be cut. Raises ValueError for none.

    What fits leaves room for the answer, or for a token of one that has no limit.
    """
    most = sampling.truncate_prompt_tokens
    if most is None:
        return tuple(ids)
    if most == 0:
        raise ValueError("truncate_prompt_tokens is 0, which leaves nothing: -1, or at least 1")
    room = max_model_len - (0 if sampling.pool else sampling.max_tokens or 1)
    return tuple(ids[-(max(1, room) if most < 0 else most) :])


def is_list(value: object) -> bool:
    """Return whether a value is a list of some kind, and not text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def as_many(prompts: AnyPrompt | Sequence[AnyPrompt]) -> Sequence[AnyPrompt]:
    """Return a list of prompts as it is, and a prompt alone in a list."""
    is_one = not is_list(prompts) or is_chat(prompts)
    many: Any = prompts
    return [many] if is_one or (len(many) > 0 and isinstance(many[0], int)) else many


def is_chat(prompt: Any) -> bool:
    """Return whether this is a list of messages."""
    if not is_list(prompt) or not prompt or not isinstance(prompt[0], Mapping):
        return False
    return not prompt[0].keys() & {*_IN_PROMPT, "prompt_embeds"}


def _says(value: Any) -> bool:
    """Return whether a value is more than an absent or an empty one; it may be an array."""
    return len(value) > 0 if hasattr(value, "__len__") else bool(value)


def text_of(prompt: AnyPrompt) -> str | None:
    """Return the text that a prompt was given as, None where it was not."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None
