"""Input that is wrong on purpose: bodies, heads, sizes, numbers, ids, names: T05, T06, T08 to T11,
T37, T38, T50."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engine.test_llm import HELLO, POISON, VOCAB
from tests.faults.clients import p99
from tests.faults.oracles import CHAT, COMPLETE, LEAKS, MARK, watched
from tests.serve.http.test_connection import status_of, talk

Body = dict[str, Any]
PATHS = (COMPLETE, CHAT, "/tokenize", "/detokenize")
BANNED = {str(POISON): -100}  # what is not a number: drawn by chance, it rightly ends in 500
GOOD: dict[str, Body] = {
    COMPLETE: {"prompt": "hello", "max_tokens": 2, "stop": ["a"], "seed": 1, "n": 1},
    CHAT: {"messages": HELLO, "max_tokens": 2, "logit_bias": {"5": 1.5}, "stream": False},
    "/tokenize": {"prompt": "hello", "return_token_strs": True},
    "/detokenize": {"tokens": [40, 41]},
}
# In JSON, as text: what a parser may stumble over.
VALUES = (
    *("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1e-400", "0.1e1", "-0", "01", "1" * 5000),
    *("null", "true", "[]", "{}", '""', '"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '"\ufeff"'),
    *('"' + "x" * 5000 + '"', "[" * 100, "[" * 100_000, '{"a":' * 20_000, "[[[[]]]]", '{"":{}}'),
    *(str(2**31), str(2**63), str(2**64), str(-(2**63) - 1), "1e308", '"5"', "'a'", "undefined"),
    *('{"\\ud800": 1}', '[{"type": "text", "text": "\\ud800"}]', '[["a"]]', "[[-1]]", "[null]"),
)


def mutated(path: str, rng: random.Random) -> bytes:
    """Return a request body with something wrong, at times with nothing wrong."""
    body = dict(GOOD[path])
    text = json.dumps(body)
    how = rng.randrange(8)
    if how == 0:
        return text[: rng.randrange(len(text))].encode()
    if how == 1:
        data = bytearray(text.encode())
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(data)
    if how == 2:
        junk = (b"\xef\xbb\xbf", b"\x00", b" " * 1000, b")]}'", b"\xff", b"\xed\xa0\x80")
        return rng.choice([b"", text.encode()]) + rng.choice(junk)
    others = ("unknown", "\\ud800", "user", "tools", "metadata", "stop", "logprobs")
    name = rng.choice([*body, *others])
    value = rng.choice(VALUES)
    if how == 3:  # the same name twice
        return (text[:-1] + f', "{name}": {value}}}').encode("utf-8", "surrogatepass")
    body.pop(name, None)
    start = json.dumps(body)[:-1] + (", " if body else "")
    if how == 4:
        return (start + f'"{name}": [{value}, {rng.choice(VALUES)}]}}').encode()
    if how == 5:
        return (start + f'"{name}": {{"{rng.choice(list(body or "a"))}": {value}}}}}').encode()
    return (start + f'"{name}": {value}}}').encode()


def t05(model: Path, count: int, rng: random.Random) -> str:
    found: dict[int, int] = {}
    slowest_s = 0.0
    with watched(model) as watch:
        for _ in range(count):
            path = rng.choice(PATHS)
            data = mutated(path, rng)
            start_s = time.monotonic()
            status, text = watch.send(path, data)
            slowest_s = max(slowest_s, time.monotonic() - start_s)
            assert status in (200, 400), (status, text, data[:300])
            found[status] = found.get(status, 0) + 1
    return f"{count}/{count} answered: {found}, 0 of 5xx, slowest {1e3 * slowest_s:.0f} ms"


def _wire_attacks(rng: random.Random) -> list[tuple[str, list[bytes]]]:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    close = head + b"connection: close\r\n"
    sizes = [1, 1000, 60_000, 70_000, 1 << 20, 16 << 20]
    bomb = gzip.compress(b'{"prompt": "' + b" " * (50 << 20) + b'"}')
    attacks = [(f"header of {n}", [head + b"x: " + b"y" * n + b"\r\n\r\n"]) for n in sizes[3:]]
    attacks += [(f"{n} headers", [head + b"x: y\r\n" * n + b"\r\n"]) for n in (3000, 10_000)]
    attacks += [(f"url of {n}", [b"GET /" + b"u" * n + b" HTTP/1.1\r\n\r\n"]) for n in sizes[3:]]
    chunked = close + b"transfer-encoding: chunked\r\n\r\n"
    attacks.append(("100,000 chunks", [chunked + b"1\r\n \r\n" * 100_000 + b"0\r\n\r\n"]))
    attacks.append(("endless chunks", [chunked] + [b"10000\r\n" + b" " * 65536 + b"\r\n"] * 200))
    attacks.append(("huge chunk size", [chunked + b"f" * 40 + b"\r\n"]))
    length = b"content-length: %d\r\n\r\n"
    zipped = close + b"content-encoding: gzip\r\n" + length % len(bomb)
    attacks.append(("a gzip bomb", [zipped + bomb]))
    attacks.append(("a body of 16 MiB", [close + length % (16 << 20), b" " * (16 << 20)]))
    attacks.append(("length of 10**30", [close + b"content-length: 1" + b"0" * 30 + b"\r\n\r\n"]))
    attacks.append(("length too short", [close + length % 5 + b'{"prompt": "hello"}']))
    attacks.append(("length too long", [close + length % 500 + b'{"prompt": "hello"}']))
    noise = [(f"{n} random bytes", [rng.randbytes(n)]) for n in sizes[:4]]
    return attacks + noise


def t06(model: Path, count: int, rng: random.Random) -> str:
    tried, statuses = 0, set()
    with watched(model, receive_timeout=2.0, counts_all=False, growth_mib=50) as watch:
        while tried < count:
            for name, pieces in _wire_attacks(rng)[: count - tried]:
                tried += 1
                answer = talk(watch.served.port, *pieces)
                statuses.add(answer[9:12].decode() or "closed")
                is_refused = not answer or 400 <= status_of(answer) < 500
                assert is_refused or status_of(answer) == 503, (name, answer[:80])  # too many bytes
    return f"{count}/{count} refused or hung up on ({', '.join(sorted(statuses))})"


# Who asks is in the same process, and computes too; B01 has the silence of a server alone.
_MOST_SILENT_S = 0.5 if "PYTEST_VERSION" in os.environ else 0.1


class Silences:
    """How long the event loop does not look, which it would every 2 ms: in processor time.

    While a machine does something else, or stands still, this process uses none.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.found_s: list[float] = [0.0]
        self._loop, self._go_on = loop, True
        loop.call_soon_threadsafe(self._look, time.process_time())

    def _look(self, before_s: float) -> None:
        now_s = time.process_time()
        self.found_s.append(now_s - before_s)
        if self._go_on:
            self._loop.call_later(0.002, self._look, now_s)

    def stop(self) -> None:
        self._go_on = False


