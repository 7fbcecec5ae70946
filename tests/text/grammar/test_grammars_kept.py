"""Grammars are kept by the memory that they take, not by their text; what is kept never waits."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from ridgeline.system.machine import give_back, memory_in_use, memory_of
from ridgeline.system.process import NUM_PROCESSES
from ridgeline.text.grammar import GrammarError, NotCached, grammars
from ridgeline.text.grammar.grammars import Grammars, GrammarState, Source
from tests.text.grammar.test_grammars import EOS, Bytes, after, allowed
from tests.waiting import PATIENCE_S, eventually

MIB = 1 << 20
LONG = "x" * 40_000


@pytest.fixture
def of_bytes() -> Iterator[Grammars]:
    found = Grammars(Bytes(), [EOS], give_back=give_back)  # type: ignore[arg-type]
    yield found
    found.close()


def schema(value: Any) -> Source:
    return Source("json", json.dumps(value))


def small(i: int) -> tuple[Source, bytes]:
    name = f"p{i}"
    wanted = {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}
    return schema(wanted), f'{{"{name}":"ab'.encode()


def large(i: int) -> tuple[Source, bytes]:
    """Its first mask takes twenty times what it was built of."""
    return schema({"const": f"{i}{LONG}"}), b""


def late(i: int) -> tuple[Source, bytes]:
    """Its first mask takes little, and one behind some tokens what that of ``large`` does."""
    name = f"p{i}"
    wanted = {"type": "object", "properties": {name: {"const": LONG}}, "required": [name]}
    return schema(wanted), f'{{"{name}":"'.encode()


def use(of_bytes: Grammars, source: Source, text: bytes) -> GrammarState:
    state = of_bytes.constraint(source)()
    for byte in text:
        assert byte in allowed(state.masks(())[0])
        state.accept(byte)
    state.masks(())
    return state


def growth(kind: Callable[[int], tuple[Source, bytes]], count: int) -> int:
    """Return by how many bytes this process grows with grammars behind the first ``count``."""
    with closing(Grammars(Bytes(), [EOS], give_back=give_back)) as of_bytes:  # type: ignore[arg-type]
        for i in range(count):
            use(of_bytes, *kind(i))
        gc.collect()
        before = memory_of(os.getpid()).private_bytes
        for i in range(count, 3 * count):
            use(of_bytes, *kind(i))
            assert (
                of_bytes.cached_bytes < grammars._CACHE_BYTES + 24 * MIB
            )  # the last one has grown
        return memory_of(os.getpid()).private_bytes - before


def counted_and_taken(kind: Callable[[int], tuple[Source, bytes]], count: int) -> tuple[int, int]:
    """Return the bytes that grammars count for themselves, and those that this process takes."""
    with closing(Grammars(Bytes(), [EOS], give_back=give_back)) as of_bytes:  # type: ignore[arg-type]
        use(of_bytes, *small(1000))  # builds the vocabulary
        gc.collect()
        give_back()
        counted, taken = of_bytes.cached_bytes, memory_in_use()
        for i in range(count):
            use(of_bytes, *kind(i))
        return of_bytes.cached_bytes - counted, memory_in_use() - taken


def alone(call: str) -> Any:
    """Call a function of this file in a process that nothing else shares."""
    code = f"from {__name__} import *; print(json.dumps({call}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(("kind", "count"), [("small", 200), ("large", 3), ("late", 4)])
def test_distinct_grammars_take_no_more_memory_for_ever(kind: str, count: int) -> None:
    assert alone(f"growth({kind}, {count})") < 24 * MIB


@pytest.mark.parametrize(("kind", "count"), [("small", 120), ("large", 1), ("late", 2)])
def test_what_is_counted_is_what_is_taken(kind: str, count: int) -> None:
    counted, taken = alone(f"counted_and_taken({kind}, {count})")
    assert counted > 8 * MIB
    assert 0.4 * counted < taken < 1.5 * counted + 4 * MIB


def test_what_was_used_last_is_kept(of_bytes: Grammars) -> None:
    often = small(-1)
    for i in range(300):
        use(of_bytes, *often)
        use(of_bytes, *small(i))
    of_bytes.constraint(often[0], may_compile=False)
    with pytest.raises(NotCached):
        of_bytes.constraint(small(0)[0], may_compile=False)


def test_a_refusal_is_kept_too(of_bytes: Grammars) -> None:
    wrong = schema({"type": "integer", "minimum": 2, "maximum": 1})
    with pytest.raises(NotCached):
        of_bytes.constraint(wrong, may_compile=False)
    for may_compile in (True, False):
        with pytest.raises(GrammarError):
            of_bytes.constraint(wrong, may_compile=may_compile)


def test_what_is_kept_waits_for_no_compiling_and_a_second_has_a_process_of_its_own() -> None:
    slow = Grammars(Bytes(), [EOS], timeout_s=PATIENCE_S)  # type: ignore[arg-type]
    kept, others = small(0)[0], [small(i)[0] for i in (1, 2)]
    slow.constraint(kept)
    process = slow._children._idle[-1]._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)  # it compiles for ever
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (slow.constraint(others[0]), ended.set()))
    thread.start()
    eventually(lambda: len(slow._children._idle) < NUM_PROCESSES)
    after(slow.constraint(kept, may_compile=False)(), b"{")
    slow.constraint(others[1])
    assert not ended.is_set()
    os.kill(process.pid, signal.SIGCONT)
    thread.join(PATIENCE_S)
    assert ended.is_set()
    slow.close()


def test_a_busy_machine_only_delays_a_grammar() -> None:
    """Its process does not run for longer than the grammar may compute, as where others do."""
    busy = Grammars(Bytes(), [EOS], timeout_s=1.0)  # type: ignore[arg-type]
    busy.constraint(small(0)[0])
    process = busy._children._idle[-1]._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    compiled: list[object] = []
    thread = threading.Thread(target=lambda: compiled.append(busy.constraint(small(1)[0])))
    thread.start()
    thread.join(2.5)
    assert thread.is_alive()
    os.kill(process.pid, signal.SIGCONT)
    thread.join(60)
    assert compiled
    busy.close()


def test_a_machine_that_is_too_busy_is_no_fault_of_a_grammar() -> None:
    busy = Grammars(Bytes(), [EOS])  # type: ignore[arg-type]
    busy.constraint(small(0)[0])
    process = busy._children._idle[-1]._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    busy._timeout_s = 0.02
    with pytest.raises(ChildProcessError, match=r"in 0.4 s, for the machine is busy"):
        busy.constraint(small(1)[0])
    busy._timeout_s = 2.0
    busy.constraint(small(1)[0])
    busy.close()


def test_a_question_that_takes_too_long_leaves_no_start_to_the_next(of_bytes: Grammars) -> None:
    of_bytes._timeout_s = 0.2
    with pytest.raises(GrammarError):
        of_bytes.constraint(schema({"type": "integer", "multipleOf": 99_999_989}))
    process = of_bytes._children._idle[-1]._process
    assert process is not None
    assert process.poll() is None
