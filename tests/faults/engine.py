"""Steps that fail, rows that are not finite, too little memory, many neighbours: T16, T18, T19,
T22, T41, T54, T56."""

from __future__ import annotations

import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ridgeline.core.step import Step
from tests.engine.test_llm import POISON
from tests.faults import clients
from tests.faults.oracles import CHAT, COMPLETE, MARK, Watch, chunks_of, text_of, watched
from tests.waiting import eventually

Body = dict[str, Any]


def some_body(number: int, rng: random.Random) -> Body:
    """Return a request of its own kind, whose answer depends on nothing but itself."""
    shared = [40 + rng.randrange(4)] * rng.choice([0, 16, 32])  # a prefix that others have too
    prompt = shared + [rng.randrange(20, 400) for _ in range(rng.randint(1, 30))]
    body: Body = {"prompt": prompt, "max_tokens": rng.randint(1, 40), "ignore_eos": True}
    body |= {"seed": number, "temperature": rng.choice([0, 0.8, 1.5])}
    body["logit_bias"] = {str(POISON): -100}  # which one answer in thousands would choose
    return body | {"stream": rng.random() < 0.5}


def all_of(watch: Watch, bodies: list[Body], at_once: int) -> list[tuple[int, Any]]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(watch.ask, bodies))


def answer_of(found: tuple[int, Any]) -> str:
    status, answer = found
    assert status == 200, answer
    if isinstance(answer, list):
        return "".join(choice["text"] for chunk in answer for choice in chunk["choices"])
    return text_of(answer["choices"][0])


def alone(watch: Watch, bodies: list[Body]) -> list[str]:
    return [answer_of(watch.ask(body)) for body in bodies]


def t16(model: Path, count: int, rng: random.Random) -> str:
    bodies = [some_body(i, rng) | {"max_tokens": 60} for i in range(count)]
    with watched(model) as watch:
        wanted = alone(watch, bodies)
    # 128 tokens are 8 blocks; the pool has ten, and the canaries take two.
    with watched(model, {"kv_cache_memory": 10 * 16 * 512}) as watch:
        num_blocks = len(watch.served.llm.engine.scheduler.queues.kv.pool.refs)
        found = list(map(answer_of, all_of(watch, bodies, 32)))
        preempted = sum(record.num_preemptions for record in watch.records)
    assert found == wanted
    assert preempted or count < 20
    return f"{count}/{count} identical with {num_blocks} blocks, {preempted} preemptions"


def t18(model: Path, count: int, rng: random.Random) -> str:
    """First a fault that passes at the k-th call, then one that comes with one request."""
    bodies = [some_body(i, rng) | {"max_tokens": 12, "n": 1 + i % 3} for i in range(4)]
    guilty: Body = {"prompt": [99, 98, 97], "max_tokens": 12, "temperature": 0, "stream": True}
    failed = 0
    # The records and log lines of five requests a round, a traceback among them, stay.
    with watched(model, has_faults=True, growth_mib=60 + count // 16) as watch:
        wanted = [watch.ask(body | {"stream": False})[1]["choices"] for body in bodies]
        whole = [body | {"stream": False} for body in bodies]
        for k in range(1, count + 1):
            at = watch.served.valve.num_steps + 1 + k % 40

            def once(step: Step, at: int = at) -> None:
                if watch.served.valve.num_steps == at and len(step.work) > 1:
                    raise MemoryError("no room at /usr/lib")

            def always(step: Step, first: int = k % 4 * 3, ids: set[int] = set()) -> None:  # noqa: B006
                for work in step.work:
                    if work.tokens[:3] == (99, 98, 97):
                        ids.add(work.seq_id[0])
                    if work.seq_id[0] in ids and work.start >= first:
                        raise RuntimeError(f"kernel exploded: {MARK}")

            watch.served.valve.before = once if k % 2 else always
            with ThreadPoolExecutor(5) as pool:
                bad = pool.submit(watch.send, COMPLETE, json.dumps(guilty).encode())
                found = list(pool.map(watch.ask, whole))
                status, text = bad.result()
            watch.served.valve.before = lambda step: None
            assert [answer["choices"] for _, answer in found] == wanted, k
            if k % 2:
                assert status == 200
                chunks_of(text)
            else:  # with its prompt, or after some words
                assert status == (200 if k % 4 else 500)
                assert b"generation_failed" in text[-300:]
                assert b"[DONE]" not in text
                failed += 1
        watch.lines.lines.clear()  # what the row raised names MARK, as an exception may
    return f"{count}/{count} faults contained: {failed} guilty failed, 0 neighbours changed"


def t19(model: Path, count: int, rng: random.Random) -> str:
    """A token that is not finite stands in the prompt, or the model chooses it midway."""
    bodies = [some_body(i, rng) for i in range(5)]
    with watched(model, growth_mib=60 + count // 8) as watch:  # for the records of all requests
        wanted = alone(watch, bodies)
        for i in range(count):
            prompt = [40 + i % 300] * (1 + i % 40)
            bad: Body = {"prompt": prompt, "max_tokens": 30, "ignore_eos": True}
            if i % 2:
                prompt[rng.randrange(len(prompt))] = POISON
            else:
                bad |= {"logit_bias": {str(POISON): 100}, "min_tokens": rng.randint(1, 5)}
            at = rng.randrange(len(bodies) + 1)
            found = all_of(watch, [*bodies[:at], bad, *bodies[at:]], 6)
            status, answer = found.pop(at)
            assert status == 500, answer
            assert "finite" in answer["error"]["message"]
            assert list(map(answer_of, found)) == wanted
    return f"{count}/{count} rows that are not finite failed alone"


def t22(model: Path, count: int, rng: random.Random) -> str:
    """The oracles compare records, statuses and lines in every row; this one adds tokens."""
    seen: Counter[str] = Counter()
    with watched(model, clients.SMALL, growth_mib=60 + count // 20) as watch:
        before = watch.served.metrics()
        first = len(watch.records)
        bodies = [some_body(i, rng) | {"stream": False, "n": 1 + i % 3} for i in range(count)]
        for body in bodies[::7]:
            body["temperature"] = 9  # refused
        for _, answer in all_of(watch, bodies, 16):
            if "usage" in answer:
                seen["prompt"] += answer["usage"]["prompt_tokens"]
                seen["generated"] += answer["usage"]["completion_tokens"]
                seen["cached"] += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                seen["requests"] += 1
        clients.leavers(watch, count, rng, ["fin", "rst"])
        mine = {tuple(body["prompt"]) for body in bodies}
        others = [r for r in watch.records[first:] if r.prompt_token_ids not in mine]
        now = watch.served.metrics()

        def gain(name: str) -> float:
            return now[f"ridgeline:{name}"] - before[f"ridgeline:{name}"]

        # Canaries may come between the first look and the first record: only exact from the start.
        for name, key, other in (
            ("generation_tokens_total", "generated", sum(sum(r.num_generated) for r in others)),
            ("prefix_cache_hits_total", "cached", sum(r.num_cached_tokens for r in others)),
        ):
            assert abs(gain(name) - seen[key] - other) <= 16, name
        kept = [r for r in watch.records[first:] if r.prompt_token_ids in mine]
        assert len(kept) == seen["requests"]
        assert sum(len(r.prompt_token_ids) for r in kept) == seen["prompt"]
        assert sum(sum(r.num_generated) for r in kept) == seen["generated"]
        assert sum(r.num_cached_tokens for r in kept) == seen["cached"]
    total = count + seen["requests"]
    return f"{total} requests, {seen['generated']} tokens seen by clients: 0 differences"


def t41(model: Path, count: int, rng: random.Random) -> str:
    kinds = [some_body(i, rng) for i in range(min(count, 256))]
    with watched(model, {"kv_cache_memory": 40 * 16 * 512}, growth_mib=60 + count // 20) as watch:
        wanted = alone(watch, kinds)
        order = [rng.randrange(len(kinds)) for _ in range(count)]
        at_once = min(count, 64)
        with ThreadPoolExecutor(1) as side:
            ways = ["fin", "rst"]
            gone = side.submit(clients.leavers, watch, count // 4, rng, ways, alone=False)
            found = all_of(watch, [kinds[i] for i in order], at_once)
            gone.result()
        right = sum(answer_of(one) == wanted[i] for one, i in zip(found, order, strict=True))
        preempted = sum(record.num_preemptions for record in watch.records)
        hits = sum(record.num_cached_tokens for record in watch.records)
    assert right == count
    return f"{right}/{count} equal to the answer alone ({preempted} preemptions, {hits} cached)"


def t54(model: Path, count: int, rng: random.Random) -> str:
    """All say they are one and the same request, at the same time."""
    with watched(model, log_format="json") as watch:
        bodies = [some_body(i, rng) | {"stream": False} for i in range(8)]
        wanted = alone(watch, bodies)
        start = len(watch.served.lines)

        def ask(i: int) -> tuple[int, Any]:
            return watch.ask(bodies[i % 8] | {"user": "twin"}, x_request_id="twin")

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(ask, range(count)))
        assert [answer_of(one) for one in found] == [wanted[i % 8] for i in range(count)]
        assert {answer["id"].partition("-")[2] for _, answer in found} == {"twin"}
        named = '"id": "twin"'  # a line is written once its answer has gone
        eventually(lambda: sum(named in x for x in watch.served.lines[start:]) == count)
    return f"{count}/{count} with one X-Request-Id: each has its own answer"


def t56(model: Path, count: int, rng: random.Random) -> str:
    def check(watch: Watch, number: int) -> None:
        mine = random.Random(number)
        is_chat, n = mine.random() < 0.5, mine.randint(1, 3)
        body = some_body(number, mine) | {"n": n, "stream": False}
        text = "".join(mine.choice("abc é👍 \n") for _ in range(mine.randint(1, 40)))
        if is_chat:
            body["messages"] = [{"role": "user", "content": text}]
            del body["prompt"]
        elif mine.random() < 0.5:
            body["prompt"] = text
        path = CHAT if is_chat else COMPLETE
        asked = {"messages": body["messages"]} if is_chat else {"prompt": body["prompt"]}
        if isinstance(body.get("prompt"), list):
            prompt_tokens = len(body["prompt"])
        else:
            prompt_tokens = watch.ask(asked, "/tokenize")[1]["count"]
        status, whole = watch.ask(body, path)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        logprobs: Body = {"logprobs": True if is_chat else 0}
        _, chunks = watch.ask(body | options | logprobs, path)
        usage, streamed = whole["usage"], chunks[-1]["usage"]
        assert (status, chunks[-1]["choices"]) == (200, [])
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        lists = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        recount = sum(len(one["content" if is_chat else "tokens"]) for one in lists)
        for found in (usage, streamed):
            assert found["prompt_tokens"] == prompt_tokens
            assert found["completion_tokens"] == recount == n * body["max_tokens"]
            assert found["total_tokens"] == prompt_tokens + recount
            assert 0 <= found["prompt_tokens_details"]["cached_tokens"] < prompt_tokens

    mib = 60 + count // 20
    with watched(model, growth_mib=mib) as watch, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: check(watch, number), range(count)))
    return f"{count}/{count}: usage is what was counted, whole and streamed"