_MOST_GROWTH = 1.6


def _growth(encode: Callable[[str], object], piece: str, length: int) -> float:
    """Return the exponent with which time grows from a text to one eight times as long.

    Of each the shortest of several times, which are taken in turn; of more while it looks like too
    much, for a machine may be slow at any time.
    """
    texts = [(piece * n)[:n] for n in (length, 8 * length)]
    shortest_s, growth = [math.inf, math.inf], math.inf
    for number in range(20):
        for i, text in enumerate(texts):
            start_s = time.thread_time()
            encode(text)
            shortest_s[i] = min(shortest_s[i], time.thread_time() - start_s)
        growth = math.log(shortest_s[1] / shortest_s[0]) / math.log(8)
        if number > 1 and growth < _MOST_GROWTH:
            break
    return growth


def t08(model: Path, count: int, rng: random.Random) -> str:
    """``count`` is the largest prompt in KiB."""
    pieces = {"x": "x", "emoji": "👩‍👩‍👧‍👦", "lines": "\n", "spaces": " ", "words": "the cat "}
    texts = [(n, "x" * n) for n in (1, 127, 2000)]
    while (n := texts[-1][0] * 8) <= count << 10:
        texts += [(n, (piece * n)[:n]) for piece in pieces.values()]
    statuses: dict[int, int] = {}
    with watched(model, growth_mib=64 + count // 128) as watch:
        silent_s: list[float] = []
        for _, text in texts:
            data = json.dumps({"prompt": text}).encode()  # which holds the interpreter
            silences = Silences(watch.served.loop)
            for path in (COMPLETE, "/tokenize"):
                status, _ = watch.send(path, data)
                assert status in (200, 400, 413)
                statuses[status] = statuses.get(status, 0) + 1
            silences.stop()
            silent_s += silences.found_s
        assert p99(silent_s) < _MOST_SILENT_S, p99(silent_s)
        encode = watch.served.llm.tokenizer.encode
        longest = watch.served.running.model_server.preparer.max_bytes
        exponents = [_growth(encode, piece, longest * 8) for piece in pieces.values()]
    # What is not linear is quadratic; caches cost a little.
    assert max(exponents) < _MOST_GROWTH, exponents
    return (
        f"{len(texts)} prompts up to {texts[-1][0]} characters: {statuses}; tokenising grows with "
        f"exponent {max(exponents):.2f} at most; loop silent for {1e3 * p99(silent_s):.0f} ms (p99)"
    )


_FLOAT, _INT = "float", "int"
_BOTH: dict[str, tuple[str, float, float]] = {
    "temperature": (_FLOAT, 0, 2),
    "top_p": (_FLOAT, 0, 1),
    "min_p": (_FLOAT, 0, 1),
    "presence_penalty": (_FLOAT, -2, 2),
    "frequency_penalty": (_FLOAT, -2, 2),
    "n": (_INT, 1, 128),
    "seed": (_INT, -(2**63), 2**63 - 1),
    "top_k": (_INT, -1, 2**63 - 1),
    "min_tokens": (_INT, 0, 2),
}
_LENGTH = (_INT, -1, 2**63 - 1)  # what the context leaves is the limit in any case
NUMBERS: dict[str, dict[str, tuple[str, float, float]]] = {
    COMPLETE: _BOTH | {"max_tokens": _LENGTH, "logprobs": (_INT, 0, 5)},
    CHAT: _BOTH | {"max_completion_tokens": _LENGTH, "top_logprobs": (_INT, 0, 20)},
}
_ODD: list[Any] = [-1, 0, 1, 2**31, 2**63, 1e308, math.nan, math.inf, "5", True, None, [], {}, 0.5]


def is_valid(value: Any, kind: str, low: float, high: float) -> bool:
    """What OpenAI's schema says, written a second time."""
    if value is None:
        return True
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if kind == _INT and isinstance(value, float):
        return False
    return low <= value <= high


def t09(model: Path, count: int, rng: random.Random) -> str:
    served = 0
    with watched(model) as watch:
        for i in range(count):
            path = (COMPLETE, CHAT)[i % 2]
            name = rng.choice(list(NUMBERS[path]))
            kind, low, high = NUMBERS[path][name]
            value = rng.choice([*_ODD, low, high, high + 1, low - 1, high + 0.5])
            body = {k: v for k, v in GOOD[path].items() if k not in ("n", "seed", "max_tokens")}
            body["logit_bias"] = BANNED
            if "max" not in name:
                body["max_tokens"] = 2
            if name == "top_logprobs":
                body["logprobs"] = True
            body |= {"stream": rng.random() < 0.3, "stop": rng.choice([None, "a", ["b", "c"]])}
            status, answer = watch.ask(body | {name: value}, path)
            served += status == 200
            if is_valid(value, kind, low, high):
                assert status == 200, (name, value, answer)
            else:
                assert status == 400, (name, value, answer)
                assert answer["error"]["param"] == name, (value, answer)

    return f"{count}/{count} values: {served} served, the others refused by name"


def t10(model: Path, count: int, rng: random.Random) -> str:
    """The neighbours are canaries, which run all the while."""
    ids = [-1, -(2**31), VOCAB, VOCAB + 1, 2**31, 2**32 + 5, 2**63, 2**64, 10**30]
    with watched(model) as watch:
        for i in range(count):
            bad, body = rng.choice(ids), dict(GOOD[COMPLETE])
            where = ("prompt", "prompt", "logit_bias", "stop_token_ids")[i % 4]
            values: list[Any] = [[40, bad], [[40], [41, bad]], {str(bad): 1}, [bad]]
            status, answer = watch.ask(body | {where: values[i % 4]})
            assert (status, answer["error"]["param"]) == (400, where), answer
            status, answer = watch.ask({"tokens": [bad]}, "/detokenize")
            assert status == 400
        sung = watch.num_canaries
    return f"{count}/{count} ids refused by name; {sung} neighbours unchanged"


def t11(model: Path, count: int, rng: random.Random) -> str:
    nothing = {str(token): -100 for token in range(VOCAB)}
    extremes: list[Body] = [
        *({"temperature": t} for t in (5e-324, 1e-300, 1e-38, 1e-4, 1e-2, 2)),
        *({"top_p": p} for p in (0, 5e-324, 1e-9, 1)),
        *({"top_k": k} for k in (-1, 0, 1, VOCAB - 1, VOCAB, VOCAB + 1, 2**63 - 1)),
        *({"min_p": p} for p in (0, 5e-324, 1)),
        *({"repetition_penalty": r} for r in (1e-2, 1e-1, 100)),
        *({"presence_penalty": p, "frequency_penalty": p} for p in (-2, 2)),
        {"logit_bias": dict.fromkeys(nothing, 100) | BANNED},
        {"logit_bias": nothing | {"50": 100}},
    ]
    with watched(model) as watch:
        for i in range(count):
            wish: Body = {"temperature": 1.0, "logit_bias": BANNED} | extremes[i % len(extremes)]
            wish |= rng.choice([{}, extremes[rng.randrange(len(extremes))]])
            body = wish | {"prompt": [40, 41 + i % 50], "max_tokens": 5, "logprobs": 2, "seed": i}
            status, answer = watch.ask(body)
            assert status == 200, (wish, answer)
            choice = answer["choices"][0]
            assert all(map(math.isfinite, choice["logprobs"]["token_logprobs"]))
            assert watch.ask(body)[1]["choices"] == answer["choices"]  # and it is a defined one
    return f"{count}/{count} finite and repeatable"


def t37(model: Path, count: int, rng: random.Random) -> str:
    """Every body of every row is scanned as well (O8); here are errors of each class."""
    lines = tried = 0
    with watched(model, max_body="64KiB", has_faults=True, counts_all=False) as watch:

        def fail(step: Any) -> None:
            if any(work.tokens[:2] == (77, 78) for work in step.work):
                raise OSError(2, f"no such file {MARK}", "/usr/lib/secret.so")

        for i in range(count):
            watch.served.valve.before = fail
            name = f"../{MARK}/{i}"
            for path, data in (
                (COMPLETE, b"{"),
                (COMPLETE, json.dumps({"prompt": [77, 78], "max_tokens": 2}).encode()),
                (COMPLETE, json.dumps({"prompt": MARK * 40}).encode()),
                (COMPLETE, json.dumps({"prompt": MARK, "temperature": MARK}).encode()),
                (COMPLETE, json.dumps({"prompt": MARK * 9000}).encode()),
                (CHAT, json.dumps({"messages": [{"role": "nobody", "content": MARK}]}).encode()),
                (CHAT, json.dumps({"messages": [{"role": "user", "content": [MARK]}]}).encode()),
                ("/detokenize", b'{"tokens": [99999]}'),
                (f"/v1/models/{'x' * 3000}", None),
                (f"/{i}", None),
            ):
                watch.send(path, data)
                tried += 1
            watch.send("/v1/models", None, method="DELETE", x_request_id=name)
            watch.send(COMPLETE, b"x", content_type="text/plain", authorization=f"Bearer {MARK}")
            tried += 2
        watch.served.valve.before = lambda step: None
        watch.lines.lines.clear()  # the injected exception itself says MARK
        lines = len(watch.served.lines)
        assert not any(LEAKS.search(line) for line in watch.served.lines)
    return f"0 leaks in {tried} errors and {lines} lines of the log"


TRAVERSALS = (
    *("../../etc/passwd", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "..%2f..%2fetc/passwd", "/etc/passwd"),
    *("..%c0%af..%c0%afetc/passwd", "%00", "a%00.gguf", "....//....//etc", "..\\..\\windows"),
    *("\u2025/\u2025/etc", "\uff0e\uff0e/etc", "x" * 10_000, "file:///etc/passwd", "~/.ssh/id_rsa"),
)


def t38(model: Path, count: int, rng: random.Random) -> str:
    with watched(model, counts_all=False) as watch:
        for i in range(count):
            name = TRAVERSALS[i % len(TRAVERSALS)]
            quoted = (
                name.encode().decode("latin-1").translate({c: f"%{c:02x}" for c in range(128, 256)})
            )
            prefix = rng.choice(["/v1/models/", "/", "/ready/", "/metrics/", "/v1/", "/static/"])
            status, text = watch.send(prefix + quoted, None)
            assert status in (400, 404), (prefix, name, status)
            assert b"root:" not in text
            status, _ = watch.ask({"prompt": "x", "max_tokens": 1, "model": name})
            assert status in (200, 404)
    return f"{count}/{count} paths and names lead nowhere"


def t50(model: Path, count: int, rng: random.Random) -> str:
    with watched(model, counts_all=False) as watch:
        watch.send("/v1/models/x", None)
        watch.ask({"prompt": "x", "max_tokens": 1, "model": "first", "user": "first"})
        watch.send("/first", None, method="BREW")
        before = len(watch.served.metrics())
        for i in range(count):
            body = {"prompt": "x", "max_tokens": 1, "model": f"m{i}", "user": f"u{i}"}
            watch.ask(body, authorization=f"Bearer {i}", x_request_id=f"r{i}")
            watch.send(f"/v1/models/{i}", None)
            watch.send(f"/{i}", None, method=f"M{i}"[:3])
        after = len(watch.served.metrics())
        assert after <= before + 3  # the answers to /metrics and to what is no request
    return f"{before} series before, {after} after {count} names of each kind"
