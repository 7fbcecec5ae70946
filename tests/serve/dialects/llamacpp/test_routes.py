"""llama.cpp's own routes, and LM Studio's list, hold what the others say."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ridgeline import SamplingParams
from ridgeline.serve.answer.samplers import _IN_ORDER, NAMES
from ridgeline.serve.dialects.llamacpp.routes import sampler_list
from ridgeline.serve.http.options import ServeOptions
from tests.engine.test_llm import HELLO
from tests.serve.serving import Served, serving

ASK: dict[str, Any] = {"prompt": "hello", "n_predict": 8, "temperature": 0, "ignore_eos": True}
SAME: dict[str, Any] = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}

BEYOND = {"minimum": -1, "exclusiveMinimum": 0, "maximum": 1}


@pytest.fixture(scope="module")
def narrow(model: Path) -> Iterator[Served]:
    """A server that computes few tokens of a prompt in a step."""
    with serving(model, {"max_num_batched_tokens": 16}) as served:
        yield served


def test_a_completion_is_the_one_of_the_other_route(served: Served) -> None:
    expected = served.call("/v1/completions", SAME)[1]["choices"][0]["text"]
    status, answer, _ = served.call("/completion", ASK)
    assert (status, answer["content"]) == (200, expected)
    assert (answer["stop"], answer["stop_type"], answer["tokens_predicted"]) == (True, "limit", 8)
    lines = served.call("/completion", ASK | {"stream": True})[1].decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line]
    assert "".join(event["content"] for event in events) == expected
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    ids = served.call("/tokenize", {"prompt": "hello"})[1]["tokens"]
    assert served.call("/completion", ASK | {"prompt": ids})[1]["content"] == expected


def test_a_completion_has_no_end_unless_it_is_told(served: Served) -> None:
    body = {"prompt": "hello", "ignore_eos": True}
    answer = served.call("/completion", body)[1]
    assert answer["tokens_evaluated"] + answer["tokens_predicted"] == 128
    _, answer, headers = served.call("/completion", body | {"n_predict": 32000})
    assert headers["x-ridgeline-capped"].startswith("n_predict 32000 -> ")


def test_several_prompts_get_a_list_of_answers(served: Served) -> None:
    ids = served.call("/tokenize", {"prompt": "hello"})[1]["tokens"]
    alone = [served.call("/completion", ASK | {"prompt": one})[1] for one in ("hello", "The cat")]
    prompts = [ids, "The cat", {"prompt_string": "hello"}]
    answers = served.call("/completion", ASK | {"prompt": prompts})[1]
    expected = [alone[0], alone[1], alone[0]]
    for name in ("content", "prompt", "tokens_evaluated", "tokens_predicted", "stop_type"):
        assert [one[name] for one in answers] == [one[name] for one in expected]
    assert [one["index"] for one in answers] == [0, 1, 2]
    assert all(one["timings"]["predicted_n"] == 8 for one in answers)
    (one,) = served.call("/completion", ASK | {"prompt": ["hello"]})[1]
    assert one["content"] == alone[0]["content"], "a list of one has a list of one"
    lines = served.call("/completion", ASK | {"prompt": prompts, "stream": True})[1].decode()
    events = [json.loads(line[6:]) for line in lines.splitlines() if line]
    for index, whole in enumerate(answers):
        mine = [event for event in events if event["index"] == index]
        assert "".join(event["content"] for event in mine) == whole["content"]
        assert [event["stop"] for event in mine] == [False] * (len(mine) - 1) + [True]


def test_a_prompt_may_mix_ids_and_texts(served: Served) -> None:
    pieces = [
        served.call("/tokenize", {"prompt": text, "add_special_tokens": special})[1]["tokens"]
        for text, special in (("hello", True), (" The cat", False))
    ]
    whole = [*pieces[0], 5, *pieces[1], 6]
    expected = served.call("/completion", ASK | {"prompt": whole})[1]
    mixed = served.call("/completion", ASK | {"prompt": ["hello", 5, " The cat", 6]})[1]
    assert (mixed["prompt"], mixed["content"]) == (expected["prompt"], expected["content"])
    assert mixed["tokens_evaluated"] == len(whole)


def test_a_bias_of_a_text_is_one_of_its_tokens(served: Served) -> None:
    text = served.call("/completion", ASK)[1]["content"]
    ids = served.call("/tokenize", {"content": text})[1]["tokens"]
    expected = served.call("/completion", ASK | {"logit_bias": [[one, -100] for one in ids]})[1]
    assert expected["content"] != text
    for biases in ([[text, -100]], [[text, False]], {text: -100}):
        answer = served.call("/completion", ASK | {"logit_bias": biases})[1]
        assert answer["content"] == expected["content"]
    settings = expected["generation_settings"]["logit_bias"]
    assert settings == {str(one): -100 for one in ids}


def test_completions_without_v1_are_of_whom_they_look_like(served: Served) -> None:
    expected = served.call("/completion", ASK)[1]["content"]
    assert served.call("/completions", ASK)[1]["content"] == expected
    answer = served.call("/completions", SAME | {"model": "tiny"})[1]
    assert answer["choices"][0]["text"] == expected


def test_a_prompt_that_is_too_long_is_told_in_numbers(served: Served) -> None:
    long = {"messages": [{"role": "user", "content": "a " * 200}]}
    counted = served.call("/v1/chat/completions/input_tokens", long)[1]["input_tokens"]
    for stream in (False, True):
        status, answer, _ = served.call("/chat/completions", long | {"stream": stream})
        assert status == 400
        assert (
            answer["error"].items()
            >= {
                "type": "exceed_context_size_error",
                "code": "context_length_exceeded",
                "n_prompt_tokens": counted,
                "n_ctx": 128,
            }.items()
        )


def test_times_come_with_each_piece_if_they_are_asked_for(served: Served) -> None:
    asked = {"messages": HELLO, "max_tokens": 4, "ignore_eos": True, "timings_per_token": True}
    lines = served.call("/v1/chat/completions", asked | {"stream": True})[1].decode().splitlines()
    first, *chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "timings" not in first
    counts = [chunk["timings"]["predicted_n"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    last = chunks[-1]["timings"]
    assert last["prompt_n"] + last["cache_n"] == chunks[-1]["usage"]["prompt_tokens"]
    assert last["predicted_per_second"] > 0
    assert served.call("/v1/chat/completions", asked)[1]["timings"]["predicted_n"] == 4
    lines = served.call("/completion", ASK | asked | {"stream": True})[1].decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line]
    assert all(event["timings"]["predicted_n"] for event in events)


SAID = " ".join(["one two three four five six seven eight"] * 2)
WITH_PROGRESS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": SAID}], "max_tokens": 3},
    "/v1/completions": {"prompt": SAID, "max_tokens": 3},
    "/completion": {"prompt": SAID, "n_predict": 3},
    "/v1/responses": {"input": SAID, "max_output_tokens": 3},
}


def streamed(served: Served, path: str, **more: Any) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    status, answer, _ = served.call(path, WITH_PROGRESS[path] | {"stream": True} | more)
    assert status == 200, answer
    text = answer.decode()
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line[6:]) for line in lines]


@pytest.mark.parametrize("path", WITH_PROGRESS)
def test_a_stream_tells_how_far_its_prompt_is(narrow: Served, path: str) -> None:
    events = streamed(narrow, path, return_progress=True, cache_salt=path)
    told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    firsts = events[2:] if path == "/v1/responses" else events  # behind "created", "in_progress"
    assert all("prompt_progress" in event for event in firsts[: len(told)]), "before the answer"
    (total,) = {one["total"] for one in told}
    far = [one["processed"] for one in told]
    assert (far[0], far[-1]) == (0, total)
    assert all(0 < after - before <= 16 for before, after in pairwise(far))
    assert {one["cache"] for one in told} == {0}
    assert [one["time_ms"] > 0 for one in told] == [False] + [True] * (len(told) - 1)
    if path == "/v1/responses":
        assert {event["type"] for event in firsts[: len(told)]} == {"response.in_progress"}
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
    again = streamed(narrow, path, return_progress=True, cache_salt=path)
    first, *_, last = [one["prompt_progress"] for one in again if "prompt_progress" in one]
    assert first["processed"] == first["cache"] > 0
    assert last["processed"] == last["total"] == total
    plain = streamed(narrow, path, cache_salt=path)
    assert not any("prompt_progress" in event for event in plain)


def test_several_prompts_tell_each_how_far_they_are(narrow: Served) -> None:
    asked = {"prompt": [SAID, "short"], "cache_salt": "each", "return_progress": True}
    for path in ("/v1/completions", "/completion"):
        events = streamed(narrow, path, **asked | {"cache_salt": path + "each"})
        ends = dict[int, dict[str, Any]]()
        for event in events:
            if progress := event.get("prompt_progress"):
                ends[event.get("choices", [event])[0]["index"]] = progress
        assert ends.keys() == {0, 1}
        assert all(one["processed"] == one["total"] for one in ends.values())
        assert ends[0]["total"] > ends[1]["total"]


def test_responses_have_times_with_each_piece_if_they_are_asked_for(served: Served) -> None:
    path = "/v1/responses"
    events = streamed(served, path, timings_per_token=True)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [one["timings"]["predicted_n"] for one in deltas]
    assert events[-1]["timings"]["predicted_n"] == 3
    assert not any("timings" in event for event in streamed(served, path))


def test_a_slot_says_whether_it_works(served: Served) -> None:
    num_slots = served.llm.config.max_num_seqs
    idle = served.call("/slots")[1]
    assert [one["id"] for one in idle] == [*range(num_slots)]
    assert not any(one["is_processing"] for one in idle)
    assert {one["n_ctx"] for one in idle} == {128}


def test_the_prompt_is_shown_to_who_asks_for_it(served: Served) -> None:
    asked = {"messages": HELLO, "max_tokens": 2}
    text = served.call("/apply-template", {"messages": HELLO})[1]["prompt"]
    shown = served.call("/v1/chat/completions", asked | {"verbose": True})[1]
    assert shown["__verbose"]["prompt"].endswith(text)
    assert "__verbose" not in served.call("/v1/chat/completions", asked | {"verbose": False})[1]


def test_a_completion_says_how_it_came_about(served: Served) -> None:
    asked = ASK | {"return_tokens": True, "top_k": 7}
    answer = served.call("/completion", asked)[1]
    same = served.call("/v1/completions", SAME | {"top_k": 7, "return_token_ids": True})[1]
    (choice,) = same["choices"]
    assert answer["tokens"] == choice["token_ids"]
    assert served.call("/completion", ASK)[1]["tokens"] == []
    settings = answer["generation_settings"]
    assert (settings["n_predict"], settings["top_k"], settings["temperature"]) == (8, 7, 0)
    assert "prompt" not in settings
    assert answer["prompt"].endswith("hello")
    assert answer["tokens_cached"] == answer["tokens_evaluated"] + answer["tokens_predicted"]
    assert answer["has_new_line"] == ("\n" in answer["content"])
    lines = served.call("/completion", asked | {"stream": True})[1].decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line]
    plain = served.call("/completion", ASK | {"stream": True})[1].decode().splitlines()
    assert [json.loads(line[6:])["tokens"] for line in plain if line] == [
        event["tokens"] for event in events
    ]  # a stream has them always
    assert [one for event in events for one in event["tokens"]] == choice["token_ids"]
    assert events[-1]["has_new_line"] == answer["has_new_line"]
    some = served.call("/completion", asked | {"response_fields": ["generation_settings/top_k"]})[1]
    assert some == {"generation_settings/top_k": 7}


def test_the_likeliest_tokens_are_those_of_logprobs(served: Served) -> None:
    asked = ASK | {"n_probs": 4, "return_tokens": True}
    answer = served.call("/completion", asked)[1]
    same = served.call("/v1/completions", SAME | {"logprobs": 4})[1]["choices"][0]["logprobs"]
    shown = answer["completion_probabilities"]
    assert [one["id"] for one in shown] == answer["tokens"]
    assert [one["logprob"] for one in shown] == same["token_logprobs"]
    for one in shown:
        ranked = [other["logprob"] for other in one["top_logprobs"]]
        assert len(ranked) == 4
        assert ranked == sorted(ranked, reverse=True)
        assert one["logprob"] == ranked[0]  # greedy
        assert bytes(one["bytes"]).decode(errors="replace") == one["token"]
    lines = served.call("/completion", asked | {"stream": True})[1].decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line]
    assert [one for e in events for one in e.get("completion_probabilities", ())] == shown
    assert "completion_probabilities" not in served.call("/completion", ASK)[1]


def test_the_chances_of_the_draw_are_shown_on_request(served: Served) -> None:
    """What temperature and filters leave, by the plain logprobs that the same request has."""
    ask = ASK | {"n_probs": 20, "temperature": 0.5, "top_k": 3, "seed": 5, "ignore_eos": True}
    plain = served.call("/completion", ask)[1]
    answer = served.call("/completion", ask | {"post_sampling_probs": True})[1]
    assert answer["content"] == plain["content"]
    for one, other in zip(
        answer["completion_probabilities"], plain["completion_probabilities"], strict=True
    ):
        best = {two["id"]: math.exp(two["logprob"] / 0.5) for two in other["top_logprobs"][:3]}
        found = {two["id"]: two["prob"] for two in one["top_probs"]}
        expected = {token: weight / sum(best.values()) for token, weight in best.items()}
        assert found == pytest.approx(expected, abs=1e-6)
        assert list(found.values()) == sorted(found.values(), reverse=True)
        assert (one["id"], one["prob"]) == (other["id"], found[other["id"]])
    greedy = served.call("/completion", ask | {"post_sampling_probs": True, "temperature": 0})[1]
    for one in greedy["completion_probabilities"]:
        assert (one["prob"], len(one["top_probs"])) == (1.0, 1)


def test_a_flag_says_how_requests_are_sampled_that_leave_it_open(model: Path) -> None:
    wanted = {"top_k": 2, "temperature": 100}
    with serving(model, override_generation_config=json.dumps(wanted)) as served:
        shown = served.call("/props")[1]["default_generation_settings"]["params"]
        assert wanted.items() <= shown.items()
        ask = {"prompt": "hello", "n_predict": 4, "n_probs": 20, "post_sampling_probs": True}
        sizes = [
            len(one["top_probs"])
            for one in served.call("/completion", ask)[1]["completion_probabilities"]
        ]
        assert sizes == [2] * len(sizes)
        greedy = served.call("/completion", ask | {"temperature": 0})[1]
        assert all(len(one["top_probs"]) == 1 for one in greedy["completion_probabilities"])


@pytest.mark.parametrize(
    ("value", "problem"),
    [("x", "Expecting value"), ("[1]", "JSON object"), ('{"n": 2}', "some of temperature"),
     ('{"top_p": 2}', "top_p is 2")],
)  # fmt: skip
def test_a_flag_of_sampling_is_checked_before_anything_is_loaded(value: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^--override-generation-config: .*{problem}"):
        ServeOptions(override_generation_config=value)


def test_a_prompt_may_stand_in_an_object(served: Served) -> None:
    expected = served.call("/completion", ASK)[1]["content"]
    prompt: dict[str, Any] = {"prompt_string": "hello"}
    assert served.call("/completion", ASK | {"prompt": prompt})[1]["content"] == expected


def test_biases_may_be_pairs(served: Served) -> None:
    first = served.call("/completion", ASK | {"return_tokens": True})[1]["tokens"][0]
    answers = [
        served.call("/completion", ASK | {"logit_bias": biases, "return_tokens": True})[1]
        for biases in ([[first, False]], [[first, -100]], {str(first): -100})
    ]
    assert first not in answers[0]["tokens"]
    assert len({answer["content"] for answer in answers}) == 1


def test_openai_routes_are_there_without_v1(served: Served) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "temperature": 0}
    answers = [served.call(f"{v1}/chat/completions", body)[1] for v1 in ("", "/v1")]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert [one["id"] for one in served.call("/models")[1]["data"]] == ["tiny"]
    asked = {"input": "a", "max_output_tokens": 2}
    assert served.call("/responses", asked)[1]["object"] == "response"
    counted = served.call("/chat/completions/input_tokens", body)[1]["input_tokens"]
    assert counted == answers[0]["usage"]["prompt_tokens"]


def test_a_template_can_be_applied_alone(served: Served) -> None:
    body = {"messages": HELLO}
    text = served.call("/apply-template", body)[1]["prompt"]
    ids = served.call("/tokenize", body)[1]["tokens"]
    assert served.call("/detokenize", {"tokens": ids})[1]["content"].endswith(text)


def test_a_text_is_tokenised_as_content(served: Served) -> None:
    with_bos = served.call("/tokenize", {"prompt": "The cat"})[1]["tokens"]
    plain = served.call("/tokenize", {"prompt": "The cat", "add_special_tokens": False})[1]
    assert served.call("/tokenize", {"content": "The cat"})[1]["tokens"] == plain["tokens"]
    special = served.call("/tokenize", {"content": "The cat", "add_special": True})[1]
    assert special["tokens"] == with_bos
    pieces = served.call("/tokenize", {"content": "The cat", "with_pieces": True})[1]["tokens"]
    assert [one["id"] for one in pieces] == plain["tokens"]
    assert "".join(one["piece"] for one in pieces) == "The cat"
    assert served.call("/tokenize", {"content": ""})[1]["tokens"] == []


def test_special_tokens_in_a_text_may_be_text(served: Served) -> None:
    """A client that builds prompts of ids from foreign text must not let that text speak."""
    end = 0
    special = served.llm.text.spell(end)

    def ids(text: str, **more: Any) -> list[int]:
        found: list[int] = served.call("/tokenize", {"content": text, **more})[1]["tokens"]
        return found

    assert ids(special) == ids(special, parse_special=True) == [end]
    for text in (special, f"a{special}", f"{special}b"):
        plain = ids(text, parse_special=False)
        assert end not in plain
        assert served.call("/detokenize", {"tokens": plain})[1]["content"] == text


@pytest.mark.parametrize("text", ["歪", "🤷", "é", "a\N{SNOWMAN}b", "plain"])
def test_pieces_that_are_no_text_are_bytes(served: Served, text: str) -> None:
    tokens = served.call("/tokenize", {"content": text, "with_pieces": True})[1]["tokens"]
    pieces = [one["piece"] for one in tokens]
    raw = [bytes(one) if isinstance(one, list) else one.encode() for one in pieces]
    assert b"".join(raw) == text.encode()
    assert any(isinstance(one, list) for one in pieces) == (text != "plain")


def test_what_the_server_is(served: Served, model: Path) -> None:
    props = served.call("/props")[1]
    assert props["default_generation_settings"]["n_ctx"] == 128
    assert props["total_slots"] == served.llm.config.max_num_seqs
    assert props["model_alias"] == "tiny"
    assert props["model_path"] == model.name, "and no path"
    [one] = served.call("/api/v0/models")[1]["data"]
    assert (one["id"], one["type"], one["state"]) == ("tiny", "llm", "loaded")
    assert one["loaded_context_length"] == 128


def test_the_fields_of_samplers_are_told_with_defaults_bounds_and_words(served: Served) -> None:
    props = served.call("/props")[1]
    told = {one["name"]: one for one in props["sampling_fields"]}
    acting = {field for values in _IN_ORDER.values() for field in values} - {"repeat_penalty"}
    assert told.keys() >= acting | set(NAMES) - {"allowed_token_ids"}
    assert all(one["description"] for one in told.values())
    assert told["xtc_threshold"]["default"] == SamplingParams().xtc_threshold
    assert told["temperature"].items() >= {"type": "number", "minimum": 0, "maximum": 2}.items()
    assert (told["stop"]["type"], told["max_tokens"]["default"]) == ("array", None)
    given = {name: one["default"] for name, one in told.items() if one["default"] is not None}
    assert props["default_generation_settings"]["params"] == (
        given | {"n_predict": -1, "seed": served.llm.config.seed}
    )
    same = {"messages": HELLO, "seed": 3, "max_tokens": 8}
    answers = [served.call("/v1/chat/completions", body)[1] for body in (same, given | same)]
    assert answers[0]["choices"] == answers[1]["choices"], "what is told is what is done"
    for name, one in told.items():
        for value in [one[bound] + step for bound, step in BEYOND.items() if bound in one]:
            refused = served.refused("/v1/chat/completions", same | {name: value})
            assert (refused[0], refused[1]["param"]) == (400, name)


def test_what_a_model_recommends_is_its_default() -> None:
    told = {one["name"]: one["default"] for one in sampler_list({"temperature": 0.2, "top_k": 9})}
    assert (told["temperature"], told["top_k"], told["top_p"]) == (0.2, 9, 1.0)


def test_two_thousand_texts_fit_into_a_request(served: Served) -> None:
    status, answer, _ = served.call("/v1/embeddings", {"input": ["a"] * 2048})
    assert (status, len(answer["data"])) == (200, 2048)
