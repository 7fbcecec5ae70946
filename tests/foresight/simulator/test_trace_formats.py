"""Traces in every known format: what is read, and how holes and wrong values are named."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ridgeline.foresight.simulator.workload import LoadTrace, Traced, parse_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def mooncake(**fields: Any) -> str:
    row = {"timestamp": 1500, "input_length": 600, "output_length": 9, "hash_ids": [3, 4]}
    return json.dumps({k: v for k, v in (row | fields).items() if v is not None}) + "\n"


def own(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in ({"type": "engine"}, *records))


def request(number: int = 0, **fields: Any) -> dict[str, Any]:
    record = {"type": "request", "request_id": number, "arrival_s": 4.0 + number, "error": None}
    return record | {"prompt_token_ids": [5, 6], "num_generated": [7]} | fields


def test_azures_times_are_date_times_or_seconds() -> None:
    dates = (
        "2023-11-16 23:59:59.9799600,4808,10\n"
        "2024-05-10 00:00:00.009930+00:00,34,12\r\n"
        "2023-11-17 00:00:00.4799600,110,27\n"
    )
    rows = parse_trace(AZURE + dates, "t").requests
    assert [r.num_prompt_tokens for r in rows] == [4808, 110, 34]
    assert rows[1].arrival_s - rows[0].arrival_s == pytest.approx(0.5)
    assert parse_trace(AZURE + "7.5,4808,10\n", "t").requests == (Traced(7.5, 4808, 10),)


def test_bursts_rows_without_an_answer_are_counted_and_left_out() -> None:
    text = BURST + "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,3,0,3,API log\n"
    assert parse_trace(text + "45.5,GPT-4,9,2.0,11,API log\n", "b") == LoadTrace(
        (Traced(5.0, 472, 18), Traced(45.5, 9, 2)), 1
    )


def test_mooncakes_milliseconds_and_blocks() -> None:
    text = mooncake() + "\n" + mooncake(timestamp=0, input_length=512, hash_ids=[0])
    assert parse_trace(text, "m") == LoadTrace(
        (Traced(0.0, 512, 9, hash_ids=(0,)), Traced(1.5, 600, 9, hash_ids=(3, 4)))
    )


def test_our_own_traces_give_each_answer_its_request() -> None:
    text = own(
        {"type": "step", "number": 0, "arrived": [0, 1, 2, 3]},
        request(1, num_generated=[4, 6]),
        request(0),
        request(2, error="it broke"),
    )
    tokens = {"token_ids": (5, 6)}
    assert parse_trace(text + '{"type": "st', "o") == LoadTrace(
        (Traced(4.0, 2, 7, **tokens), Traced(5.0, 2, 4, **tokens), Traced(5.0, 2, 6, **tokens)),
        num_left_out=2,  # one failed, one had not ended
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "",
            "t, line 1: .*TIMESTAMP,ContextTokens.*BurstGPT.*Mooncake.*serve --trace",
        ),
        ("when,in,out\n1,2,3\n", "t, line 1: not a known trace"),
        (AZURE, "t: the trace has no requests"),
        (AZURE + "1,2,3\nyesterday,2,3\n", "t, line 3: TIMESTAMP is 'yesterday'; expected seconds"),
        (AZURE + "1,2\n", "t, line 2: GeneratedTokens is missing; expected a whole number"),
        (AZURE + "1,,3\n", "t, line 2: ContextTokens is missing"),
        (
            AZURE + "1,0,3\n",
            "t, line 2: ContextTokens is '0'; expected a whole number of at least 1",
        ),
        (AZURE + "1,2,3.5\n", "t, line 2: GeneratedTokens is '3.5'"),
        (AZURE + "1,nan,3\n", "t, line 2: ContextTokens is 'nan'"),
        (AZURE + "nan,1,3\n", "t, line 2: TIMESTAMP is 'nan'"),
        (BURST + "1,GPT-4,0,3,3,x\n", "t, line 2: Request tokens is '0'"),
        (BURST + "1,GPT-4,4,-1,3,x\n", "t, line 2: Response tokens is '-1'; .* at least 0"),
        (BURST + "1,GPT-4,4,0,4,x\n", "t: the trace has no requests that were answered"),
        (mooncake() + "{broken\n", "t, line 2: not a JSON object"),
        (mooncake() + "[1]\n", "t, line 2: not a JSON object"),
        (mooncake(output_length=None), "t, line 1: output_length is missing"),
        (mooncake(timestamp="2023-01-01"), "t, line 1: timestamp is .*expected milliseconds"),
        (mooncake(timestamp=True), "t, line 1: timestamp is True"),
        (mooncake(hash_ids=[1]), r"t, line 1: hash_ids is \[1\]; expected 2 whole numbers"),
        (mooncake(hash_ids=[1, 2, 3]), "t, line 1: hash_ids is"),
        (mooncake(hash_ids=["1", 2]), "t, line 1: hash_ids is"),
        (mooncake(input_length=True), "t, line 1: input_length is True"),
        (own(request(prompt_token_ids=None)), "t, line 2: prompt_token_ids is missing"),
        (own(request(prompt_token_ids=[])), "t, line 2: prompt_token_ids is .*at least one"),
        (own(request(arrival_s=None)), "t, line 2: arrival_s is missing"),
        (own(request()) + "{broken\n", "t, line 3: not a JSON object"),
    ],
)
def test_what_is_wrong_is_named_by_file_line_and_field(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        parse_trace(text, "t")
    assert not re.search("\n", str(caught.value))
