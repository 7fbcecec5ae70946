"""The Open Inference Protocol over HTTP: tensors of both forms, Triton's generate, refusals."""

from __future__ import annotations

import gzip
import json
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.serve.dialects.triton.protocol import InferRequest, TritonRequest
from ridgeline.serve.dialects.triton.routes import request_of
from ridgeline.serve.dialects.triton.schemas import Generated, Inferred
from ridgeline.serve.dialects.triton.tensors import FORMATS, pack, unpack
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.observe.statistics import OneModelStatistics, added
from tests.serve.forms import pressed_nothing
from tests.serve.serving import Served, check_shape, serving

MODEL = "/v2/models/tiny"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
TEXT: dict[str, Any] = {
    "name": "text_input",
    "datatype": "BYTES",
    "shape": [1],
    "data": ["one two"],
}


def inferred(served: Served, *more: dict[str, Any], **fields: Any) -> tuple[int, Any]:
    body = {"inputs": [TEXT, *more], "parameters": GREEDY} | fields
    status, answer, _ = served.call(f"{MODEL}/infer", body)
    if status == 200:
        check_shape(Inferred, answer)
    return status, answer


def texts(answer: Any, name: str = "text_output") -> list[str]:
    [found] = [one["data"] for one in answer["outputs"] if one["name"] == name]
    return list(found)


def completion(served: Served, **fields: Any) -> str:
    status, answer, _ = served.call("/v1/completions", {"prompt": "one two"} | GREEDY | fields)
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


def refused(served: Served, path: str, body: Any, **headers: str) -> tuple[int, str]:
    status, answer, _ = served.call(path, body, **headers)
    assert set(answer) == {"error"}, answer
    return status, str(answer["error"])


def test_what_a_server_and_a_model_are(served: Served) -> None:
    for path, name in (("/v2", "ridgeline"), (MODEL, "tiny"), (f"{MODEL}/config", "tiny")):
        status, answer, _ = served.call(path)
        assert (status, answer["name"]) == (200, name)
    assert served.call(f"{MODEL}/versions/1")[1] == served.call(MODEL)[1]
    for path in ("/v2/health/live", "/v2/health/ready", f"{MODEL}/ready"):
        assert served.call(path)[:2] == (200, b"")
    assert served.call("/v2/repository/index", b"")[1][0]["name"] == "tiny"
    assert refused(served, f"{MODEL}/versions/2", None)[0] == 404
    assert refused(served, "/v2/models/nope/ready", None)[0] == 404
    assert "by request" in refused(served, "/v2/repository/models/tiny/load", {})[1]


def test_infer_is_a_completion(served: Served) -> None:
    status, answer = inferred(served, id="7")
    assert (status, answer["id"], answer["model_name"]) == (200, "7", "tiny")
    assert texts(answer) == [completion(served)]
    two = TEXT | {"shape": [2, 1], "data": [["one two"], ["three"]]}
    first, second = texts(inferred(served, inputs=[two])[1])
    assert [first, second] == [completion(served), completion(served, prompt="three")]


def test_generate_is_a_completion_and_its_stream_has_the_same_text(served: Served) -> None:
    body = {"text_input": "one two", "parameters": GREEDY, "return_finish_reason": True}
    status, answer, _ = served.call(f"{MODEL}/generate", body)
    check_shape(Generated, answer)
    assert (status, answer["text_output"]) == (200, completion(served))
    status, stream, headers = served.call(f"{MODEL}/generate_stream", body)
    assert headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in stream.decode().splitlines() if line]
    assert "".join(event["text_output"] for event in events) == completion(served)
    assert [event.get("finish_reason") for event in events[-2:]] == [None, "length"]
    beside = {"text_input": "one two", **GREEDY, "parameters": {"max_tokens": 3}}
    assert served.call(f"{MODEL}/generate", beside)[1]["text_output"] == completion(served)


def test_words_may_be_one_text(served: Served) -> None:
    """TensorRT-LLM's clients send an empty text for no words."""
    path, asked = f"{MODEL}/generate", {"text_input": "one two"} | GREEDY
    plain = served.call(path, asked)[1]["text_output"]
    for nothing in ({"bad_words": ""}, {"bad_words": "", "stop_words": ""}, {"bad_words": []}):
        status, answer, _ = served.call(path, asked | nothing)
        assert (status, answer["text_output"]) == (200, plain)
    word = served.llm.text.spell(served.llm.text.tokenizer.encode(plain, add_bos=False)[0])
    status, answer, _ = served.call(path, asked | {"bad_words": word})
    assert (status, word in answer["text_output"]) == (200, False)
    assert answer["text_output"] == completion(served, bad_words=[word])


