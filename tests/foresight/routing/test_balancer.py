"""The rule that chooses servers: what always holds, and what it is good for."""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ridgeline.foresight.routing.balancer import (
    PIECE_BYTES,
    PrefixBalancer,
    PromptKeys,
    ServerLease,
    prompt_of,
)

PIECE, NAMES = 10, [f"s{i}" for i in range(40)]
# Prompts that begin alike, as conversations do: pairs of which one and how long.
PROMPTS = st.tuples(st.integers(0, 3), st.integers(0, 90))


def prompt(which: int, size: int) -> PromptKeys:
    return PromptKeys(size, tuple(b"%d %d" % (which, i) for i in range(size // PIECE)))


class Servers(RuleBasedStateMachine):
    """Servers come and go, requests begin and end; a plain model knows what must be chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.where = PrefixBalancer(PIECE, max_keys=12)
        self.running: list[tuple[str, ServerLease, int]] = []  # and what is unread of it
        self.here = dict[str, int]()  # incarnations
        self.born = 0

    @rule(name=st.sampled_from(NAMES))
    def come_or_go(self, name: str) -> None:
        if name in self.here:
            self.where.remove(name)
            del self.here[name]
        else:
            self.where.add(name, name[-1])  # some share a machine
            self.here[name] = self.born
            self.born += 1
            assert self.where.num_read(name) == self.where.num_requests(name) == 0

    @rule()
    def all_come(self) -> None:
        for name in NAMES:
            if name not in self.here:
                self.come_or_go(name)

    @precondition(lambda self: self.here)
    @rule(asked=PROMPTS, few=st.integers(1, 16), data=st.data())
    def ask(self, asked: tuple[int, int], few: int, data: Any) -> None:
        among = data.draw(st.permutations(sorted(self.here)))[:few]
        wish = prompt(*asked)
        name = self.where.best(wish, among.__contains__)
        assert name in among
        self.is_cheapest(name, wish, among)
        before = self.where.num_requests(name)
        self.running.append((name, self.where.place(name, wish), self.here[name]))
        assert self.where.num_requests(name) == before + 1

    def is_cheapest(self, name: str, wish: PromptKeys, among: list[str]) -> None:
        """None that is less busy and has read as much was passed over, and none too busy taken."""
        where = self.where
        total = sum(map(where.num_requests, self.here))
        share = 1.5 * (total + 1) / len(self.here)

        def has_too_many(one: str) -> bool:
            return where.num_requests(one) >= share * where.speed(one) + 1

        assert not has_too_many(name) or all(map(has_too_many, among))

    @precondition(lambda self: self.here)
    @rule(asked=PROMPTS)
    def ask_all(self, asked: tuple[int, int]) -> None:
        """Of many servers not all are looked at, and one that is not too busy is found."""
        name = self.where.best(prompt(*asked))
        assert name is not None
        placed = self.where.place(name, prompt(*asked))
        self.running.append((name, placed, self.here[name]))

    @precondition(lambda self: self.running)
    @rule(at=st.integers(0), is_over=st.booleans(), seconds=st.floats(0.001, 10.0))
    def go_on(self, at: int, is_over: bool, seconds: float) -> None:
        """A prompt was read, or an answer is over, perhaps of a server that is gone."""
        _, placed, _ = self.running[at % len(self.running)]
        placed.end() if is_over else placed.has_read(seconds)
        if is_over:
            self.running.pop(at % len(self.running))
            placed.end()

    @invariant()
    def counts(self) -> None:
        self.where.check()
        for name, born in self.here.items():
            mine = [one for one in self.running if one[0] == name and one[2] == born]
            assert self.where.num_requests(name) == len(mine)


TestServers = Servers.TestCase
TestServers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_of_a_thousand_servers_few_are_looked_at() -> None:
    """All of them have read the beginning, and one all of it."""
    where, asked = servers(1000), list[str]()
    for i in range(1000):
        where.place(f"s{i}", prompt(0, 40)).end()
    where.place("s321", prompt(0, 80)).end()

    def takes(name: str) -> bool:
        asked.append(name)
        return True

    assert all(where.best(prompt(0, 80), takes) == "s321" for _ in range(100))
    assert len(asked) < 100 * 100


def test_nobody_is_found_where_nobody_takes_requests() -> None:
    assert PrefixBalancer(PIECE).best(prompt(0, 80)) is None
    assert servers(3).best(prompt(0, 80), lambda name: False) is None
    many = servers(1000)
    assert many.best(prompt(0, 80), lambda name: False) is None
    assert many.best(prompt(0, 80), "s777".__eq__) == "s777"


def best(where: PrefixBalancer, wish: PromptKeys) -> str:
    name = where.best(wish)
    assert name is not None
    return name


def servers(num: int, piece: int = PIECE) -> PrefixBalancer:
    where = PrefixBalancer(piece)
    for i in range(num):
        where.add(f"s{i}")
    return where


def test_a_prompt_goes_where_it_was_read_and_others_where_nothing_waits() -> None:
    where = servers(3)
    first = best(where, prompt(0, 80))
    where.place(first, prompt(0, 80)).end()
    assert where.best(prompt(0, 90)) == first
    held = where.place(first, prompt(0, 90))
    other = best(where, prompt(1, 90))
    assert other != first
    where.place(other, prompt(1, 90))
    held.has_read()
    assert where.best(prompt(2, 0), {first, other}.__contains__) == first, "nothing waits there"


def test_a_prefix_never_draws_all_requests() -> None:
    where = servers(4)
    for _ in range(64):
        where.place(best(where, prompt(0, 90)), prompt(0, 90)).has_read()
    assert max(map(where.num_requests, NAMES[:4])) <= 1.5 * 65 / 4 + 2


def test_among_a_thousand_servers_the_one_that_has_read_it_is_found() -> None:
    where = servers(1000)
    for which in range(200):
        where.place(f"s{5 * which}", prompt(which, 80)).end()
    assert all(where.best(prompt(i, 80)) == f"s{5 * i}" for i in range(200))


# --- conversations ----------------------------------------------------------------------------

WORDS = ["harbour", "copper", "lantern", "winter", "orchard", "signal", "marble", "river"]
BLOCK_BYTES = 64  # 16 tokens of text


class InTurn:
    """Takes one server after the other: what is to be beaten."""

    def __init__(self) -> None:
        self._turn = count()

    def best(self, wish: PromptKeys) -> str:
        return NAMES[next(self._turn) % 2]

    def place(self, name: str, wish: PromptKeys) -> ServerLease:
        return servers(1).place("s0", wish)


def talk(rule: PrefixBalancer | InTurn, num_at_once: int) -> float:
    """Return the share of 12 conversations of 5 turns that two servers had read before.

    A prompt is read when two more have come, and its answer ends at any time after that.
    """
    rng = random.Random(5)
    systems = [" ".join(rng.choices(WORDS, k=120)) for _ in range(3)]
    talks = [[{"role": "system", "content": systems[i % 3]}] for i in range(12)]
    caches: dict[str, set[bytes]] = {}
    hits = total = 0
    waiting = [i for i in range(12) for _ in range(5)]
    rng.shuffle(waiting)
    running: list[tuple[int, ServerLease]] = []
    while waiting or running:
        busy = [one for one, _ in running]
        idle = next((i for i in waiting if i not in busy), None)
        if idle is None or len(running) == num_at_once:
            which, placed = running.pop(rng.randrange(len(running)))
            placed.end()
            answer = " ".join(rng.choices(WORDS, k=10))
            talks[which].append({"role": "assistant", "content": answer})
            continue
        waiting.remove(idle)
        talks[idle].append({"role": "user", "content": " ".join(rng.choices(WORDS, k=60))})
        data = b"".join(repr(one).encode() for one in talks[idle])
        wish = prompt_of({"messages": talks[idle]})
        name = rule.best(wish)
        assert name is not None
        for _, placed in running[:-1]:
            placed.has_read()
        running.append((idle, rule.place(name, wish)))
        cache = caches.setdefault(name, set())
        blocks = [data[:at] for at in range(BLOCK_BYTES, len(data), BLOCK_BYTES)]
        hits += BLOCK_BYTES * sum(block in cache for block in blocks)
        total += len(data)
        cache.update(blocks)
    return hits / total


@pytest.mark.parametrize("num_at_once", [1, 6, 12])
def test_conversations_stay_where_they_were_read(num_at_once: int) -> None:
    assert talk(servers(2, PIECE_BYTES), num_at_once) >= 0.73
    assert talk(InTurn(), num_at_once) < 0.65, "so the measure tells rules apart"


def test_a_machine_that_is_slower_gets_less() -> None:
    """Whatever it has: nobody says how fast it is, the router sees it."""
    where = PrefixBalancer(PIECE)
    for name in ("fast", "slow"):
        where.add(name, name)
    pace, free_s = {"fast": 1e-3, "slow": 4e-3}, {"fast": 0.0, "slow": 0.0}
    got, waiting = {"fast": 0, "slow": 0}, list[tuple[float, float, ServerLease]]()
    for i in range(400):
        now_s = i * 0.09  # both together read one in 80 ms
        waiting.sort(key=lambda one: one[0])
        while waiting and waiting[0][0] <= now_s:
            end_s, begin_s, placed = waiting.pop(0)
            placed.has_read(end_s - begin_s)
            placed.end()
        name = best(where, wish := prompt(i, 100))
        got[name] += i >= 100
        free_s[name] = max(now_s, free_s[name]) + 100 * pace[name]
        waiting.append((free_s[name], now_s, where.place(name, wish)))
        where.check()
    assert where.speed("fast") > 2 * where.speed("slow")
    assert 0 < got["slow"] < got["fast"] / 3


def test_servers_of_one_machine_are_equally_fast() -> None:
    where = PrefixBalancer(PIECE)
    for name in ("a", "b"):
        where.add(name)
        placed = where.place(name, prompt(0, 50))
        placed.has_read(5.0 if name == "a" else 0.1)
        placed.end()
    assert where.speed("a") == where.speed("b") == 1.0
    where.add("c", "another machine")
    assert where.speed("c") == 1.0, "nobody knows yet"
    where.place("c", prompt(1, 50)).has_read(0.001)
    assert where.speed("c") > 1.0 > where.speed("a") == where.speed("b")
    where.remove("c")
    assert where.speed("a") == 1.0
