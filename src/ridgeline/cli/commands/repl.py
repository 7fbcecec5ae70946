"""One answer on the terminal, or a chat: text to standard output, remarks to standard error.

Ctrl-C stops the answer, not the chat. It knows nothing of how answers are made.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator

from rich.console import Console

from ridgeline.cli.commands.chat_state import COMMAND, HELP, ChatState
from ridgeline.core.params import SamplingParams
from ridgeline.engine.llm import LLM
from ridgeline.engine.outputs import Chunk

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  # line editing and history for input(); absent on some systems

_QUOTES = '"""'  # around a message of several lines

_remarks = Console(stderr=True, highlight=False)


def answer(llm: LLM, prompt: str, params: SamplingParams, *, raw: bool) -> None:
    """Stream one answer. Models without a chat template, and ``raw``, continue the prompt.

    Raises ValueError if the prompt can never run, or if the answer failed.
    """
    if raw or not llm.text.can_chat:
        chunks = llm.stream(prompt, params)
    else:
        chunks = llm.stream([{"role": "user", "content": prompt}], params)
    _show(chunks, _seed(llm, params))


def chat(llm: LLM, params: SamplingParams) -> None:
    """Talk until the user leaves.

    Raises ValueError if the model has no chat template.
    """
    if not llm.text.can_chat:
        raise ValueError(
            f"{llm.path.name} has no chat template: give a PROMPT for it to continue, or take an "
            f"instruction-tuned model"
        )
    _remark(f"{llm.path.name}: type a message, or /help")
    state = ChatState(llm.path.name, params)
    while True:
        try:
            text = _message()
        except (EOFError, KeyboardInterrupt):
            _remarks.print()
            return
        if text in ("/exit", "/quit", "/bye"):
            return
        if text in ("/help", "/?"):
            _remark(HELP)
        elif COMMAND.match(text):
            try:
                _remark(state.do(text))
            except (ValueError, OSError) as error:
                _remark(str(error), "yellow")
        elif text:
            _answer_to(text, llm, state)


def _answer_to(text: str, llm: LLM, state: ChatState) -> None:
    """Show the answer to a message, and keep both; a message without an answer is forgotten."""
    state.messages.append({"role": "user", "content": text})
    try:
        reply = _show(llm.stream(state.prompt, state.params), _seed(llm, state.params))
    except ValueError as error:
        state.messages.pop()
        _remark(f"{error}; /clear starts over", "yellow")
    except KeyboardInterrupt:  # the prompt was still being made
        state.messages.pop()
        _remark("[stopped by you]")
    else:
        state.messages.append({"role": "assistant", "content": reply})


def _message() -> str:
    """Return what the user types: a line, or all between two times three quotes."""
    text = input(">>> ").strip()
    if not text.startswith(_QUOTES):
        return text
    lines = [text.removeprefix(_QUOTES)]
    while not lines[-1].rstrip().endswith(_QUOTES):
        lines.append(input("... "))
    lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
    return "\n".join(lines).strip()


def _remark(text: str, style: str = "dim") -> None:
    _remarks.print(text, style=style, markup=False)


def _seed(llm: LLM, params: SamplingParams) -> list[str]:
    """Return the remark that lets the user repeat an answer; a greedy one repeats itself."""
    return [f"seed {llm.config.seed}"] if params.temperature else []


def _show(chunks: Iterable[Chunk], seed: list[str]) -> str:
    """Print an answer as it comes, then its size, speed and ``seed``; return its text."""
    texts: list[str] = []
    arrivals_s: list[float] = []
    start_s = time.monotonic()
    how = "stopped by you"
    try:
        for chunk in chunks:
            if chunk.error:
                raise ValueError(f"the answer failed: {chunk.error}")
            if chunk.token_id is not None:
                arrivals_s.append(time.monotonic())
            texts.append(chunk.text)
            print(chunk.text, end="", flush=True)
            if chunk.finish_reason == "length":
                how = "cut at maximum length"
            elif chunk.finish_reason:
                how = "complete"
    except KeyboardInterrupt:
        pass
    print()
    if _remarks.is_terminal:
        remarks = [f"{len(arrivals_s)} tokens", *_speed(start_s, arrivals_s), how, *seed]
        _remarks.print(f"[{', '.join(remarks)}]", style="dim", markup=False)
    return "".join(texts)


def _speed(start_s: float, arrivals_s: list[float]) -> Iterator[str]:
    if arrivals_s:
        yield f"first after {arrivals_s[0] - start_s:.2f} s"
    if len(arrivals_s) > 1:
        rate_per_s = (len(arrivals_s) - 1) / (arrivals_s[-1] - arrivals_s[0])
        yield f"{rate_per_s:.1f} tok/s"