def row(name: str, kind: str, values: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": kind, "shape": [len(values), 1], "data": values}


def test_a_setting_may_have_a_row_for_each_text(served: Served) -> None:
    two = row("text_input", "BYTES", ["one two", "three"])
    alone = [completion(served, prompt=text, max_tokens=4) for text in two["data"]]
    for lengths in ([4, 4], [4]):
        body = {"inputs": [two, row("max_tokens", "INT32", lengths)], "parameters": GREEDY}
        status, answer, _ = served.call(f"{MODEL}/infer", body)
        assert (status, texts(answer)) == (200, alone)
    stops = row("stop", "BYTES", [alone[0][2:4]] * 2)
    body = {"inputs": [two, row("max_tokens", "INT32", [4, 4]), stops], "parameters": GREEDY}
    first = texts(served.call(f"{MODEL}/infer", body)[1])[0]
    assert first == completion(served, max_tokens=4, stop=stops["data"][:1])
    differ = {"inputs": [two, row("max_tokens", "INT32", [4, 5])], "parameters": GREEDY}
    status, why = refused(served, f"{MODEL}/infer", differ)
    assert (status, "the rows of 'max_tokens' differ: send a request for" in why) == (400, True)


def statistics(served: Served, path: str = f"{MODEL}/stats") -> dict[str, Any]:
    status, answer, _ = served.call(path)
    assert status == 200, answer
    [one] = answer["model_stats"]
    return dict(one)


def test_statistics_count_what_was_answered(served: Served) -> None:
    begin_ms = time.time() * 1e3
    before = statistics(served)
    for _ in range(3):
        completion(served)
    served.catch_up()
    after = statistics(served)
    assert (after["name"], after["version"]) == ("tiny", "1")
    assert after["inference_count"] - before["inference_count"] == 3
    told, known = after["inference_stats"], before["inference_stats"]
    for name in ("success", "queue", "compute_infer"):
        assert told[name]["count"] - known[name]["count"] == 3, name
        assert told[name]["ns"] > known[name]["ns"], name
    assert told["fail"] == known["fail"]
    ns = {name: told[name]["ns"] - known[name]["ns"] for name in told}
    assert abs(ns["success"] - ns["queue"] - ns["compute_infer"]) < 10, "their parts"
    steps = [one["compute_infer"]["count"] for one in after["batch_stats"]]
    assert sum(steps) == after["execution_count"] > before["execution_count"]
    assert begin_ms - 1 <= after["last_inference"] <= time.time() * 1e3
    for path in ("/v2/models/stats", f"{MODEL}/versions/1/stats"):
        assert statistics(served, path)["inference_count"] == after["inference_count"]
    assert "statistics" in served.call("/v2")[1]["extensions"]
    for path in ("/v2/models/other/stats", f"{MODEL}/versions/2/stats"):
        assert served.call(path)[0] == 404


def test_statistics_count_what_failed(served: Served) -> None:
    before = statistics(served)
    served.valve.before = lambda step: 1 // 0
    assert served.call("/v1/completions", {"prompt": "one two"} | GREEDY)[0] == 500
    served.valve.before = lambda step: None
    served.catch_up()
    after = statistics(served)
    assert after["inference_count"] == before["inference_count"]
    found = [one["inference_stats"]["fail"]["count"] for one in (before, after)]
    assert found[1] - found[0] == 1


def test_statistics_are_an_operators(model: Path) -> None:
    with serving(model, api_key=["one"], admin_api_key=["two"]) as served:
        for path in ("/v2/models/stats", f"{MODEL}/stats"):
            for key, status in (("one", 403), ("two", 200)):
                assert served.call(path, authorization=f"Bearer {key}")[0] == status


def test_statistics_of_several_servers_are_added() -> None:
    def one(size: int, count: int, at_ms: int) -> dict[str, Any]:
        none, some = {"count": 0, "ns": 0}, {"count": count, "ns": 10 * count}
        batch = {"compute_input": none, "compute_infer": some, "compute_output": none}
        names = ("success", "fail", "queue", "cache_hit", "cache_miss", *batch)
        return {
            "name": "m",
            "version": "1",
            "last_inference": at_ms,
            "inference_count": count,
            "execution_count": count,
            "inference_stats": dict.fromkeys(names, some),
            "batch_stats": [{"batch_size": size, **batch}],
        }

    total = added([one(1, 2, 50), one(4, 3, 70), one(1, 5, 60)])
    check_shape(OneModelStatistics, total)
    assert (total["inference_count"], total["last_inference"]) == (10, 70)
    assert total["inference_stats"]["queue"] == {"count": 10, "ns": 100}
    found = {one["batch_size"]: one["compute_infer"]["count"] for one in total["batch_stats"]}
    assert found == {1: 7, 4: 3}


def test_tensors_behind_the_json(served: Served) -> None:
    raw = [pack("BYTES", ["one two"]), pack("INT32", [5]), pack("FP32", [0.0])]
    names = [("text_input", "BYTES"), ("max_tokens", "INT32"), ("temperature", "FP32")]
    inputs = [
        {
            "name": name,
            "datatype": kind,
            "shape": [1],
            "parameters": {"binary_data_size": len(data)},
        }
        for (name, kind), data in zip(names, raw, strict=True)
    ]
    given = {"ignore_eos": True, "binary_data_output": True}
    head = json.dumps({"inputs": inputs, "parameters": given}).encode()
    form = {"inference_header_content_length": str(len(head))}
    for kind in ({}, {"content_type": "application/octet-stream"}):
        body = head + b"".join(raw)
        status, data, headers = served.call(f"{MODEL}/infer", body, **form, **kind)
        length = int(headers["inference-header-content-length"])
        [output] = json.loads(data[:length])["outputs"]
        assert (status, output["parameters"]["binary_data_size"]) == (200, len(data) - length)
        assert unpack("BYTES", data[length:], 1) == [completion(served, max_tokens=5)]
    for length in ("9999", "-1", "x", "10"):
        form["inference_header_content_length"] = length
        assert refused(served, f"{MODEL}/infer", body, **form)[0] == 400


@pytest.mark.parametrize(
    ("kinds", "num_bytes", "most"),
    [
        (["BYTES"], 4 << 17, 1 << 16),  # empty texts: their lengths alone
        (["UINT8"], (1 << 18) + 1, 1 << 18),
        (["FP64"], (8 << 18) + 8, 1 << 18),
        (["INT8", "INT8"], (1 << 18) - 1, 1),  # the second has what the first has left
    ],
)
def test_tensors_have_no_more_elements_than_a_body_has_values(
    kinds: list[str], num_bytes: int, most: int
) -> None:
    """Eight MB of them would be made into objects for half a second, on the event loop."""
    size = {"binary_data_size": num_bytes}
    inputs = [
        {"name": "top_k", "datatype": kind, "shape": [num_bytes], "parameters": size}
        for kind in kinds
    ]
    body = InferRequest.model_validate({"inputs": inputs})
    with pytest.raises(ApiError, match=f"more than the {most} elements that there is room for"):
        request_of(body, bytes(num_bytes * len(kinds)), is_strict=False)


@pytest.mark.parametrize("pressed", [gzip.compress, zlib.compress])
def test_compressed_bodies(served: Served, pressed: Any) -> None:
    coding = pressed.__module__.replace("zlib", "deflate")
    body = json.dumps({"inputs": [TEXT], "parameters": GREEDY}).encode()
    given = {"content_encoding": coding}
    status, answer, _ = served.call(f"{MODEL}/infer", pressed(body), **given)
    assert (status, texts(answer)) == (200, [completion(served)])
    assert refused(served, f"{MODEL}/infer", body, **given)[0] == 400
    assert refused(served, f"{MODEL}/infer", pressed(body)[:-5], **given)[0] == 400
    bomb = pressed(b" " * (9 << 20))  # more than a body may have
    assert refused(served, f"{MODEL}/infer", bomb, **given)[0] == 413
    assert served.call("/v1/completions", pressed(body), **given)[0] == 415


def test_a_compressed_body_that_is_long_is_refused_unread(served: Served) -> None:
    """There may be nothing in it, in as many blocks as fit."""
    given = {"content_encoding": "deflate"}
    for length, expected in ((2 << 20) - 10, 400), ((2 << 20) + 200, 413):
        status, error, _ = served.call(f"{MODEL}/infer", pressed_nothing(length), **given)
        assert (status, "compressed" in str(error)) == (expected, expected == 413), error


def test_outputs_and_vectors(served: Served) -> None:
    wanted = [{"name": n} for n in ("text_output", "finish_reason", "num_output_tokens")]
    answer = inferred(served, outputs=wanted)[1]
    assert (texts(answer, "finish_reason"), texts(answer, "num_output_tokens")) == (
        ["length"],
        [12],
    )
    vector = inferred(served, outputs=[{"name": "embedding"}])[1]["outputs"][0]
    _, spoken, _ = served.call("/v1/embeddings", {"input": "one two"})
    assert vector["data"] == spoken["data"][0]["embedding"]
    assert vector["shape"] == [1, len(vector["data"])]


def test_the_input_is_repeated_if_that_is_wanted(served: Served) -> None:
    flag = {"name": "exclude_input_in_output", "datatype": "BOOL", "shape": [1], "data": [False]}
    assert texts(inferred(served, flag)[1]) == ["one two" + completion(served)]


def test_sampling_parameters_may_be_texts(served: Served) -> None:
    given = json.dumps({"max_tokens": "3", "temperature": "0", "ignore_eos": "true", "stop": "7"})
    tensor = {"name": "sampling_parameters", "datatype": "BYTES", "shape": [1], "data": [given]}
    assert texts(inferred(served, tensor, parameters={})[1]) == [completion(served, max_tokens=3)]


def test_what_nothing_reads_is_dropped_by_name(served: Served) -> None:
    body = {"inputs": [TEXT], "parameters": GREEDY | {"nonsense": 1, "priority": 3}}
    status, _, headers = served.call(f"{MODEL}/infer", body)
    assert (status, headers["x-ridgeline-ignored"]) == (200, "nonsense, priority")


def tensors(*first: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """A body with these tensors, and one more that differs from a right one in this."""
    return {"inputs": [*first, TEXT | changed], "parameters": {}}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("infer", tensors(name="nope"), "no input 'nope'"),
        ("infer", tensors(datatype="INT32"), "an element is not INT32"),
        ("infer", tensors(datatype="TEXT"), "inputs[0].datatype"),
        ("infer", tensors(shape=[2]), "its shape is [2], but it has 1 elements"),
        ("infer", tensors(data=[7]), "an element is not BYTES"),
        ("infer", tensors(parameters={"binary_data_size": 4}), "both data and binary_data_size"),
        ("infer", tensors(data=None, parameters={"binary_data_size": 4}), "0 bytes are left"),
        ("infer", tensors(parameters={"shared_memory_region": "a"}), "no memory is shared"),
        ("infer", tensors(TEXT, name="temperature", datatype="FP32", data=[9.5]), "temperature"),
        ("infer", tensors(name="max_tokens", datatype="INT64", data=[3]), "text_input is missing"),
        ("infer", {"inputs": []}, "inputs"),
        ("infer", {"inputs": [TEXT], "parameters": {"stream": True}}, "infer answers once"),
        ("infer", {"inputs": [TEXT], "outputs": [{"name": "nope"}]}, "no output 'nope'"),
        ("generate", {}, "text_input is missing"),
        ("generate", {"text_input": "a", "parameters": {"temperature": 9}}, "temperature is 9"),
        ("generate", {"text_input": "a", "parameters": {"stream": True}}, "generate answers once"),
        ("generate", {"text_input": "a", "sampling_parameters": "{"}, "write a JSON object"),
        ("generate", {"text_input": "a", "stop_words": "b"}, "send stop"),
        ("generate_stream", {"text_input": "a", "n": 2}, "a stream has one answer"),
        ("generate_stream", {"text_input": ["a", "b"]}, "a stream answers one text"),
        ("generate", b"{", "not valid JSON"),
        ("generate", {"text_input": "a " * 40000}, "text_input"),
    ],
)
def test_a_request_that_is_wrong_is_named(served: Served, path: str, body: Any, said: str) -> None:
    status, error = refused(served, f"{MODEL}/{path}", body)
    assert (status, said in error) == (400, True), error


