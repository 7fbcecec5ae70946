"""The program that compiles grammars first, in a process that may die: ``grammars`` runs it.

A schema of a kilobyte may ask for gigabytes, for hours or for a stack without end, and no limit of
the library stops all of that. What comes back whole from here, with a first mask that allows
something, is compiled once more by the parent. Reads lines of JSON, writes one for each. Of
Ridgeline it imports what sets its limits and what reads schemas.
"""

from __future__ import annotations

import json
import threading
from base64 import b64decode
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from ridgeline.system.machine import allocated_bytes
from ridgeline.text import process_limits as limits
from ridgeline.text.json_schema import ANY_OBJECT, SchemaError, written

_MAX_PROCESS_BYTES = 3 << 29  # the library, the vocabulary, and 1 GiB
_STACK_BYTES = 2 << 20  # less than a thread of the parent has
_MAX_ERROR_CHARS = 300
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


class Vocabulary:
    """A model's tokens, as the library asks for them."""

    def __init__(
        self,
        tokens: list[bytes],
        special_ids: list[int],
        eos_id: int,
        encode: Callable[[str], list[int]] = lambda text: [],
    ) -> None:
        """Take the bytes of each token, and what turns text into tokens."""
        self.tokens, self.special_token_ids = tokens, special_ids
        self.eos_token_id, self.bos_token_id = eos_id, None
        self.encode = encode

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        if not isinstance(text, str):  # the library asks whether bytes are taken, too
            raise TypeError("only text")
        return self.encode(text)


def main() -> None:
    """Take the vocabulary, say that all is ready, and compile once for each further line."""
    limits.begin(_MAX_PROCESS_BYTES)
    threading.stack_size(_STACK_BYTES)
    lines = limits.lines()
    greeting = json.loads(next(lines))
    tokens = [b64decode(token) for token in greeting["tokens"]]
    vocabulary = Vocabulary(tokens, greeting["special_ids"], greeting["eos_ids"][0])
    wrapper = TokenizerWrapper(vocabulary)
    tokenizer = LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=greeting["eos_ids"])
    vocabulary.encode = tokenizer.greedy_tokenize  # near enough to see whether anything may follow
    limits.answer({})
    for line in lines:
        request = json.loads(line)
        limits.bound_cpu(request["limit_s"])
        answer: dict[str, Any] = {}
        worker = threading.Thread(target=_compile, args=(tokenizer, request, answer))
        worker.start()
        worker.join()
        limits.answer(answer)


def _compile(tokenizer: LLTokenizer, request: dict[str, Any], answer: dict[str, Any]) -> None:
    """Put the library's form of a grammar into ``answer``, or what is wrong with it.

    With it, ``ignored``: paths of what its schemas say and it does not hold to; ``built_bytes`` and
    ``mask_bytes``: the memory that it takes without and for its first mask, if that is known.
    """
    try:
        ignored = list[str]()
        grammar = _grammar(request, ignored)
        before = allocated_bytes()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        error, built = matcher.get_error(), allocated_bytes()
        if not error:
            mask = matcher.compute_bitmask()
            failed = matcher.get_error()
            if failed or not any(mask):
                error = f"no answer can begin with it ({_line(failed or 'it allows nothing')})"
        answer.update({"error": _line(error)} if error else {"grammar": grammar})
        answer["ignored"] = ignored
        answer["built_bytes"] = max(0, built - before)
        answer["mask_bytes"] = max(0, allocated_bytes() - built)
    except Exception as error:  # foreign code may raise anything
        answer["error"] = _line(str(error) or type(error).__name__)


def _grammar(request: dict[str, Any], ignored: list[str]) -> str:
    """Return the library's form of what is asked for: one grammar, or several that call others."""
    kind, text = str(request["kind"]), str(request["text"])
    if kind == "json":
        form = written(json.loads(text), is_strict=True, whitespace=request["whitespace"])
        text = form.text
        ignored += [f"schema.{path}" for path in form.ignored]
    elif kind == "regex":
        [grammar] = json.loads(LLMatcher.grammar_from_regex(text))["grammars"]
        text = grammar["lark_grammar"]
    elif kind == "grammar":
        text = any_to_lark(text)
    named = {f"s{i}": _of_tool(one, ignored) for i, one in enumerate(request["schemas"])}
    if request["frame"]:
        named, text = {"body": text, **named} if text else named, request["frame"]
    if not named:
        return text
    others = [{"name": name, "lark_grammar": one} for name, one in named.items()]
    return json.dumps({"grammars": [{"lark_grammar": text}, *others]})


def _of_tool(tool_schema: dict[str, Any], ignored: list[str]) -> str:
    """Return the grammar of a tool's arguments, or of one of them."""
    at, is_strict, inside = (tool_schema[name] for name in ("at", "is_strict", "inside"))
    try:
        form = written(tool_schema["schema"], is_strict=is_strict, at=at, inside=tuple(inside))
    except SchemaError:
        if is_strict:
            raise
        ignored.append(at)
        return written(ANY_OBJECT if not inside else True, is_strict=True).text
    ignored += form.ignored
    return form.text


def _line(text: str) -> str:
    """Return what an error says, on one line and safe to show."""
    first, *details = text.strip().splitlines() or ["it is not a grammar"]
    reasons = [line for line in details if line.startswith("error:")]  # of a regular expression
    shown = " ".join([first, *reasons[:1]])
    shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in shown)
    return shown[:_MAX_ERROR_CHARS]


if __name__ == "__main__":
    main()
