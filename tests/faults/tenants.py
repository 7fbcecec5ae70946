"""What one key learns of another, or takes from it: T29, T30, T42, T43."""

from __future__ import annotations

import hmac
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ridgeline.core.cache.kvcache import hash_block
from ridgeline.serve.http.keys import Keys
from tests.faults.engine import all_of, alone, answer_of, some_body
from tests.faults.oracles import COMPLETE, watched
from tests.serve.serving import serving
from tests.waiting import PATIENCE_S

NAMES = ("alpha", "beta", "gamma")


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def t29(model: Path, count: int, rng: random.Random) -> str:
    """The work of a comparison must not depend on the guess: all digests, each in constant time."""
    secret = "k" + "".join(rng.choice("abcdef") for _ in range(31))
    keys = Keys([secret, *NAMES], None)
    compared: Counter[int] = Counter()
    compare = hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared[len(one)] += 1
        return compare(one, other)

    with patch.object(hmac, "compare_digest", counting):
        for _ in range(count):
            known = rng.randrange(len(secret) + 1)
            guess = secret[:known] + "x" * rng.randrange(len(secret) + 1 - known)
            before = compared.total()
            label = keys.label_of(b"Bearer " + guess.encode())
            assert (label is not None) == (guess == secret)
            assert compared.total() - before == 4, "some comparison was left out"
    assert set(compared) == {32}, "what is compared are digests"
    return f"{count}/{count} guesses cost the same: 4 comparisons in constant time, of digests"


def t30(model: Path, count: int, rng: random.Random) -> str:
    """One key asks for far more than it may; the others, asking alike, get alike."""
    ask = {"prompt": [40, 41, 42], "max_tokens": 6, "ignore_eos": True}
    limits: dict[str, Any] = {"api_key": list(NAMES), "max_concurrent_requests": 4}
    refused = threading.Event()
    with serving(model, {"max_num_seqs": 4}, **limits) as served:
        served.valve.before = lambda step: (refused.wait(PATIENCE_S), None)[1]

        def send(name: str) -> tuple[str, int]:
            status, answer, headers = served.call(COMPLETE, ask, **bearer(name))
            assert status in (200, 429), answer
            if status == 429:
                refused.set()
                assert answer["error"]["code"] == "rate_limit_exceeded"
                assert int(headers["retry-after"]) >= 1
            return name, status

        order = [NAMES[0]] * count + [*NAMES[1:]] * (count // 4)
        rng.shuffle(order)
        greedy = [name for name in order if name == NAMES[0]]
        with ThreadPoolExecutor(16) as flood, ThreadPoolExecutor(4) as fair:
            sent = [
                *(flood.submit(send, name) for name in greedy),
                *(fair.submit(send, name) for name in order if name != NAMES[0]),
            ]
            found = Counter(one.result() for one in sent)
        served.assert_idle()
    served_well = [found[name, 200] for name in NAMES[1:]]
    assert served_well == [count // 4] * 2, found
    assert found[NAMES[0], 429], "nothing was refused"
    jain = sum(served_well) ** 2 / (2 * sum(one * one for one in served_well))
    return f"{found[NAMES[0], 429]} of {count} refused with a time to wait; others alike ({jain:g})"


def t42(model: Path, count: int, rng: random.Random) -> str:
    """A warms a prefix, B probes it, A comes back: only A is told, and only A's is reused."""
    found: Counter[str] = Counter()
    with serving(model, api_key=list(NAMES), isolate_keys=True) as served:
        for number in range(count):
            prompt = [40 + number % 200, 41 + number // 200, *[50] * 46]
            ask = {"prompt": prompt, "max_tokens": 1}
            first, second = rng.sample(NAMES, 2)
            for who, name in (("first", first), ("other", second), ("again", first)):
                status, answer, _ = served.call(COMPLETE, ask, **bearer(name))
                assert status == 200, answer
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                found[who] += cached > 0
        served.assert_idle()
    assert (found["first"], found["other"]) == (0, 0), found
    assert found["again"] == count, found
    return f"{count}/{count} prefixes of another key are not found, one's own are"


def t43(model: Path, count: int, rng: random.Random) -> str:
    """Keys of blocks collide all the time; tokens are compared, so no answer changes."""
    with watched(model) as watch:
        bodies = [some_body(i, rng) for i in range(min(count, 200))]
        wanted = alone(watch, bodies)
        cache = watch.served.llm.engine.scheduler.queues.kv
        cache._hash_block = lambda parent, tokens: hash_block(b"", tokens[:1])[:1] * 16
        order = [rng.randrange(len(bodies)) for _ in range(count)]
        found = all_of(watch, [bodies[i] for i in order], 16)
        right = sum(answer_of(one) == wanted[i] for one, i in zip(found, order, strict=True))
        cached = sum(record.num_cached_tokens for record in watch.records)
    assert right == count
    return f"{right}/{count} equal to the answer alone, with keys of one byte ({cached} cached)"
