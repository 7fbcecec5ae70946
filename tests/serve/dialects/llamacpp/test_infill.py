"""What stands in the middle, through the server: llama.cpp's /infill, and OpenAI's suffix."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.serve.dialects.llamacpp.infill import Infilled
from tests.serve.serving import Served, check_shape, serving
from tests.text.test_infill import QWEN, with_tokens

INFILL, COMPLETE = "/infill", "/v1/completions"
ASK: dict[str, Any] = {
    "input_prefix": "def main(args):\n    return ",
    "input_suffix": "\n\nmain()",
    "temperature": 0,
    "n_predict": 12,
}
PROMPT = "<|fim_prefix|>def main(args):\n    return <|fim_suffix|>\n\nmain()<|fim_middle|>"
MODEL_LEN = 128
TOKENIZER = with_tokens(*QWEN)


@pytest.fixture(scope="module")
def server(coder_path: Path) -> Iterator[Served]:
    with serving(coder_path, {"max_model_len": MODEL_LEN}) as served:
        yield served


@pytest.fixture
def coder(server: Served) -> Iterator[Served]:
    yield server
    server.assert_idle()


def continued(served: Served, prompt: str, max_tokens: int = 12) -> dict[str, Any]:
    """The choice that continues a prompt whose control tokens are spelled out."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": max_tokens}
    body["stop_token_ids"] = list(range(403, 409))
    choice: dict[str, Any] = served.call(COMPLETE, body)[1]["choices"][0]
    return choice


def events_of(served: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    status, data, headers = served.call(INFILL, body | {"stream": True})
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    frames = data.decode().split("\n\n")
    assert frames.pop() == ""
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


# --- /infill -----------------------------------------------------------------------------------


def test_the_answer_continues_prefix_suffix_middle(coder: Served) -> None:
    status, answer, _ = coder.call(INFILL, ASK)
    assert status == 200
    check_shape(Infilled, answer)
    asked_for = {"completion_probabilities", "receipt"}
    assert answer.keys() == Infilled.__annotations__.keys() - asked_for
    expected = continued(coder, PROMPT)
    assert answer["content"] == expected["text"]
    assert answer["stop_type"] == "limit"
    assert answer["tokens_predicted"] == 12
    assert answer["tokens_evaluated"] == len(TOKENIZER.encode(PROMPT))
    assert not answer["truncated"]
    assert answer["timings"]["predicted_n"] == 12
    prompt_n = answer["tokens_evaluated"] - answer["timings"]["cache_n"]
    assert answer["timings"]["prompt_n"] == prompt_n


def test_a_stream_adds_up(coder: Served) -> None:
    whole = coder.call(INFILL, ASK)[1]
    *pieces, last = events_of(coder, ASK)
    assert len(pieces) > 2
    assert not any(piece["stop"] for piece in pieces)
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    check_shape(Infilled, last)
    assert last["content"] == ""
    times = {"timings": whole["timings"], "content": whole["content"]}
    assert last | times == whole
    assert last["timings"]["predicted_n"] == 12


def test_the_prompt_ends_the_prefix_and_files_come_before(coder: Served) -> None:
    split = ASK | {"input_prefix": "def main(args):\n", "prompt": "    return "}
    assert coder.call(INFILL, split)[1]["content"] == continued(coder, PROMPT)["text"]
    files = [{"filename": "a.py", "text": "A = 1"}, {"text": "B = 2", "time": 17}]
    status, answer, headers = coder.call(INFILL, ASK | {"input_extra": files})
    assert status == 200
    spelled = "<|repo_name|>project\n<|file_sep|>a.py\nA = 1\n<|file_sep|>tmp\nB = 2\n"
    expected = f"{spelled}<|file_sep|>current\n{PROMPT}"
    assert answer["tokens_evaluated"] == len(TOKENIZER.encode(expected))
    assert answer["content"] == continued(coder, expected)["text"]
    assert headers["x-ridgeline-ignored"] == "input_extra.time"


@pytest.mark.parametrize(
    ("fields", "kind", "word"),
    [
        ({"logit_bias": {"408": 100}}, "eos", ""),
        ({"logit_bias": {"406": 100}}, "eos", ""),
        ({"logit_bias": {"0": 100}}, "eos", ""),
        ({"logit_bias": {"403": 100}, "ignore_eos": True}, "limit", ""),
        ({"grammar": 'root ::= "abc" [a-z]*', "stop": ["b"]}, "word", "b"),
        ({}, "limit", ""),
    ],
    ids=str,
)
def test_how_it_ends(coder: Served, fields: dict[str, Any], kind: str, word: str) -> None:
    answer = coder.call(INFILL, ASK | fields)[1]
    assert (answer["stop_type"], answer["stopping_word"]) == (kind, word)
    assert events_of(coder, ASK | fields)[-1]["stop_type"] == kind


def test_lengths(coder: Served) -> None:
    nothing = coder.call(INFILL, ASK | {"n_predict": 0})[1]
    assert (nothing["content"], nothing["tokens_predicted"]) == ("", 0)
    assert events_of(coder, ASK | {"n_predict": 0})[-1]["stop_type"] == "limit"
    for all_of_it in ({"n_predict": -1}, {"n_predict": None}):
        answer = coder.call(INFILL, ASK | all_of_it | {"ignore_eos": True})[1]
        assert answer["tokens_evaluated"] + answer["tokens_predicted"] == MODEL_LEN


@pytest.mark.parametrize("asked", [MODEL_LEN - 3, 32000])
def test_an_answer_that_may_have_more_than_all_leaves_the_prompt_its_place(
    coder: Served, asked: int
) -> None:
    _, answer, headers = coder.call(INFILL, ASK | {"n_predict": asked, "ignore_eos": True})
    assert answer["tokens_evaluated"] + answer["tokens_predicted"] == MODEL_LEN
    room = MODEL_LEN - answer["tokens_evaluated"]
    assert headers["x-ridgeline-capped"] == f"n_predict {asked} -> {room}"


def test_what_is_too_long_is_cut_around_the_cursor(coder: Served) -> None:
    long = {"input_prefix": "abc " * 5000 + ASK["input_prefix"]}
    for texts in (long, {"input_suffix": "\n\nmain()" * 5000}, {"prompt": "x = 1; " * 500}):
        answer = coder.call(INFILL, ASK | texts)[1]
        assert answer["truncated"]
        assert answer["tokens_evaluated"] == MODEL_LEN - 12
    before = TOKENIZER.encode(long["input_prefix"])
    after = TOKENIZER.encode(ASK["input_suffix"])
    kept = before[-(MODEL_LEN - 12 - 3 - len(after)) :]
    prompt = [403, *kept, 404, *after, 405]
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 12}
    expected = coder.call(COMPLETE, body)[1]["choices"][0]["text"]
    assert coder.call(INFILL, ASK | long)[1]["content"] == expected
    files = [{"text": "abc " * 5000}, {"text": "B = 2"}]
    answer = coder.call(INFILL, ASK | {"input_extra": files})[1]
    last = coder.call(INFILL, ASK | {"input_extra": files[1:]})[1]
    assert (answer["truncated"], last["truncated"]) == (True, False)
    same = ("content", "tokens_evaluated")
    assert [answer[name] for name in same] == [last[name] for name in same]
    answer = coder.call(INFILL, ASK | long | {"n_predict": -1, "ignore_eos": True})[1]
    assert answer["tokens_predicted"] == MODEL_LEN // 4  # room is kept for an answer


def test_sampling_is_that_of_completions(coder: Served) -> None:
    sampled = {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 5}
    answer = coder.call(INFILL, ASK | sampled)[1]
    body = {"prompt": PROMPT, "max_tokens": 12, **sampled}
    assert coder.call(COMPLETE, body)[1]["choices"][0]["text"] == answer["content"]
    assert coder.call(INFILL, ASK | sampled)[1]["content"] == answer["content"]
    fresh = ASK | sampled | {"seed": -1}
    assert len({coder.call(INFILL, fresh)[1]["content"] for _ in range(4)}) > 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": None}, "input_suffix"),
        ({"input_prefix": [1]}, "input_prefix"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ({"input_extra": "a"}, "input_extra"),
        ({"n_predict": -2}, "n_predict"),
        ({"n_predict": 1 << 63}, "n_predict"),
        ({"prompt": 5}, "prompt"),
        ({"samplers": ["infill"], "top_k": 0}, "samplers"),
        ({"samplers": ["top_k", "infill"], "top_k": 257}, "samplers"),
        ({"samplers": ["infill", "top_k"], "top_k": 40}, "samplers"),
        ({"samplers": ["top_p", "top_k"]}, "samplers"),
        ({"samplers": ["mirostat"]}, "samplers"),
        ({"samplers": "edskypmxt"}, "samplers"),
        ({"t_max_predict_ms": -1}, "t_max_predict_ms"),
        ({"n_indent": -1}, "n_indent"),
        ({"n_indent": 2.0}, "n_indent"),
        ({"response_fields": "content"}, "response_fields"),
        ({"mirostat": 1}, "mirostat"),
        ({"n": 2}, "n"),
        ({"logprobs": 2}, "logprobs"),
        ({"top_k": -2}, "top_k"),
        ({"model": "other"}, "model"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(coder: Served, fields: dict[str, Any], param: str) -> None:
    coder.refused_for(param, INFILL, ASK | fields)


def test_the_answer_ends_with_the_block_of_the_cursor(coder: Served) -> None:
    body = ASK | {"grammar": 'root ::= "x\\n  y\\n z\\n" [a-z]+', "n_predict": 40}
    assert coder.call(INFILL, body)[1]["content"].startswith("x\n  y\n z\n")
    answer = coder.call(INFILL, body | {"n_indent": 2})[1]
    assert (answer["content"], answer["stop_type"]) == ("x\n  y\n ", "limit")
    assert answer["stopping_word"] == ""
    *pieces, last = events_of(coder, body | {"n_indent": 2})
    assert "".join(piece["content"] for piece in pieces) == answer["content"]
    assert last["stop_type"] == "limit"


def test_the_answer_ends_with_the_first_line_that_is_late(coder: Served) -> None:
    body = ASK | {"grammar": 'root ::= "x\\ny\\nz\\n" [a-z]+', "n_predict": 40}
    whole = coder.call(INFILL, body | {"t_max_predict_ms": 1e9})[1]
    assert whole["content"].startswith("x\ny\nz\n")
    late = coder.call(INFILL, body | {"t_max_predict_ms": 1e-6})[1]
    assert (late["content"], late["stop_type"]) == ("x\n", "limit")
    assert coder.call(INFILL, ASK | {"t_max_predict_ms": 0})[0] == 200


def test_samplers_that_are_not_named_are_off(coder: Served) -> None:
    on = {"temperature": 1.5, "top_k": 3, "top_p": 0.5, "min_p": 0.2, "seed": 5}
    on |= {"xtc_probability": 1.0, "dry_multiplier": 0.8, "repetition_penalty": 1.3}
    for names, left in ((["temperature", "top_k"], {"temperature": 1.5, "top_k": 3}), ([], {})):
        wanted = ASK | {"temperature": 1.0, "seed": 5} | left
        expected = coder.call(INFILL, wanted)[1]["content"]
        assert coder.call(INFILL, ASK | on | {"samplers": names})[1]["content"] == expected
        assert coder.call(INFILL, ASK | on)[1]["content"] != expected


def test_what_editors_send_is_honoured(coder: Served) -> None:
    """llama.vim's request, and the one with which llama.vscode warms the cache."""
    body: dict[str, Any] = {name: ASK[name] for name in ("input_prefix", "input_suffix")}
    body |= {"id_slot": 0, "input_extra": [], "prompt": "", "n_predict": 12, "stop": []}
    body |= {"top_k": 40, "top_p": 0.9, "stream": False, "cache_prompt": True, "n_indent": 0}
    body |= {"t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "seed": 3}
    fields = ["content", "timings/prompt_n", "timings/predicted_per_second", "truncated"]
    body["response_fields"] = fields
    vim = body | {"samplers": ["top_k", "top_p", "infill"]}
    status, answer, _ = coder.call(INFILL, vim)
    assert status == 200, answer
    assert [*answer] == fields
    assert coder.call(INFILL, vim)[1]["content"] == answer["content"]
    plain = vim | {"samplers": ["top_k", "top_p"]}
    pairs = [
        [coder.call(INFILL, wish | {"seed": seed})[1]["content"] for wish in (vim, plain)]
        for seed in range(4)
    ]
    assert len({narrow for narrow, _ in pairs}) > 1, "it draws"
    assert any(narrow != wide for narrow, wide in pairs)
    warm = body | {"n_predict": 0, "samplers": [], "t_max_predict_ms": 1, "response_fields": [""]}
    assert coder.call(INFILL, warm)[:2] == (200, {})


def test_only_the_fields_that_were_asked_for_are_shown(coder: Served) -> None:
    fields = ["content", "timings/predicted_n", "truncated", "index/x", "nothing", ""]
    whole = coder.call(INFILL, ASK)[1]
    answer = coder.call(INFILL, ASK | {"response_fields": fields})[1]
    expected = {"content": whole["content"], "timings/predicted_n": 12, "truncated": False}
    assert answer == expected
    assert events_of(coder, ASK | {"response_fields": fields})[-1] == expected | {"content": ""}
    assert coder.call(INFILL, ASK | {"response_fields": [""]})[1] == {}
    assert coder.call(INFILL, ASK | {"response_fields": []})[1].keys() == whole.keys()


def test_half_a_character_is_refused(coder: Served) -> None:
    for field in ("input_prefix", "input_suffix", "prompt"):
        status, error = coder.refused(INFILL, ASK | {field: "\ud800"})
        assert (status, error["code"]) == (400, "invalid_json")


def test_what_changes_nothing_passes(coder: Served) -> None:
    plain = coder.call(INFILL, ASK)[1]["content"]
    void = {"n_indent": 0, "repeat_penalty": 1.0, "mirostat": 0, "response_fields": None}
    dropped = {"cache_prompt": True, "id_slot": 0, "t_max_prompt_ms": 500}
    status, answer, headers = coder.call(INFILL, ASK | void | dropped)
    assert (status, answer["content"]) == (200, plain)
    assert headers["x-ridgeline-ignored"] == "cache_prompt, t_max_prompt_ms"


def test_keys_and_limits_hold(coder_path: Path) -> None:
    with serving(coder_path, api_key=["first"], max_tokens_per_minute=40) as served:
        served.stop_clock_of_limits()
        assert served.refused(INFILL, ASK)[0] == 401
        bearer = {"authorization": "Bearer first"}
        status, answer, headers = served.call(INFILL, ASK, **bearer)
        assert status == 200
        left = 40 - answer["tokens_evaluated"] - answer["tokens_predicted"]
        assert headers["x-ratelimit-remaining-tokens"] == str(left)
        assert served.refused(INFILL, ASK, **bearer)[0] == 429
        counted = served.call("/metrics", **bearer)[1].decode()
        assert re.search(r'http_requests_total\{.*"/infill".*"429".*\} 1.0', counted)


# --- suffix ------------------------------------------------------------------------------------


def test_a_completion_with_a_suffix(coder: Served) -> None:
    body = {"prompt": ASK["input_prefix"], "suffix": ASK["input_suffix"], "temperature": 0}
    answer = coder.call(COMPLETE, body | {"max_tokens": 12, "logprobs": 1})[1]
    (choice,) = answer["choices"]
    assert choice["text"] == continued(coder, PROMPT)["text"]
    assert answer["usage"]["prompt_tokens"] == len(TOKENIZER.encode(PROMPT))
    client = coder.client().completions
    chunks = client.create(model="tiny", **body, max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice["text"]
    ended = coder.call(COMPLETE, body | {"logit_bias": {"408": 100}})[1]["choices"][0]
    assert (ended["text"], ended["finish_reason"]) == ("", "stop")


def test_every_prompt_has_the_suffix(coder: Served) -> None:
    body = {"suffix": "\n", "temperature": 0, "max_tokens": 4}
    both = coder.call(COMPLETE, body | {"prompt": ["a", "<|end|>"]})[1]
    alone = [coder.call(COMPLETE, body | {"prompt": p})[1] for p in ("a", "<|end|>")]
    assert [c["text"] for c in both["choices"]] == [a["choices"][0]["text"] for a in alone]
    ids = coder.call(COMPLETE, body | {"prompt": TOKENIZER.encode("a")})[1]
    assert ids["choices"] == alone[0]["choices"]
    num_ids = 4 + len(TOKENIZER.encode("<|end|>", parse_special=False))
    assert alone[1]["usage"]["prompt_tokens"] == num_ids  # it spells no control token
    assert coder.call(COMPLETE, body | {"prompt": ""})[0] == 200  # the cursor stands at the start


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": 5}, "suffix"),
        ({"suffix": "a " * 500_000}, "suffix"),
        ({"suffix": "x", "echo": True}, "echo"),
        ({"suffix": "abc " * 500}, "prompt"),
        ({"suffix": "x", "prompt": [500]}, "suffix"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_suffix(coder: Served, fields: dict[str, Any], param: str) -> None:
    coder.refused_for(param, COMPLETE, {"prompt": "x"} | fields)


# --- from Python -------------------------------------------------------------------------------


def test_generate_with_a_suffix(coder_path: Path, model: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=6)
    with LLM(coder_path, kv_cache_memory="1MiB", threads=1) as llm:
        prompts = ["def f(x):", "<|end|>"]
        for given, output in zip(prompts, llm.generate(prompts, greedy, suffix="\n"), strict=True):
            ids = [403, *llm.tokenizer.encode(given, parse_special=False), 404]
            ids += [*llm.tokenizer.encode("\n"), 405]
            assert (output.prompt, output.prompt_token_ids) == (given, ids)
            assert output.outputs == llm.generate(ids, greedy)[0].outputs
        biased = SamplingParams(temperature=0, max_tokens=6, logit_bias={408: 100})
        assert llm.generate("x", biased, suffix="y")[0].outputs[0].finish_reason == "stop"
        assert llm.generate("x", greedy, suffix="")[0].prompt_token_ids == [
            *llm.tokenizer.encode("x")
        ]
        with pytest.raises(ValueError, match="suffix must be text"):
            llm.generate("x", greedy, suffix=5)  # type: ignore[arg-type]
    with LLM(model, kv_cache_memory="1MiB", threads=1) as llm:
        with pytest.raises(ValueError, match="no fill-in-the-middle tokens"):
            llm.generate("x", greedy, suffix="y")
        assert not llm.engine.requests
