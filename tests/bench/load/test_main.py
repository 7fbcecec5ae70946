"""``ridgeline bench serve`` against a real HTTP server that answers by a script of delays.

What it measures is compared with the script in virtual time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ridgeline.bench.load.client import drive
from ridgeline.bench.load.client_flags import AskedServer
from ridgeline.bench.load.stats import Outcome, summarise, warnings
from ridgeline.foresight.simulator.workload import Planned
from tests.bench.script_server import DONE, JSON, Script, Server, chat, serving, usage
from tests.bench.virtual_time import answering
from tests.waiting import PATIENCE_S


def scripted(first_s: float, gap_s: float, num: int) -> Script:
    """The role at once, ``num`` tokens, usage."""

    def script(number: int, body: JSON) -> Iterator[Any]:
        yield chat("", role="assistant")
        yield ": a comment\n\n"
        yield first_s
        for i in range(num):
            if i:
                yield gap_s
            yield chat(f"t{i}")
        yield chat(finish="length")
        yield usage(7, num, 3)
        yield DONE

    return script


def target(server: Server, *, timeout_s: float = 20.0, is_chat: bool = True) -> AskedServer:
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    return AskedServer(
        server.url + path, is_chat, {"Authorization": "Bearer k"}, {"model": "m"}, timeout_s
    )


def planned(arrivals: list[float] | list[None]) -> list[Planned]:
    return [Planned(i, f"prompt {i}", 5, arrival) for i, arrival in enumerate(arrivals)]


def run(
    server: AskedServer, plan: list[Planned], workers: int | None = None, warmups: int = 0
) -> tuple[list[Outcome], JSON]:
    first = [Planned(-1 - i, "warm", 5, None) for i in range(warmups)]
    return asyncio.run(drive(server, first, plan, workers, lambda done, total: None))


# --- what is sent, and when ----------------------------------------------------------------------


def test_a_closed_loop_keeps_so_many_running_and_asks_each_prompt_once_in_order() -> None:
    all_four = threading.Barrier(4)

    def script(number: int, body: JSON) -> Iterator[Any]:
        if number < 4:
            all_four.wait(PATIENCE_S)
        yield from scripted(0.03, 0.0, 2)(number, body)

    with serving(script) as server:
        outcomes, _ = run(target(server), planned([None] * 20), workers=4)
    assert server.peak == 4
    assert len(server.connections) == 4  # used again, not opened for each
    assert [outcome.index for outcome in outcomes] == list(range(20))
    assert all(outcome.error is None and outcome.arrival_s is None for outcome in outcomes)
    asked = [body["messages"][0]["content"] for body in server.bodies]
    assert sorted(asked) == sorted(f"prompt {i}" for i in range(20))
    assert set(asked[:4]) == {f"prompt {i}" for i in range(4)}


def test_an_open_loop_sends_on_schedule_however_slow_the_server_is() -> None:
    arrivals = [0.0, 0.05, 0.1, 0.1, 0.3]
    with answering(scripted(2.5, 0.0, 1)) as server:
        outcomes, client = run(target(server), planned(arrivals))
    assert server.peak == 5
    assert [outcome.arrival_s for outcome in outcomes] == arrivals
    assert [outcome.sent_s for outcome in outcomes] == pytest.approx(arrivals)
    assert server.arrived_s == pytest.approx(arrivals)
    assert client["send_lateness"]["num"] == 5


def test_the_request_says_what_was_planned() -> None:
    with serving(scripted(0.0, 0.0, 1)) as server:
        run(target(server), [Planned(0, "hello", 17, None)], workers=1)
        run(target(server, is_chat=False), [Planned(0, "hello", 17, None)], workers=1)
    chat_body, text_body = server.bodies
    assert chat_body == {
        "model": "m",
        "max_tokens": 17,
        "messages": [{"role": "user", "content": "hello"}],
    }
    assert text_body == {"model": "m", "max_tokens": 17, "prompt": "hello"}
    assert server.paths == ["/v1/chat/completions", "/v1/completions"]
    assert server.headers[0]["authorization"] == "Bearer k"


def test_a_turn_asks_behind_the_answers_before_it_once_they_are_there() -> None:
    plan = [
        Planned(i, f"prompt {i}", 5, None, turn=i % 3, think_s=0.05 if i % 3 else 0.0)
        for i in range(6)
    ]
    both = threading.Barrier(2)

    def script(number: int, body: JSON) -> Iterator[Any]:
        if number < 2:
            both.wait(PATIENCE_S)
        yield from scripted(0.02, 0.0, 2)(number, body)

    with serving(script) as server:
        outcomes, _ = run(target(server), plan, workers=2)
        run(target(server, is_chat=False), plan[:2], workers=1)
    assert server.peak == 2
    by_last = {body["messages"][-1]["content"]: body["messages"] for body in server.bodies[:6]}
    assert by_last["prompt 5"] == [
        {"role": "user", "content": "prompt 3"},
        {"role": "assistant", "content": "t0t1"},
        {"role": "user", "content": "prompt 4"},
        {"role": "assistant", "content": "t0t1"},
        {"role": "user", "content": "prompt 5"},
    ]
    assert len(by_last["prompt 3"]) == 1
    for before, after in itertools.pairwise(outcomes[:3]):
        assert after.sent_s >= before.end_s + 0.05
    assert server.bodies[-1]["prompt"] == "prompt 0 t0t1 prompt 1"


def test_a_turn_behind_one_that_failed_fails_and_is_not_sent() -> None:
    plan = [Planned(i, "prompt 0", 5, None, turn=i) for i in range(3)]
    with serving(failing) as server:
        outcomes, _ = run(target(server), plan, workers=1)
    assert len(server.bodies) == 1
    assert [o.error for o in outcomes] == ["HTTP 429: too many", *["the turn before it failed"] * 2]


# --- what is measured ----------------------------------------------------------------------------


def test_latencies_are_those_of_the_script() -> None:
    with answering(scripted(1.0, 0.2, 6)) as server:
        outcomes, _ = run(target(server), planned([0.0, 0.02, 0.04]))
    found = summarise(outcomes, {})
    assert (found["num_successful"], found["token_source"]) == (3, "server_usage")
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (21, 18)
    assert found["total_cached_input_tokens"] == 9
    assert found["total_output_chunks"] == 18  # neither the role, the end nor usage is text
    assert found["itl_chunk_pooled"]["num"] == 15
    expected_ms = {"ttft_from_send": 1000, "ttft_from_scheduled_arrival": 1000, "e2e": 2000}
    expected_ms |= {"itl_chunk_pooled": 200, "tpot_excl_first": 200}
    for name, ms in expected_ms.items():
        assert [found[name][of] for of in ("min_ms", "mean_ms", "max_ms")] == [ms] * 3, name


def test_without_usage_chunks_are_counted() -> None:
    def script(number: int, body: JSON) -> Iterator[Any]:
        for word in ("a", "b", "", "c"):
            yield {"choices": [{"index": 0, "text": word, "finish_reason": None}]}
        yield {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
        yield DONE

    with serving(script) as server:
        outcomes, _ = run(target(server, is_chat=False), planned([None]), workers=1)
    assert (outcomes[0].usage_tokens, outcomes[0].num_tokens) == (None, 3)


@pytest.mark.parametrize(
    "delta", [{"reasoning_content": "hm"}, {"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}]
)
def test_reasoning_and_tool_calls_are_text_too(delta: JSON) -> None:
    def script(number: int, body: JSON) -> Iterator[Any]:
        yield chat(**delta)
        yield chat(finish="stop")
        yield DONE

    with serving(script) as server:
        outcomes, _ = run(target(server), planned([None]), workers=1)
    assert len(outcomes[0].chunk_s) == 1


def test_an_event_cut_in_two_is_one() -> None:
    def script(number: int, body: JSON) -> Iterator[Any]:
        text = f"data: {json.dumps(chat('half'))}\n\n"
        yield text[:20]
        yield 0.05
        yield text[20:] + f"data: {json.dumps(chat(finish='stop'))}\r\n\r\n"

    with serving(script) as server:
        outcomes, _ = run(target(server), planned([None]), workers=1)
    assert (outcomes[0].error, len(outcomes[0].chunk_s)) == (None, 1)  # and no [DONE] is needed


# --- failures ------------------------------------------------------------------------------------


def failing(number: int, body: JSON) -> Iterator[Any]:
    kind = body["messages"][0]["content"].split()[-1]
    if kind == "0":
        yield (429, json.dumps({"error": {"message": "too\nmany", "type": "x"}}))
    if kind == "1":
        yield (200, json.dumps(chat("all at once")))
    if kind == "7":
        yield (502, "<html>\nBad gateway")
    yield chat("x")
    if kind == "2":
        raise OSError
    if kind == "3":
        yield {"error": {"message": "engine died", "code": 500}}
    if kind == "4":
        return
    if kind == "5":
        yield chat(finish="error")
    if kind == "6":
        yield "data: [1, 2]\n\n"
    yield chat(finish="stop")
    yield usage(1, 1)
    yield DONE


def test_every_failure_is_listed_and_stops_nobody_else() -> None:
    with serving(failing) as server:
        outcomes, _ = run(target(server, timeout_s=60.0), planned([0.0] * 11))
    words = [
        "HTTP 429: too many",
        "application/json",
        "peer closed",
        "error in the stream: engine died",
        "without a finish_reason",
        "finish_reason error",
        "AttributeError",
        "HTTP 502: <html> Bad gateway",
    ]
    for outcome, word in zip(outcomes, words, strict=False):
        assert outcome.error is not None
        assert word in outcome.error
    assert [outcome.error for outcome in outcomes[8:]] == [None] * 3
    found = summarise(outcomes, {"e2e": 1e6})
    assert (found["num_requests"], found["num_failed"]) == (11, 8)
    assert sum(failure["num"] for failure in found["failures"]) == 8
    assert found["goodput"]["share_of_all_requests"] == round(3 / 11, 4)


def test_an_answer_that_takes_too_long_is_given_up_and_stops_nobody_else() -> None:
    def script(number: int, body: JSON) -> Iterator[Any]:
        yield from scripted(0.5, 0.0 if number else 4.0, 2)(number, body)

    with answering(script) as server:
        (late, other), _ = run(target(server, timeout_s=2.0), planned([0.0, 0.0]))
    assert late.error == "no complete answer after 2 s"
    assert late.end_s - late.sent_s == pytest.approx(2.0)
    assert other.error is None
    assert other.end_s - other.sent_s == pytest.approx(0.5)
    assert server.running == 0


def test_nobody_there_fails_each_request_and_the_warm_up_says_so() -> None:
    with serving(failing) as server:
        pass
    outcomes, _ = run(target(server), planned([None] * 3), workers=1)
    assert all("ConnectError" in (outcome.error or "") for outcome in outcomes)
    with pytest.raises(ValueError, match="does not serve the first requests: ConnectError"):
        run(target(server), planned([None]), workers=1, warmups=2)


def test_the_warm_up_is_not_measured() -> None:
    with serving(scripted(0.0, 0.0, 1)) as server:
        outcomes, _ = run(target(server), planned([None] * 2), workers=1, warmups=3)
    assert [body["messages"][0]["content"] for body in server.bodies[:3]] == ["warm"] * 3
    assert [outcome.index for outcome in outcomes] == [0, 1]


# --- the client's own health ---------------------------------------------------------------------


def test_a_client_that_cannot_keep_up_is_found_out() -> None:
    """Here it is kept from its work by its own progress report."""
    with serving(scripted(0.0, 0.0, 1)) as server:
        outcomes, client = asyncio.run(
            drive(
                target(server),
                [],
                planned([i * 0.02 for i in range(20)]),
                None,
                lambda done, total: time.sleep(0.1),
            )
        )
    assert client["event_loop_lag"]["max_ms"] > 80
    assert client["send_lateness"]["p99_ms"] > 80
    asked = {"num_warmups": 1, "num_repeated_prompts": 0, "prefix_share": 0.0}
    late = summarise(outcomes, {})
    assert any("client was late" in line for line in warnings(late, client, asked))
    # The delay is in what the user waited, not in what the server did.
    lateness_ms = client["send_lateness"]["mean_ms"]
    difference_ms = (
        late["ttft_from_scheduled_arrival"]["mean_ms"] - late["ttft_from_send"]["mean_ms"]
    )
    assert difference_ms == pytest.approx(lateness_ms, abs=0.01)


# --- the command ---------------------------------------------------------------------------------


def bench_serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "ridgeline"), "bench", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_the_command_prints_vllms_block_and_one_json_document() -> None:
    with serving(scripted(0.01, 0.01, 3)) as server:
        done = bench_serve(
            *("--base-url", server.url + "/v1/", "--model", "tiny", "--request-rate", "200"),
            *("--num-prompts", "30", "--num-warmups", "2", "--seed", "5", "--api-key", "secret"),
            *("--goodput", "ttft:5000", "--goodput", "tpot:0.001", "--ignore-eos"),
            *("--extra-body", '{"temperature": 0.5, "stream_options": null}'),
        )
    assert done.returncode == 0
    *block, last = done.stdout.splitlines()
    assert block[0] == "============ Serving Benchmark Result ============"
    assert f"{'Successful requests:':<40} 30" in [line.rstrip() for line in block]
    assert f"{'Total generated tokens:':<40} 90" in [line.rstrip() for line in block]
    assert "-----Time per Output Token (excl. 1st token)------" in block
    result = json.loads(last)
    assert (result["num_requests"], result["total_input_tokens"]) == (30, 210)
    assert result["goodput"]["num_within_all_limits"] == 0
    assert result["goodput"]["limits_ms"] == {"ttft_from_send": 5000, "tpot_excl_first": 0.001}
    assert (result["flags"]["seed"], result["asked"]["prompt_length_unit"]) == (5, "words")
    assert result["definitions"].keys() >= {"ttft_from_send", "tpot_excl_first", "e2e"}
    assert "secret" not in done.stdout + done.stderr
    assert "warning: the p99 of 30 requests" in done.stderr
    body = server.bodies[-1]
    assert (body["model"], body["stream"], body["ignore_eos"]) == ("tiny", True, True)
    assert (body["temperature"], body["max_tokens"]) == (0.5, 128)
    assert "stream_options" not in body
    assert server.headers[-1]["authorization"] == "Bearer secret"
    assert len(body["messages"][0]["content"].split()) == 128
    assert len(server.bodies) == 32


def test_nothing_served_is_status_1_and_still_a_document(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("only [one] prompt\n")
    with serving(lambda number, body: iter([(500, '{"error": "[red]broken"}')])) as server:
        done = bench_serve(
            *("--base-url", server.url, "--model", "m", "--max-concurrency", "2"),
            *("--num-prompts", "3", "--num-warmups", "0", "--prompts", str(prompts)),
        )
    assert done.returncode == 1
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["num_failed"], result["e2e"]) == (3, None)
    assert result["failures"][0]["error"] == "HTTP 500: [red]broken"
    assert "failed: 3 x HTTP 500: [red]broken" in done.stderr
    assert "warning: 2 prompts came before" in done.stderr
    assert "warning: there was no warm-up" in done.stderr
    assert server.bodies[0]["messages"][0]["content"] == "only [one] prompt"


def test_several_clients_send_one_plan_and_their_results_are_one(tmp_path: Path) -> None:
    table, picture = tmp_path / "run.csv", tmp_path / "run.svg"
    common = ("--model", "m", "--num-prompts", "13", "--turns", "2", "--clients", "3")
    with serving(scripted(0.05, 0.0, 2)) as server:
        common += ("--base-url", server.url)
        done = bench_serve(
            *common, "--max-concurrency", "4", "--num-warmups", "3", "--out", str(table)
        )
        assert server.peak <= 4
        assert len(server.bodies) == 16
        rated = bench_serve(*common, "--request-rate", "40", "--out", str(picture))
        few = bench_serve(*common, "--max-concurrency", "2")
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["num_requests"], found["num_successful"]) == (13, 13)
    assert found["client"]["num_clients"] == found["flags"]["clients"] == 3
    last = [len(body["messages"]) for body in server.bodies[3:16]]
    assert sorted(last) == [1] * 7 + [3] * 6  # each turn came behind its answer
    assert "num_requests,num_successful" in table.read_text()
    assert "ttft_from_send_p99_ms" in table.read_text()
    found = json.loads(rated.stdout.splitlines()[-1])
    assert found["num_successful"] == 13
    assert found["client"]["send_lateness"]["num"] <= 7  # of the client that was latest
    assert picture.read_text().count("<polyline") == 3
    assert "m: 13 requests" in picture.read_text()
    assert few.returncode == 1
    assert "--clients is 3, but --max-concurrency 2" in few.stderr


def test_nobody_there_is_one_line_from_several_clients_too() -> None:
    done = bench_serve(
        *("--base-url", "http://127.0.0.1:9", "--model", "m", "--request-rate", "5"),
        *("--clients", "2"),
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "does not serve the first requests" in done.stderr


def test_a_trace_of_our_own_sends_its_token_ids_and_chat_cannot(tmp_path: Path) -> None:
    path, failed = tmp_path / "own.jsonl", {"request_id": 1, "error": "broken"}
    request = {"type": "request", "request_id": 0, "arrival_s": 3.0, "error": None}
    request |= {"prompt_token_ids": [5, 6, 7], "num_generated": [4]}
    records = [{"type": "engine"}, request, request | failed]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    flags = ("--model", "m", "--trace-file", str(path), "--num-warmups", "0")
    with serving(scripted(0.0, 0.0, 2)) as server:
        done = bench_serve("--base-url", server.url, *flags, "--endpoint", "completions")
        chat = bench_serve("--base-url", server.url, *flags)
    assert [body["prompt"] for body in server.bodies] == [[5, 6, 7]]
    assert server.bodies[0]["max_tokens"] == 4
    assert json.loads(done.stdout.splitlines()[-1])["asked"]["num_left_out_of_trace"] == 1
    assert "warning: 1 requests of the trace had no answer there" in done.stderr
    assert (chat.returncode, chat.stdout) == (1, "")
    assert "--endpoint completions" in chat.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--model", "m"], 2, "base-url"),
        (["--base-url", "http://127.0.0.1:9", "--model", "m"], 2, "say how requests arrive"),
        (["--base-url", "127.0.0.1:9", "--model", "m", "--request-rate", "1"], 2, "--base-url"),
        (
            ["--base-url", "http://127.0.0.1:9", "--model", "m", "--request-rate", "1"],
            1,
            "http://127.0.0.1:9/v1/chat/completions does not serve",
        ),
        (
            ["--base-url", "http://127.0.0.1:9", "--model", "m", "--trace-file", "/no/trace"],
            1,
            "/no/trace",
        ),
    ],
)
def test_errors_are_short(arguments: list[str], status: int, words: str) -> None:
    done = bench_serve(*arguments)
    assert done.returncode == status
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout
