"""Damaged weights are an error; threads sleep when there is no work, and end with their runner."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ridgeline.backends.cpu.kernels.threads import AdaptiveThreads
from ridgeline.backends.cpu.runner import CpuRunner
from ridgeline.backends.interface import Setup
from tests.backends.cpu.test_runner import crowd
from tests.backends.runners import CPU_FORMATS, GREEDY, TOKENS, Make, make, step, work
from tests.kept_kernels import KERNELS
from tests.tiny import PLAIN, checkpoint, new_setup, random_arrays
from tests.waiting import PATIENCE_S, eventually

__all__ = ["make"]  # a fixture

# --- damage ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["f32", "int8"])
@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("layers.0.q", 1),
        ("layers.1.k", 1),
        ("layers.0.v", 1),
        ("layers.1.gate", 1),
        ("head", 1),  # of one thread's tokens
        ("head", 40),  # of the other's
    ],
)
def test_damaged_weights_are_an_error(make: Make, name: str, row: int, kind: str) -> None:
    arrays = random_arrays(PLAIN)
    arrays[name][row, 3] = np.nan
    runner = make(checkpoint(PLAIN, arrays), kind, threads=2)
    for count in (1, 9):
        plain = work(TOKENS[:count], (0,), params=GREEDY)
        assert set(runner.execute(step(plain, work(TOKENS[:count], (1,)))).errors) == {0, 1}
    runner.close()


# --- life --------------------------------------------------------------------------------------


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread is not threading.main_thread()]


def test_an_idle_runner_costs_nothing(make: Make) -> None:
    others = set(workers())
    runner = make(threads=3)
    clocks = [time.pthread_getcpuclockid(t.ident or 0) for t in {*workers()} - others]
    assert len(clocks) == 2
    runner.execute(crowd())

    def rests() -> bool:  # a worker may wait for the next step for a moment
        before_s = sum(map(time.clock_gettime, clocks))
        time.sleep(0.5)
        return sum(map(time.clock_gettime, clocks)) - before_s < 0.001

    eventually(rests)
    assert runner.execute(crowd()) == make().execute(crowd())  # and wakes up
    runner.close()


@pytest.mark.parametrize("kind", CPU_FORMATS)
def test_threads_may_leave_and_return_between_steps(make: Make, kind: str) -> None:
    """Who takes no part in a step must not join it late, nor miss the next that wants it."""
    items = work(TOKENS[:1], (13,)), work(TOKENS[3:5], (14,), params=GREEDY)
    few, many = step(*items), crowd()
    quiet = make(kind=kind)
    wanted = quiet.execute(few), quiet.execute(many)
    runner = make(kind=kind, threads=3)
    threads = runner._adaptive_threads
    for turn in range(60):
        threads.size = (3, 1, 2, 1, 3, 2)[turn % 6]
        assert runner.execute(few) == wanted[0], turn
        if turn % 7 == 0:
            assert runner.execute(many) == wanted[1], turn  # always with all
    runner.close()


def sizes(
    threads: AdaptiveThreads, speed: Callable[[int, int], float], num_steps: int
) -> list[int]:
    """Sizes over steps whose time depends on the size and the step's number."""
    chosen = []
    for number in range(num_steps):
        chosen.append(threads.size)
        threads.note(1, speed(threads.size, number))
    return chosen


def test_a_quiet_machine_keeps_all_threads() -> None:
    assert sizes(AdaptiveThreads(2), lambda size, n: 3.0 + 0.3 * (n % 5), 3000) == [2] * 3000
    assert sizes(AdaptiveThreads(1), lambda size, n: 1.0 + 9 * (n % 2), 300) == [1] * 300


def test_a_busy_neighbour_costs_one_thread_until_it_is_gone() -> None:
    def disturbed(size: int, number: int) -> float:
        return 4.0 if size == 1 else 3.0 + 9 * (number % 2)

    threads = AdaptiveThreads(2)
    chosen = sizes(threads, disturbed, 3000)
    assert chosen.count(1) > 2700  # trials with all come later and later
    assert chosen[-1000:].count(2) <= 32
    after = sizes(threads, lambda size, n: 4.0 if size == 1 else 3.0, 2000)
    assert after[-500:] == [2] * 500


