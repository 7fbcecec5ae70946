"""Whether a file shows what its receipt states, and what the receipt's tokens say: both ways.

What one has and the other lacks is wrong, whichever it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ridgeline.text.messages.tool_calls import MessageDelta
from ridgeline.trust.receipts.answers import (
    STYLES,
    ShownAnswer,
    ShownChoice,
    ShownRun,
    as_object,
    places_of,
)
from ridgeline.trust.receipts.statement import Receipt, StatedAnswer, digest_of

_IDS = ("", "chatcmpl-", "cmpl-", "msg_", "resp_")  # how ids of answers begin
_OF_ANSWERS = ("completion", "total")  # counts that depend on what rules have let out


class Computed(NamedTuple):
    """An answer as it was computed: its pieces, why it ended, and what has stopped it."""

    pieces: Sequence[MessageDelta]
    finish: str
    stop: str | int | None


Answers = Mapping[tuple[int, int], Computed]  # by prompt, and number of the answer


def runs_of(pieces: Sequence[MessageDelta], *, thinks: bool = True) -> list[ShownRun]:
    """Return what pieces show, as files are read; without thoughts unless it ``thinks``."""
    choice = ShownChoice()
    for kind, text in pieces:
        if kind == "call":
            choice.call(text, "")
        elif kind == "arguments":
            choice.runs[-1] = choice.runs[-1]._replace(arguments=choice.runs[-1].arguments + text)
        elif thinks or kind != "reasoning":
            choice.grow(kind, text)
    return choice.runs


def wrong_in_file(
    receipt: Receipt, subject: Sequence[tuple[str, str]], shown: ShownAnswer
) -> Iterator[str]:
    """Yield what a file shows that its receipt does not state, and the other way round."""
    for place in shown.odd:
        yield f"{place} is not in the receipt"
    stated, style = dict(subject), shown.style
    if shown.is_stream and any(place.startswith("[") for place in stated):
        style = STYLES[-1]  # a stream does not say whether its prompts were a list
    has = places_of(style, {i: one.runs for i, one in shown.choices.items()})
    for place, digest in stated.items():
        if place not in has:
            yield f"{place} is missing: the receipt is about it"
        elif digest_of(has[place]) != digest:
            yield f"{place} is not the text that the receipt is about"
    for place in has:
        if place not in stated:
            yield f"{place} is not in the receipt"
    num = len(receipt.prompts) * receipt.params.n
    if sorted(shown.choices) != list(range(num)):
        yield f"there are {len(shown.choices)} answers, and the receipt has {num}"
    for index in (i for i, one in shown.choices.items() if one.goes_on):
        yield f"answer {index} goes on behind its end, where clients may have stopped reading"
    for place, what, value in shown.judged:
        if value is not None and not _is_stated(receipt, what, value):
            yield f"{place} is {value!s:.60}, which is not what the receipt says"


def _is_stated(receipt: Receipt, what: str, value: object) -> bool:
    """Whether a receipt says the same of an answer as a field of a file."""
    prompts = receipt.prompts
    num_prompt = sum(one.tokens.num for one in prompts)
    num_answer = sum(one.tokens.num for each in prompts for one in each.answers)
    if receipt.rules is not None and what in _OF_ANSWERS:
        return True
    if what == "id":
        return value in [begin + receipt.request for begin in _IDS]
    if what == "model":
        return value == receipt.model.name or bool(receipt.adapter)
    if what == "prompt ids":
        return any(one.tokens.ids is None or value == list(one.tokens.ids) for one in prompts)
    if what == "is full":
        room = receipt.max_model_len - num_prompt
        longest = receipt.params.max_tokens
        is_full = num_answer >= room and (longest is None or longest > room)
        return value == is_full
    stated: dict[str, Any] = {"fingerprint": receipt.fingerprint, "prompt": num_prompt}
    stated |= {"completion": num_answer, "total": num_prompt + num_answer}
    return type(value) is type(stated[what]) and value == stated[what]


def wrong_in_answer(
    receipt: Receipt,
    subject: Sequence[tuple[str, str]],
    shown: ShownAnswer | None,
    computed: Answers,
) -> Iterator[str]:
    """Yield how what a receipt is about, and what a file shows, are not what was computed.

    Under rules nothing is known of the texts.
    """
    if receipt.rules is None:
        yield from wrong_in_subject(receipt, subject, computed)
        yield from wrong_in_texts(receipt, shown, computed) if shown else ()


def wrong_in_subject(
    receipt: Receipt, subject: Sequence[tuple[str, str]], computed: Answers
) -> Iterator[str]:
    """Yield how the texts that a receipt is about are not those of its tokens.

    They must be all texts that some API shows of the answers, and no others.
    """
    stated = dict(subject)
    if len(stated) < len(subject):
        yield "subject names a place twice"
    n = receipt.params.n
    if receipt.params.num_answers > n:  # nobody says here which of them are shown
        runs = [runs_of(one.pieces) for one in computed.values()]
        texts = {digest_of("".join(run.text for run in one)) for one in runs}
        if len(stated) != n * len(receipt.prompts) or not texts.issuperset(stated.values()):
            yield "subject has other texts than the answers"
        return
    for thinks in (True, False):
        answers = {
            prompt * n + number: runs_of(one.pieces, thinks=thinks)
            for (prompt, number), one in computed.items()
        }
        for style in STYLES:
            has = places_of(style, answers)
            if stated == {place: digest_of(text) for place, text in has.items()}:
                return
    yield f"subject has other texts than the tokens: {', '.join(stated) or 'none'}"


def wrong_in_texts(receipt: Receipt, shown: ShownAnswer, computed: Answers) -> Iterator[str]:
    """Yield how what a file shows differs from what was computed."""
    n, left = receipt.params.n, dict(computed)
    for index, choice in sorted(shown.choices.items()):
        prompt = index // n
        numbers = [key for key in left if key[0] == prompt]
        if receipt.params.num_answers == n:
            numbers = [key for key in numbers if key[1] == index % n]
        differences = {
            key: list(_differences(receipt, shown, index, choice, key, left)) for key in numbers
        }
        same = [key for key, wrong in differences.items() if not wrong]
        if same:
            del left[same[0]]
        elif differences:
            yield from differences[numbers[0]]
        else:
            yield f"answer {index} is not in the receipt"


def _differences(
    receipt: Receipt,
    shown: ShownAnswer,
    index: int,
    choice: ShownChoice,
    key: tuple[int, int],
    computed: Mapping[tuple[int, int], Computed],
) -> Iterator[str]:
    one, said = computed[key], receipt.prompts[key[0]].answers[key[1]]
    thinks = any(run.kind == "reasoning" for run in choice.runs)
    runs = runs_of(one.pieces, thinks=thinks)
    has, wanted = (places_of(shown.style, {index: side}) for side in (choice.runs, runs))
    for place in {**has, **wanted}:
        if place not in wanted and not (len(has) == 1 and not has[place]):
            yield f"{place} is not in the receipt: its tokens say no such thing"
        elif place in wanted and place not in has:
            yield f"{place} is missing: the receipt's tokens say it"
        elif has.get(place, "") != wanted.get(place, ""):
            yield f"{place} is not the text of the receipt's tokens"
    if has == wanted and _normal(shown, choice.runs) != _normal(shown, runs):
        yield f"answer {index} has other arguments of calls than the tokens, or another order"
    yield from _ends(receipt, shown, index, choice, one, said)


def _ends(
    receipt: Receipt,
    shown: ShownAnswer,
    index: int,
    choice: ShownChoice,
    one: Computed,
    said: StatedAnswer,
) -> Iterator[str]:
    """Yield how the end of an answer, and its counts, differ from what was computed."""
    has_calls = any(kind == "call" for kind, _ in one.pieces)
    ends = {one.finish}
    if one.finish == "stop" and has_calls and shown.style in ("chat", "message"):
        tools = receipt.form.tools if receipt.form else None
        is_named = shown.style == "chat" and tools and tools.is_required and len(tools.tools) == 1
        ends = {"tool_calls", "stop"} if is_named else {"tool_calls"}
    is_told = choice.finish is not None or not shown.style.startswith("llama.cpp's")
    if is_told and choice.finish not in ends:
        yield f"answer {index} ended with {choice.finish}, and the tokens with {one.finish}"
    stop = one.stop
    if shown.style not in ("chat", "text"):  # these tell of ids, and with calls, too
        is_shown = isinstance(stop, str) and not (has_calls and shown.style == "message")
        stop = stop if is_shown else None
    if choice.tells_stop and choice.stop != stop:
        yield f"answer {index} was stopped by {stop!r}, and not by {choice.stop!r:.60}"
    num_prompt = receipt.prompts[index // receipt.params.n].tokens.num
    for count, num in ((choice.num_tokens, said.tokens.num), (choice.num_prompt, num_prompt)):
        if count is not None and count != num:
            yield f"answer {index} counts {count!r:.20} tokens, and the receipt {num}"
    if choice.ids is not None and not said.tokens.are(choice.ids):
        yield f"answer {index} has other token ids than the receipt"


def _normal(shown: ShownAnswer, runs: Sequence[ShownRun]) -> list[ShownRun]:
    """Return what was shown, as APIs that show the same have it in common."""
    if shown.style == "Ollama's chat" or (shown.style == "message" and not shown.is_stream):
        runs = [
            run._replace(arguments=as_object(run.arguments)) if run.kind == "call" else run
            for run in runs
        ]
    normal = [run for run in runs if run.text or run.kind == "call" or len(runs) > 1]
    if shown.is_ordered:
        return normal
    texts = ShownChoice()
    for kind in ("reasoning", "content", "refusal"):
        texts.grow(kind, "".join(run.text for run in normal if run.kind == kind))
    return [*texts.runs, *(run for run in normal if run.kind == "call")]
