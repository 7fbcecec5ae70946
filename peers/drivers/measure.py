"""What every driver does with its engine: read a job, load, warm up, measure, print one JSON line.

A driver is a module with ``open_engine(job) -> Engine`` that ends in ``main(open_engine)``. It runs
in its engine's own environment, so this imports the standard library and the shapes only. What the
engine itself prints on standard output is sent to standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from peers.shapes import START_TOKENS, Job, Shape, prompts

# Complete all prompts at once, sampled or constrained or searched for as the shape says, past any
# end of text, with so many new tokens each.
Generate = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
# Make ready, untimed, for a shape.
Engine = Callable[[Shape], Generate]

_WARM_UP_TOKENS = 4
# Of x86-64 Linux: the system call, what it is asked for, and the state that tiles are.
_ARCH_PRCTL, _ARCH_GET_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1022, 18


def main(open_engine: Callable[[Job], Engine], version: Callable[[], str]) -> None:
    """Do the job given as the only argument and print the result as a line of JSON."""
    result_line = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines speak on standard output, from C++ too
    job = Job.from_dict(json.loads(sys.argv[1]))
    rng = random.Random(job.seed)
    engine = open_engine(job)
    result: dict[str, Any] = {"version": version()}
    if job.shapes:
        result["samples"], result["answers"] = {}, {}
        for shape in job.shapes:
            rates, answers = measure(engine, shape, job, rng)
            result["samples"].setdefault(shape.name, []).extend(rates)
            if job.texts:
                result["answers"][shape.name] = answers
    else:
        # The same prompt for every engine and in every run: their first tokens can be compared.
        shape = Shape("start", "prefill", 1, START_TOKENS, 1)
        prompt = prompts(shape, job.vocab_size, random.Random(START_TOKENS))
        result["first_token"] = engine(shape)(prompt, 1)[0][0]
    result["has_tiles"] = has_tiles()
    print(json.dumps(result), file=result_line, flush=True)
    # Some engines hang or complain while their parts are taken down; nothing is left to be lost.
    os._exit(0)


def has_tiles() -> bool:
    """Return whether this process asked Linux for matrix tiles (AMX), and got them.

    Nobody may use them without, and who does not want to use them does not ask.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    granted = ctypes.c_uint64(0)
    call = ctypes.CDLL(None).syscall
    words = _ARCH_PRCTL, _ARCH_GET_XCOMP_PERM
    failed = call(*map(ctypes.c_long, words), ctypes.byref(granted))  # Linux before 5.16
    return not failed and bool(granted.value >> _XFEATURE_XTILEDATA & 1)


def measure(
    engine: Engine, shape: Shape, job: Job, rng: random.Random
) -> tuple[list[float], list[list[int]]]:
    """Return ``shape.samples`` rates, tokens per second, after a warm-up at the same shape.

    The last whole answers come with them.
    """
    generate = engine(shape)
    whole: list[list[int]] = []

    def seconds(new_tokens: int) -> float:
        texts = [list(text) for text in job.texts[shape.first_text :][: shape.num_streams]]
        fresh = texts or prompts(shape, job.vocab_size, rng)
        start_s = time.perf_counter()
        answers = generate(fresh, new_tokens)
        took_s = time.perf_counter() - start_s
        if [len(answer) for answer in answers] != [new_tokens] * shape.num_streams:
            raise RuntimeError(f"{shape.name}: an answer has not {new_tokens} tokens")
        if new_tokens > shape.new_tokens:
            whole[:] = answers
        return took_s

    warm_up_tokens = 1 if shape.kind == "prefill" else _WARM_UP_TOKENS
    seconds(warm_up_tokens)
    rates = []
    for _ in range(shape.samples):
        if shape.kind == "decode":
            took_s = seconds(shape.new_tokens + 1) - seconds(1)
        else:
            took_s = seconds(shape.new_tokens)
        if took_s > 0:  # a difference is not where a neighbour held up the shorter half
            rates.append(shape.counted_tokens / took_s)
    return rates, whole