def test_keys_are_needed_but_for_probes(model: Any) -> None:
    with serving(model, api_key=["secret"]) as guarded:
        assert guarded.call("/v2/health/ready")[0] == 200
        assert refused(guarded, f"{MODEL}/infer", {"inputs": [TEXT]})[0] == 401
        status, _, _ = guarded.call(
            f"{MODEL}/infer", {"inputs": [TEXT]}, authorization="Bearer secret"
        )
        assert status == 200


_BOUNDS = {"f": 32, "e": 16, "d": 64}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_elements_are_the_same_after_packing(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["BYTES", *FORMATS]))
    if kind == "BYTES":
        one: Any = st.text()
    elif kind == "BOOL":
        one = st.booleans()
    elif kind.startswith("FP"):
        width: Any = _BOUNDS[FORMATS[kind]]
        one = st.floats(width=width, allow_nan=False)
    else:
        size = 8 * struct.calcsize(f"<{FORMATS[kind]}")
        low = 0 if kind.startswith("U") else -(1 << (size - 1))
        one = st.integers(low, low + (1 << size) - 1)
    values = data.draw(st.lists(one, max_size=5))
    assert unpack(kind, pack(kind, values), len(values)) == values


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["BYTES", *FORMATS]), st.binary(max_size=40))
def test_any_bytes_are_a_tensor_or_a_clear_error(kind: str, data: bytes) -> None:
    try:
        values = unpack(kind, data, len(data))
    except ValueError:
        return
    if not kind.startswith("FP"):  # of which not a number has several spellings
        assert unpack(kind, pack(kind, values), len(values)) == values


def test_a_body_of_sampling_parameters_cannot_be_deep() -> None:
    deep = {"text_input": "a", "sampling_parameters": "[" * 100_000}
    with pytest.raises(ValueError, match="write a JSON object"):
        TritonRequest.model_validate(deep)
