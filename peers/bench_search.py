"""How far is ``ridgeline bench search`` off on a real server? The search beside a grid of loads.

    python -m peers.bench_search [--model smollm2] [--slo ttft:p95:500 tpot:mean:40]
                                 [--num-prompts 100] [--reach 3]

It starts a server, searches the highest rate at which the service levels hold, and then tries loads
5 % apart, up to ``--reach`` steps below and above what all trials of the search speak for, in
random order, each with a trial as long as the search's last ones. The grid's answer is what its own
trials speak for. If all hold or all fail, it goes on there. A trial near 10 requests a second takes
some 20 s, and there are some 15: five to eight minutes. The table is markdown; the last line on
standard output is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peers.overhead import server
from ridgeline.bench.load.client_flags import ClientFlags
from ridgeline.bench.search import first_model
from ridgeline.bench.search.knee import WIDTH, Trial, likely_limit
from ridgeline.bench.search.slo import parse_slo
from ridgeline.bench.search.trial import TrialSetting, run_trial
from ridgeline.foresight.simulator.workload import Workload

_WORDS, _TOKENS = "64", "32"
_MOST_FURTHER = 4  # loads on one side, where the grid's own limit is not in it


def main(arguments: list[str] | None = None) -> None:
    """Search, try the grid, and print both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--slo", nargs="+", default=["ttft:p95:500", "tpot:mean:40"])
    parser.add_argument("--num-prompts", type=int, default=100, help="that a trial counts")
    parser.add_argument("--reach", type=int, default=3, help="loads below and above")
    asked = parser.parse_args(arguments)
    began_s = time.monotonic()
    with server(asked.model) as port:
        base_url = f"http://127.0.0.1:{port}"
        found = search(base_url, asked.slo, asked.num_prompts)
        answer = found["answer"]
        if answer["likely"] is None:
            sys.exit(f"the search found no limit: {answer['text']}")
        searched_s = time.monotonic() - began_s
        setting = setting_of(base_url, asked.slo, asked.num_prompts, found)

        def hold(load: float, number: int) -> Trial:
            trial, record = run_trial(setting, load, number)
            values = ", ".join(f"{one['slo']} {one['value_ms']}" for one in record["slos"])
            print(f"{load:.4g} requests/s: {values}", file=sys.stderr, flush=True)
            return trial

        trials = grid(answer["likely"], asked.reach, hold)
    limit = likely_limit(trials)
    print("| requests/s | held |\n|---|---|")
    for trial in sorted(trials, key=lambda one: one.load):
        print(f"| {trial.load:.4g} | {'yes' if trial.holds else 'no'} |")
    error = limit and 100 * (answer["likely"] / limit - 1)
    said = "no limit in its reach" if limit is None else f"{limit:.4g} requests/s"
    print(
        f"\nThe search speaks for {answer['likely']:.4g} requests/s, by {len(found['trials'])} "
        f"trials in {searched_s:.0f} s; the grid for {said}, by {len(trials)}."
    )
    if error is not None:
        print(f"Error of the search: {error:+.1f} % (bar 5 %, in at most 8 trials).")
    result = {
        "slo": asked.slo, "answer": answer, "num_trials": len(found["trials"]),
        "grid": [[trial.load, trial.holds] for trial in trials], "grid_limit": limit,
        "error_percent": error, "seconds": round(time.monotonic() - began_s, 1),
    }  # fmt: skip
    print(json.dumps(result))


def search(base_url: str, slo: Sequence[str], num_prompts: int) -> dict[str, Any]:
    """Run ``ridgeline bench search``; return its document."""
    command = [str(Path(sys.executable).with_name("ridgeline")), "bench", "search"]
    command += ["--base-url", base_url, "--num-prompts", str(num_prompts), "--ignore-eos"]
    command += ["--prompt-words", _WORDS, "--max-tokens", _TOKENS]
    for one in slo:
        command += ["--slo", one]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.splitlines()
    print("\n".join(lines[:-1]), file=sys.stderr, flush=True)
    if not lines:
        sys.exit("the search failed")
    document: dict[str, Any] = json.loads(lines[-1])
    return document


def setting_of(
    base_url: str, slo: Sequence[str], num_prompts: int, found: dict[str, Any]
) -> TrialSetting:
    """Return what the grid's trials have in common: what the search's last ones had."""
    asking = ClientFlags(base_url=base_url, model=first_model(base_url, None), ignore_eos=True)
    measured = [one["measured"] for one in found["trials"] if one["measured"]]
    answers = [one["e2e"]["mean_ms"] for one in measured if one["e2e"]]
    return TrialSetting(
        target=asking.target(),
        workload=Workload(
            request_rate=1.0, prompt_words=_WORDS, max_tokens=_TOKENS,
            seed=random.SystemRandom().getrandbits(32),
        ),
        slos=[parse_slo(text) for text in slo],
        is_open=True,
        num_measured=num_prompts,
        answer_s=answers[-1] / 1e3,
        is_rough=False,
    )  # fmt: skip


def grid(middle: float, reach: int, hold: Callable[[float, int], Trial]) -> list[Trial]:
    """Try loads 5 % apart around one, in random order, and further where all held or all failed.

    Args:
        middle: the load in the middle.
        reach: loads below it, and as many above.
        hold: tries a load; is given its number, too.
    """
    steps = [*range(-reach, reach + 1)]
    random.Random(0).shuffle(steps)
    trials = [hold(middle * WIDTH**step, i) for i, step in enumerate(steps)]
    for further in range(1, _MOST_FURTHER + 1):
        verdicts = {trial.holds for trial in trials}
        if len(verdicts) == 2:
            break
        step = reach + further if True in verdicts else -reach - further
        trials.append(hold(middle * WIDTH**step, len(trials)))
    return trials


if __name__ == "__main__":
    main()
