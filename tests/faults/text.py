"""Characters, stop strings, templates and control tokens: T24, T25, T36, T40."""

from __future__ import annotations

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ridgeline.text.template.chat import ChatTemplate
from tests.engine.test_llm import HELLO, POISON, VOCAB
from tests.faults.oracles import CHAT, COMPLETE, Watch, joined, watched

NUM_SCALARS = 0x110000 - 0x800
BANNED = {"0": -100, "1": -100, str(POISON): -100}  # ends, and what is not a number
HARD = "👩‍👩‍👧‍👦 🇫🇷 e\u0301 ש\u05c1לום नमस्ते \u202e\u200f ﷽ 👍🏽 \ufffd \U0010ffff"  # noqa: RUF001


def scalar(number: int) -> str:
    return chr(number if number < 0xD800 else number + 0x800)


def t24(model: Path, count: int, rng: random.Random) -> str:
    """``count`` scalars byte by byte, which is every split point; then answers over HTTP."""
    num_answers = max(20, count // 1000)
    with watched(model) as watch:
        tokenizer = watch.served.llm.tokenizer
        by_byte = {tokenizer.token_bytes(t): t for t in range(VOCAB - 10, -1, -1)}
        stride = -(-NUM_SCALARS // count)
        scalars = range(rng.randrange(stride), NUM_SCALARS, stride)
        for first in range(0, len(scalars), 500):
            text = "".join(map(scalar, scalars[first : first + 500])) + HARD
            data = text.encode()
            split = [by_byte[data[i : i + 1]] for i in range(len(data))]
            for ids in (split, tokenizer.encode(text)):
                decode = tokenizer.new_decoder()
                pieces = [decode(token) for token in ids]
                assert "".join([*pieces, decode.flush()]) == text
                assert all(piece.encode() for piece in pieces if piece)  # never half a character
        same = [_answers_agree(watch, i) for i in range(num_answers)]
    broken = sum("\ufffd" in text for text in same)
    return (
        f"{len(scalars)}/{len(scalars)} scalars byte by byte; {num_answers} answers ({broken} with "
        "bytes that are no character): stream, whole and one-shot decode agree"
    )


def _answers_agree(watch: Watch, number: int) -> str:
    prompt = [60 + number % 300, 61, 62]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 60, "seed": number, "temperature": 2}
    body |= {"ignore_eos": True, "logprobs": 0, "logit_bias": BANNED}
    whole = watch.ask(body)[1]["choices"][0]
    streamed = watch.ask(body | {"stream": True})[1]
    assert joined(streamed) == whole["text"]
    data = b""
    for name in whole["logprobs"]["tokens"]:  # spelled as OpenAI does, where it is half a letter
        is_half = name.startswith("bytes:")
        data += bytes.fromhex(name[6:].replace("\\x", "")) if is_half else name.encode()
    assert data.decode("utf-8", "replace") == whole["text"]
    return str(whole["text"])


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """Read letter by letter; the first stop string that is complete ends it."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))], True
    return text, False


def t25(model: Path, count: int, rng: random.Random) -> str:
    def check(number: int) -> bool:
        mine = random.Random(number)
        path = (COMPLETE, CHAT)[number % 2]
        body: dict[str, Any] = {"max_tokens": 30, "seed": number % 40, "ignore_eos": True}
        body |= {"messages": HELLO} if path == CHAT else {"prompt": [50, 51]}
        body |= {"temperature": 1.5, "logit_bias": BANNED}
        text = watch.text(body, path)
        stops = []
        for _ in range(mine.randint(1, 4)):
            start = mine.randrange(len(text))
            stop = text[start : start + mine.randint(1, 6)]
            stop = mine.choice([stop, stop + "z", stop[:1], text[start:], "👍"])
            stops.append(stop.replace("\ufffd", "") or "a")  # half a character is nobody's stop
        wanted, stopped = cut(text, stops)
        status, whole = watch.ask(body | {"stop": stops}, path)
        assert status == 200, whole
        choice = whole["choices"][0]
        found = choice["message"]["content"] if path == CHAT else choice["text"]
        assert found == wanted, (number, stops, text)
        assert choice["finish_reason"] == ("stop" if stopped else "length")
        _, chunks = watch.ask(body | {"stop": stops, "stream": True}, path)
        assert joined(chunks) == wanted, (number, stops, text)
        return stopped

    mib = 60 + count // 128  # for the records and log lines of all requests
    with watched(model, growth_mib=mib) as watch, ThreadPoolExecutor(4) as pool:
        stopped = sum(pool.map(check, range(count)))
    return f"{count}/{count} cut exactly, whole and streamed ({stopped} at a stop string)"


ATTACKS = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "{{ (messages|attr('append'))('x') }}",
    "{{ messages.append(1) }}",
    "{% set x = messages.clear() %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends '/etc/passwd' %}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ range.__self__ }}",
    "{{ range(10**9)|list }}",
    "{% for i in range(10**12) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(9999) %}{{ 'x' * 99999 }}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ tojson(messages) }}",
    "{{ 'x' * 10**10 }}",
    "{{ (messages|length + 1) ** 1000000000 }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ 'x'.ljust(10**10) }}",
    "{% for",
    "{{ 1 / 0 }}",
    "{{ raise_exception('no') }}",
)


def t36(model: Path, count: int, rng: random.Random) -> str:
    slowest_s = 0.0
    with watched(model) as watch:
        llm = watch.served.llm
        good = llm.text.chat_template
        wish: dict[str, Any] = {"messages": HELLO, "max_tokens": 2, "temperature": 0}
        ask, plain = json.dumps(wish).encode(), watch.text(wish, CHAT)
        for i in range(count):
            attack = ATTACKS[i % len(ATTACKS)]
            is_the_models = (i + i // len(ATTACKS)) % 2 == 0  # or comes with the request
            if is_the_models:
                llm.text.chat_template = ChatTemplate(attack, llm.tokenizer)
            start_s = sum(os.times()[:4])
            asked = ask if is_the_models else json.dumps(wish | {"chat_template": attack}).encode()
            status, text = watch.send(CHAT, asked)
            slowest_s = max(slowest_s, sum(os.times()[:4]) - start_s)
            assert status == 400, (attack, text)
            llm.text.chat_template = good
            status, answer = watch.ask(wish | {"chat_template_kwargs": {"messages": []}}, CHAT)
            param = answer["error"]["param"]
            assert (status, param.split(".")[0]) == (400, "chat_template_kwargs")
            for name, value in (("tokenize", True), ("template", "x"), ("documents", [])):
                assert watch.text(wish | {name: value}, CHAT) == plain, name
        assert watch.send(CHAT, ask)[0] == 200
    assert slowest_s < 20  # each is stopped after two; a process is started anew
    return f"{count}/{count} templates refused, the dearest for {slowest_s:.1f} s of a processor"


def t40(model: Path, count: int, rng: random.Random) -> str:
    specials = ("<|end|>", "<|end|>x", "<think>", "※", "    ")
    look_alike = str.maketrans("<|>", "\uff1c\uff5c\uff1e")
    with watched(model) as watch:
        tokenizer = watch.served.llm.tokenizer
        (control,) = tokenizer.encode("<|end|>")
        for i in range(count):
            spelling = specials[i % len(specials)]
            start = rng.randint(0, len(spelling))
            content = "".join(
                rng.choice([spelling, spelling[:start], "a ", spelling.translate(look_alike), "é"])
                for _ in range(rng.randint(1, 6))
            )
            role = rng.choice(["user", "system", "developer", "tool", "assistant"])
            said = rng.choice([content, [{"type": "text", "text": content}]])
            if role == "assistant":
                content = content.replace("<think>", "").replace("※", "").replace("    ", "")
                said = content = content or "a"
            body = {"messages": [{"role": role, "content": said}], "add_generation_prompt": False}
            status, answer = watch.ask(body, "/tokenize")
            assert status == 200, answer
            written = "system" if role == "developer" else role  # the template knows no developer
            plain = tokenizer.encode(f"{written}:{content}", parse_special=False)
            assert answer["tokens"] == [control, *plain], (role, content)
            if i % 20 == 0:
                assert (
                    watch.ask(body | {"add_generation_prompt": True, "max_tokens": 1}, CHAT)[0]
                    == 200
                )
    return f"{count}/{count}: content has the ids of plain text; control ids are the template's own"