def test_one_thread_fewer_is_not_kept_where_it_is_slower() -> None:
    """Irregular steps have other reasons too."""
    chosen = sizes(
        AdaptiveThreads(4), lambda size, n: (3.0 if size == 4 else 8.0) * (1 + n % 3), 3000
    )
    assert chosen.count(3) < 200
    assert chosen[-1] == 4


def test_steps_of_other_numbers_of_rows_are_not_compared() -> None:
    """Rows come and go: sixteen take longer than one, and nobody is to blame."""
    threads = AdaptiveThreads(2)
    for number in range(3000):
        num_rows = 1 if number // 20 % 2 else 16
        threads.note(num_rows, 3.0 * num_rows)
        assert threads.size == 2


def test_a_busy_neighbour_is_seen_although_rows_vary() -> None:
    """Drafts make steps of one row and of eight follow each other."""
    threads = AdaptiveThreads(2)
    chosen = []
    for number in range(3000):
        num_rows = 1 + number * 5 % 8
        is_late = number % 3 == 0
        chosen.append(threads.size)
        time_s = num_rows * (4.0 if threads.size == 1 else 3.0 + 12 * is_late)
        threads.note(num_rows, time_s)
    assert chosen.count(1) > 2500
    for number in range(3000):
        num_rows = 1 + number * 5 % 8
        threads.note(num_rows, num_rows * (4.0 if threads.size == 1 else 3.0))
    assert threads.size == 2


def test_close_ends_the_threads(make: Make) -> None:
    others = set(workers())
    runner = make(threads=4)
    assert len(set(workers()) - others) == 3
    runner.execute(crowd())
    runner.close()
    assert set(workers()) == others
    runner.close()  # once more changes nothing


def test_more_threads_than_a_byte_can_say_give_the_same_answer() -> None:
    """In a process of its own, as a barrier that waits for too many would never end."""
    script = """
        from tests.backends.cpu.test_runner_life import KERNELS, CpuRunner, crowd, settings
        from tests.tiny import PLAIN, checkpoint, random_arrays
        model = checkpoint(PLAIN, random_arrays(PLAIN))
        one, many = (
            CpuRunner(model, settings(threads), kernel_cache=KERNELS).execute(crowd())
            for threads in (1, 256)
        )
        print(many == one and len(many.tokens), flush=True)
    """
    done = run(script)
    assert done.stdout == f"{len(crowd().work)}\n", done.stderr


def test_disuse_ends_the_threads() -> None:
    others = set(workers())
    runner = CpuRunner(checkpoint(PLAIN), settings(), kernel_cache=KERNELS)
    runner.execute(crowd())
    assert set(workers()) != others
    del runner
    gc.collect()
    assert set(workers()) == others


def settings(threads: int = 2) -> Setup:
    return new_setup(
        dtype="auto",
        kv_cache_dtype="int8",
        num_blocks=24,
        max_model_len=96,
        max_num_batched_tokens=256,
        threads=threads,
    )


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0),
        ("time.sleep(0.05)", 0),  # by then the workers are asleep
        ("sys.exit(3)", 3),
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_python_ends_without_close(ending: str, code: int) -> None:
    """It neither hangs nor crashes."""
    script = f"""
        import sys, time
        from tests.backends.cpu.test_runner_life import KERNELS, CpuRunner, crowd, settings
        from tests.tiny import PLAIN, checkpoint
        runner = CpuRunner(checkpoint(PLAIN), settings(), kernel_cache=KERNELS)
        runner.execute(crowd())
        print("done", flush=True)
        {ending}
    """
    done = run(script)
    assert done.stdout == "done\n", done.stderr
    assert done.returncode in (code, -2 if code == 130 else code)


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
