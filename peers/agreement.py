"""Does ``bench serve`` see what another load generator sees? The same server and load, in turn.

    python -m peers.agreement GUIDELLM [--model smollm2] [--rounds 7] [--streams 4]
    python -m peers.agreement GUIDELLM --fixed-ms 200:25

GUIDELLM is the program of guidellm 0.8, installed in an environment of its own. In each round both
send the same number of prompts, as many at once, and ask for answers of one length, with the same
temperature and the same reports of usage; no prompt comes twice, so that the prefix cache helps
neither. The server has one core of its own and the client the others, or a client that computes
more would slow the server that it measures. With --fixed-ms the server is guidellm's own, which
waits so long for the first token and for each one after it: what differs then is the clients. The
medians of all rounds and the ratio within each round are printed as a table; the last line on
standard output is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peers.overhead import server

_WORDS = ("time", "person", "year", "way", "day", "thing", "man", "world", "life", "hand", "river")
_PROMPT_WORDS, _NEW_TOKENS = 100, 64
_START_S = 60.0
# Fields that both send. Left to themselves guidellm gives no temperature, so a server draws as the
# model's file advises, where bench serve asks for greedy answers, which a server may guess ahead;
# and only guidellm asks for usage in every chunk.
_TEMPERATURE = 0
_STREAM_OPTIONS = {"include_usage": True, "continuous_usage_stats": True}
_RIDGELINE = str(Path(sys.executable).with_name("ridgeline"))
# What is compared, by bench serve's name. guidellm counts the first token in time_per_output_token
# and leaves it out of inter_token_latency, the mean over the tokens of all answers.
FIGURES = ("ttft_from_send", "tpot_excl_first", "tpot_incl_first", "e2e", "output_tokens_per_s")


@contextmanager
def fixed_server(program: Path, model: str, ttft_ms: float, itl_ms: float) -> Iterator[int]:
    """Run guidellm's server, whose times are fixed; yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    command = [str(program), "mock-server", "--port", str(port), "--model", model]
    command += ["--ttft-ms", str(ttft_ms), "--itl-ms", str(itl_ms)]
    command += ["--output-tokens", str(_NEW_TOKENS)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        give_up_s = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                if process.poll() is not None or time.monotonic() > give_up_s:
                    raise SystemExit(f"{program} mock-server does not start") from None
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


def prompts_file(path: Path, count: int, rng: random.Random) -> Path:
    """Write prompts that no cache has seen, in a form that both programs read."""
    with path.open("w") as file:
        for _ in range(count):
            text = " ".join(rng.choices(_WORDS, k=_PROMPT_WORDS))
            print(json.dumps({"prompt": text, "output_tokens_count": _NEW_TOKENS}), file=file)
    return path


def ours(url: str, model: str, prompts: Path, count: int, streams: int) -> dict[str, float]:
    """Return the figures of ``ridgeline bench serve``: means, in ms or tokens per second."""
    command = [_RIDGELINE, "bench", "serve", "--base-url", url, "--model", model]
    command += ["--prompts", str(prompts), "--num-prompts", str(count), "--ignore-eos"]
    command += ["--max-concurrency", str(streams), "--max-tokens", str(_NEW_TOKENS)]
    command += ["--num-warmups", "0", "--temperature", str(_TEMPERATURE)]
    command += ["--extra-body", json.dumps({"stream_options": _STREAM_OPTIONS})]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    document = json.loads(done.stdout.splitlines()[-1])
    if document["num_successful"] != count:
        raise SystemExit(f"bench serve: {document['failures']}")
    of = {name: document[name] for name in FIGURES}
    return {name: one["mean_ms"] if isinstance(one, dict) else one for name, one in of.items()}


def theirs(
    program: Path, url: str, model: str, prompts: Path, streams: int, folder: Path
) -> dict[str, float]:
    """Return the same figures of guidellm."""
    command = [str(program), "run", "--disable-progress"]
    body = {"temperature": _TEMPERATURE, "stream_options": _STREAM_OPTIONS}
    backend = {"kind": "openai_http", "target": url, "model": model, "extras": {"body": body}}
    command += ["--backend", json.dumps(backend)]
    command += ["--profile", f"kind=concurrent,streams={streams}"]
    command += ["--data", f"kind=json_file,path={prompts}"]
    count = len(prompts.read_text().splitlines())
    command += ["--constraint", f"kind=max_requests,count={count}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={folder / 'tokenizer'}"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, cwd=folder, env=environment, capture_output=True)
    metrics = json.loads((folder / "benchmarks.json").read_text())["benchmarks"][0]["metrics"]
    if metrics["request_totals"]["successful"] != count:
        raise SystemExit(f"guidellm: {metrics['request_totals']}")
    return {
        "ttft_from_send": metrics["time_to_first_token_ms"]["successful"]["mean"],
        "tpot_excl_first": metrics["inter_token_latency_ms"]["successful"]["mean"],
        "tpot_incl_first": metrics["time_per_output_token_ms"]["successful"]["mean"],
        "e2e": 1e3 * metrics["request_latency"]["successful"]["mean"],
        "output_tokens_per_s": metrics["output_tokens_per_second"]["successful"]["mean"],
    }


def summarise(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return for each figure both medians, and the median, least and greatest ratio of a round."""
    table = {}
    for name in FIGURES:
        ratios = [one["ours"][name] / one["theirs"][name] for one in rounds]
        table[name] = {
            "ours": statistics.median(one["ours"][name] for one in rounds),
            "theirs": statistics.median(one["theirs"][name] for one in rounds),
            "ratio": statistics.median(ratios),
            "min": min(ratios),
            "max": max(ratios),
        }
    return table


def main() -> None:
    """Run the rounds; print a table, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("guidellm", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--fixed-ms", metavar="TTFT:ITL")
    flags = parser.parse_args()
    rng, rounds, program = random.Random(), [], flags.guidellm.absolute()
    serving = server(flags.model, "--threads", "1")
    if flags.fixed_ms:
        ttft_ms, itl_ms = map(float, flags.fixed_ms.split(":"))
        serving = fixed_server(program, flags.model, ttft_ms, itl_ms)
    first, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {first})  # the server inherits it
    with tempfile.TemporaryDirectory() as name, serving as port:
        os.sched_setaffinity(0, others)
        folder, url = Path(name), f"http://127.0.0.1:{port}"
        export = [_RIDGELINE, "export", "tokenizer", flags.model, str(folder / "tokenizer")]
        subprocess.run(export, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for number in range(flags.rounds):
            files = [prompts_file(folder / f"{i}.jsonl", flags.num_prompts, rng) for i in range(2)]
            figures: dict[str, dict[str, float]] = {}
            for who in ("ours", "theirs") if number % 2 else ("theirs", "ours"):
                if who == "ours":
                    figures[who] = ours(
                        url, flags.model, files[0], flags.num_prompts, flags.streams
                    )
                else:
                    figures[who] = theirs(
                        program, url, flags.model, files[1], flags.streams, folder
                    )
            rounds.append(figures)
            print(f"round {number + 1} of {flags.rounds}: {_line(figures)}", file=sys.stderr)
    table = summarise(rounds)
    print("| mean of | bench serve | guidellm | ratio (least to greatest of a round) |")
    print("|---|---|---|---|")
    for name, row in table.items():
        spread = f"{row['ratio']:.3f} ({row['min']:.3f} to {row['max']:.3f})"
        print(f"| {name} | {row['ours']:.1f} | {row['theirs']:.1f} | {spread} |")
    print(json.dumps({"rounds": rounds, "table": table}))


def _line(figures: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(f"{n} {figures['ours'][n] / figures['theirs'][n]:.3f}" for n in FIGURES)


if __name__ == "__main__":
    main()
