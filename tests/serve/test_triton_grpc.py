"""Triton's gRPC service over a real channel: calls, streams, codes, and clients that leave."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.serve.dialects.triton.tensors import pack, unpack
from ridgeline.serve.http.listening import bind
from ridgeline.serve.http.options import ServeOptions
from ridgeline.serve.triton_grpc import check_grpc_port
from ridgeline.serve.triton_grpc.messages import CLASSES, SERVICE, check_parts
from ridgeline.serve.triton_grpc.translate import infer_request
from ridgeline.trust.audit.record_format import files_of
from tests.lines_run import at_most_lines
from tests.serve.serving import Served, hold, serving
from tests.waiting import PATIENCE_S, eventually

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
KINDS = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}


class Service:
    """A server with a gRPC port, and a channel to it."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.channel = grpc.insecure_channel(served.running.also.split("gRPC: ")[1])

    def call(self, name: str, request: Any = None, **metadata: str) -> Any:
        answer = {"ModelMetadata": "ModelMetadataResponse", "ModelConfig": "ModelConfigResponse"}
        found = self.channel.unary_unary(
            f"/{SERVICE}/{name}",
            lambda message: message.SerializeToString(),
            CLASSES[answer.get(name, f"{name}Response")].FromString,
        )
        request = request or CLASSES[f"{name}Request"]()
        return found(request, timeout=PATIENCE_S, metadata=tuple(metadata.items()))

    def stream(self, requests: Iterator[Any], **metadata: str) -> Any:
        found = self.channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            lambda message: message.SerializeToString(),
            CLASSES["ModelStreamInferResponse"].FromString,
        )
        return found(requests, timeout=PATIENCE_S, metadata=tuple(metadata.items()))

    def completion(self, **fields: Any) -> str:
        body = {"prompt": "one two"} | GREEDY | fields
        return str(self.served.call("/v1/completions", body)[1]["choices"][0]["text"])


@pytest.fixture(scope="module")
def service(model: Path) -> Iterator[Service]:
    with serving(model, grpc_port=0, max_body="64KiB") as served:
        found = Service(served)
        yield found
        found.channel.close()


def infer(*, stream: bool = False, is_raw: bool = True, **parameters: Any) -> Any:
    request = CLASSES["ModelInferRequest"](model_name="tiny", id=parameters.pop("id", ""))
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.inputs.add(name="stream", datatype="BOOL", shape=[1])
    if is_raw:
        request.raw_input_contents.extend([pack("BYTES", ["one two"]), pack("BOOL", [stream])])
    else:
        request.inputs[0].contents.bytes_contents.append(b"one two")
        request.inputs[1].contents.bool_contents.append(stream)
    for name, value in (GREEDY | parameters).items():
        setattr(request.parameters[name], KINDS[type(value)], value)
    return request


def text(response: Any) -> str:
    [found] = unpack("BYTES", response.raw_output_contents[0], 1)
    return str(found)


def failed(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error:
        call()
    return error.value.code(), error.value.details()


def test_what_a_server_and_a_model_are(service: Service) -> None:
    assert service.call("ServerLive").live
    assert service.call("ServerReady").ready
    assert service.call("ServerMetadata").name == "ridgeline"
    named = CLASSES["ModelReadyRequest"](name="tiny")
    assert service.call("ModelReady", named).ready
    assert not service.call("ModelReady", CLASSES["ModelReadyRequest"](name="nope")).ready
    metadata = service.call("ModelMetadata", CLASSES["ModelMetadataRequest"](name="tiny"))
    assert metadata.inputs[0].name == "text_input"
    config = service.call("ModelConfig", CLASSES["ModelConfigRequest"](name="tiny")).config
    assert (config.input[0].data_type, config.model_transaction_policy.decoupled) == (13, True)
    assert service.call("RepositoryIndex").models[0].name == "tiny"


def test_what_is_dropped_is_named_at_the_end_of_a_call(service: Service) -> None:
    """Such as a receipt, for which there is no place."""

    def dropped(call: Any) -> str | None:
        found: dict[str, str] = dict(call.trailing_metadata())
        return found.get("x-ridgeline-ignored")

    infers = service.channel.unary_unary(
        f"/{SERVICE}/ModelInfer",
        lambda message: message.SerializeToString(),
        CLASSES["ModelInferResponse"].FromString,
    )
    assert dropped(infers.with_call(infer(receipt=True), timeout=PATIENCE_S)[1]) == "receipt"
    assert dropped(infers.with_call(infer(), timeout=PATIENCE_S)[1]) is None
    asked = [infer(receipt=True), infer(stream=True, nonsense="x"), infer(receipt=True)]
    stream = service.stream(iter(asked))
    assert not any(one.error_message for one in stream)
    assert sorted(str(dropped(stream)).split(", ")) == ["nonsense", "receipt"]
    many = service.stream(iter([infer(**{f"{i:03}" + "x" * 190: 1}) for i in range(60)]))
    assert not any(one.error_message for one in many)
    assert len(str(dropped(many)).split(", ")) == 21


@pytest.mark.parametrize("is_raw", [True, False])
def test_infer_is_a_completion(service: Service, is_raw: bool) -> None:
    response = service.call("ModelInfer", infer(is_raw=is_raw, id="7"))
    assert (text(response), response.id) == (service.completion(), "7")
    assert (response.outputs[0].datatype, list(response.outputs[0].shape)) == ("BYTES", [1])


def test_statistics_are_those_of_the_route(service: Service) -> None:
    service.completion()
    service.served.catch_up()
    [told] = service.served.call("/v2/models/tiny/stats")[1]["model_stats"]
    for request in (CLASSES["ModelStatisticsRequest"](name="tiny"), None):
        [one] = service.call("ModelStatistics", request).model_stats
        assert (one.name, one.version, one.last_inference) == ("tiny", "1", told["last_inference"])
        assert one.inference_count == told["inference_count"] > 0
        assert one.execution_count == told["execution_count"] > 0
        for name, of in told["inference_stats"].items():
            found = getattr(one.inference_stats, name)
            assert (found.count, found.ns) == (of["count"], of["ns"]), name
        sizes = [(batch.batch_size, batch.compute_infer.count) for batch in one.batch_stats]
        assert sizes == [
            (batch["batch_size"], batch["compute_infer"]["count"]) for batch in told["batch_stats"]
        ]


def test_a_stream_has_the_whole_answer_in_pieces(service: Service) -> None:
    last = {"triton_enable_empty_final_response": True}
    requests = [
        infer(stream=True, id="a", **last),
        infer(stream=True, id="b", temperature=1.0, seed=3, **last),
        infer(id="c"),
        infer(id="d", temperature=9.0),
    ]
    pieces: dict[str, list[str]] = {}
    ended, errors = [], []
    for one in service.stream(iter(requests)):
        response = one.infer_response
        if one.error_message:
            errors.append((response.id, one.error_message))
        elif response.parameters["triton_final_response"].bool_param:
            ended.append(response.id)
        else:
            pieces.setdefault(response.id, []).append(text(response))
    assert len(pieces["a"]) > 3
    assert "".join(pieces["a"]) == service.completion()
    assert "".join(pieces["b"]) == service.completion(temperature=1.0, seed=3)
    assert pieces["c"] == [service.completion()]
    assert sorted(ended) == ["a", "b"]
    assert errors == [("d", "temperature is 9.0: it must be less than or equal to 2")]


def test_calls_that_are_left_end_no_other_of_their_connection(service: Service) -> None:
    served = service.served
    served.valve.before = lambda step: time.sleep(0.005)
    stays = service.stream(iter([infer(stream=True, max_tokens=400)]))
    pieces = [text(next(stays).infer_response)]
    for _ in range(30):
        left = service.stream(iter([infer(stream=True, id="x" * 50_000, max_tokens=400)]))
        next(left)
        left.cancel()
    served.valve.before = lambda step: None
    pieces += [text(one.infer_response) for one in stays]
    assert "".join(pieces) == service.completion(max_tokens=400)
    served.assert_idle()


@pytest.mark.parametrize("is_stream", [True, False])
def test_who_leaves_ends_the_request(service: Service, is_stream: bool) -> None:
    served = service.served
    go_on = hold(served, 2)
    request = infer(stream=is_stream, max_tokens=400)
    if is_stream:
        call = service.stream(iter([request]))
        next(call)
        call.cancel()
    else:
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(failed, lambda: service.call("ModelInfer", request))
            eventually(lambda: served.valve.num_steps > 2 and served.llm.engine.requests)
            service.channel.close()
            assert waiting.result()[0] is grpc.StatusCode.CANCELLED
        service.channel = Service(served).channel
    go_on.set()
    served.assert_idle()
    assert text(service.call("ModelInfer", infer())) == service.completion()


def test_a_step_that_fails_is_an_error_of_its_stream(service: Service) -> None:
    first = service.served.valve.num_steps

    def fail(step: Any) -> None:
        if service.served.valve.num_steps > first + 3:
            raise RuntimeError("broken")

    service.served.valve.before = fail
    found = list(service.stream(iter([infer(stream=True, id="a")])))
    service.served.valve.before = lambda step: None
    assert "".join(text(one.infer_response) for one in found[:-1])
    assert (found[-1].error_message != "", found[-1].infer_response.id) == (True, "a")


def test_status_codes(service: Service) -> None:
    codes = grpc.StatusCode
    code, said = failed(lambda: service.call("ModelInfer", infer(temperature=9.0)))
    assert (code, "temperature is 9.0" in said) == (codes.INVALID_ARGUMENT, True)
    code, said = failed(lambda: service.call("ModelInfer", infer(stream=True)))
    assert (code, "infer answers once" in said) == (codes.INVALID_ARGUMENT, True)
    request = infer()
    request.model_name = "nope"
    assert failed(lambda: service.call("ModelInfer", request))[0] is codes.NOT_FOUND
    request = infer()
    del request.raw_input_contents[1]
    code, said = failed(lambda: service.call("ModelInfer", request))
    assert (code, "has 1 tensors" in said) == (codes.INVALID_ARGUMENT, True)
    request = infer(is_raw=False)
    request.inputs[0].contents.bytes_contents[0] = b"\xff"
    code, said = failed(lambda: service.call("ModelInfer", request))
    assert (code, "not UTF-8" in said) == (codes.INVALID_ARGUMENT, True)
    request = infer()
    request.raw_input_contents[0] = pack("BYTES", ["x" * (65 << 10)])
    assert failed(lambda: service.call("ModelInfer", request))[0] is codes.RESOURCE_EXHAUSTED
    load = CLASSES["RepositoryModelLoadRequest"](model_name="tiny")
    assert failed(lambda: service.call("RepositoryModelLoad", load))[0] is codes.INVALID_ARGUMENT
    unknown = service.channel.unary_unary(f"/{SERVICE}/TraceSetting")
    assert failed(lambda: unknown(b"", timeout=PATIENCE_S))[0] is codes.UNIMPLEMENTED


def test_broken_messages_are_refused_or_answered(service: Service) -> None:
    call = service.channel.unary_unary(f"/{SERVICE}/ModelInfer")
    good = infer().SerializeToString()
    flipped = (good[:i] + bytes([good[i] ^ 0x55]) + good[i + 1 :] for i in range(len(good)))
    futures = [call.future(broken, timeout=PATIENCE_S) for broken in flipped]
    codes = {future.code() for future in futures}
    known = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
    assert codes == known
    [one] = service.channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(iter([b"\xff"]))
    answer = CLASSES["ModelStreamInferResponse"].FromString(one)
    assert answer.error_message == "the message is not a ModelInferRequest"
    service.served.assert_idle()


def test_keys_are_sent_as_metadata(model: Path) -> None:
    with serving(model, grpc_port=0, api_key=["secret"]) as served:
        guarded = Service(served)
        assert guarded.call("ServerLive").live
        code, said = failed(lambda: guarded.call("ModelInfer", infer()))
        assert (code, "API key" in said) == (grpc.StatusCode.UNAUTHENTICATED, True)
        assert guarded.call("ModelInfer", infer(), authorization="Bearer secret").outputs
        guarded.channel.close()


def test_a_call_without_a_key_ends_before_its_messages_are_read(model: Path) -> None:
    taken: list[int] = []

    def messages() -> Iterator[Any]:
        for number in range(50):
            taken.append(number)
            yield infer(id="x" * (1 << 20))

    with serving(model, grpc_port=0, api_key=["secret"]) as served:
        guarded = Service(served)
        code, said = failed(lambda: list(guarded.stream(messages())))
        assert (code, "API key" in said) == (grpc.StatusCode.UNAUTHENTICATED, True)
        assert len(taken) < 5, "the rest was not sent"
        assert not any("/infer" in line for line in served.lines)
        guarded.channel.close()


def test_messages_of_a_call_have_the_room_of_one_body(service: Service) -> None:
    """One of more than half of it is alone; many short ones are answered side by side."""
    served, most = service.served, 0

    def note(step: Any) -> None:
        nonlocal most
        most = max(most, len(served.llm.engine.requests))
        time.sleep(0.01)  # so that a further one could come

    for length, expected in ((40_000, {1}), (10, {2, 3, 4})):
        most, served.valve.before = 0, note
        answers = list(service.stream(iter([infer(id=f"{i}" * length) for i in range(4)])))
        assert [one.error_message for one in answers] == [""] * 4
        assert most in expected
    served.valve.before = lambda step: None


def test_who_does_not_read_is_disconnected(model: Path) -> None:
    with serving(model, grpc_port=0, stall_timeout=0.5) as served:
        found = Service(served)
        request = infer(stream=True, id="x" * 60_000, max_tokens=100)
        call = found.stream(iter([request] * 8))  # whose answers no window holds
        eventually(lambda: not call.is_active())
        assert failed(lambda: list(call))[0] is grpc.StatusCode.UNAVAILABLE
        found.channel.close()
        served.assert_idle()


def test_who_sends_no_message_is_told(model: Path) -> None:
    with serving(model, grpc_port=0, receive_timeout=0.5) as served:
        found = Service(served)
        call = found.channel.stream_unary(f"/{SERVICE}/ModelInfer")
        never = threading.Event()
        code, said = failed(lambda: call(iter(never.wait, True), timeout=60))
        assert (code, "0.5 s to arrive" in said) == (grpc.StatusCode.DEADLINE_EXCEEDED, True)
        code, said = failed(lambda: call(iter([]), timeout=60))
        assert (code, said) == (grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
        never.set()
        found.channel.close()


def test_silent_connections_give_way(model: Path) -> None:
    with serving(model, grpc_port=0) as served, ExitStack() as stack:
        served.running.server.strangers.places._most = 5
        target = served.running.also.split("gRPC: ")[1].split(":")
        crowd = [
            stack.enter_context(socket.create_connection((target[0], int(target[1])), 60))
            for _ in range(20)
        ]
        found = Service(served)
        assert found.call("ModelInfer", infer()).outputs
        assert [one.recv(1) for one in crowd[:15]] == [b""] * 15
        found.channel.close()


def test_a_port_that_is_taken_and_grpc_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="try another --grpc-port"):
            check_grpc_port(ServeOptions(grpc_port=port))
    with pytest.raises(ValueError, match="--grpc-port is 70000"):
        ServeOptions(grpc_port=70000)
    monkeypatch.setitem(sys.modules, "ridgeline.serve.triton_grpc.front", None)
    with pytest.raises(ValueError, match=r"pip install 'ridgeline\[grpc\]'"):
        check_grpc_port(ServeOptions(grpc_port=0))


def test_nothing_of_grpc_is_imported_without_its_port() -> None:
    code = "import ridgeline.serve.main, ridgeline.fleet.main, sys; print(*sys.modules)"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = seen.stdout.split()
    assert not [name for name in names if name.split(".")[0] in ("grpc", "google")]


def test_calls_have_lines_in_the_audit_log(model: Path, tmp_path: Path) -> None:
    log = {"audit": tmp_path / "log", "audit_key": tmp_path / "key", "audit_strict": True}
    with serving(model, grpc_port=0, **log) as served:
        found = Service(served)
        found.call("ModelInfer", infer())
        assert len(list(found.stream(iter([infer(stream=True)])))) > 2
        found.channel.close()
    texts = [file.read_text() for file in files_of(tmp_path / "log")]
    lines = [json.loads(line) for line in "".join(texts).splitlines()]
    asked = [line for line in lines if line["event"] == "request"]
    assert {line["status"] for line in asked} == {200}
    assert sum(line.get("completion_tokens", 0) for line in asked) == 2 * GREEDY["max_tokens"]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("inputs", [{"name": "a"}] * 257, "at most 256 inputs"),
        ("outputs", [{"name": "a"}] * 257, "at most 256 inputs, and as many outputs"),
        ("inputs", [{"shape": [1] * 33}], "at most 32 dimensions"),
    ],
)
def test_more_tensors_than_a_request_may_have_are_refused(
    field: str, value: Any, said: str
) -> None:
    with at_most_lines(10_000), pytest.raises(ValueError, match=said):
        infer_request(request_of(**{field: value}))


def request_of(**fields: Any) -> Any:
    return CLASSES["ModelInferRequest"](model_name="m", **fields)


def contents(**elements: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "a", "shape": [1], "contents": elements}] * 2}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("bool", True), ("int", 1), ("int64", -1), ("uint", 1), ("uint64", 1 << 63),
        ("fp32", 0.5), ("fp64", 0.5),
    ],
)  # fmt: skip
def test_elements_are_counted_before_they_are_parsed(kind: str, value: Any) -> None:
    """As many as JSON may have, with the dimension of each of two tensors."""
    name = f"{kind}_contents"
    most = request_of(**contents(**{name: [value] * ((1 << 17) - 1)})).SerializeToString()
    more = request_of(**contents(**{name: [value] * (1 << 17)})).SerializeToString()
    with at_most_lines(10_000):
        check_parts("ModelInferRequest", most)
        with pytest.raises(ValueError, match="at most 262144 elements"):
            check_parts("ModelInferRequest", more)


@pytest.mark.parametrize(
    "fields",
    [
        {"inputs": [{}] * 70_000},
        {"inputs": [{"parameters": {str(i): {} for i in range(70_000)}}]},
        {"raw_input_contents": [b""] * 70_000},
        contents(bytes_contents=[b""] * 35_000),
    ],
)
def test_parts_are_counted_before_they_are_parsed(fields: dict[str, Any]) -> None:
    data = request_of(**fields).SerializeToString()
    with at_most_lines(30 * 70_000), pytest.raises(ValueError, match="at most 65536 are texts"):
        check_parts("ModelInferRequest", data * 20)
    check_parts(
        "ModelInferRequest",
        request_of(**contents(bytes_contents=[b"a"] * 32_768)).SerializeToString(),
    )


@pytest.mark.parametrize(
    "data",
    [b"\x2a", b"\x2a\x05\x0a", b"\xff" * 100, b"\x2b\x2c", b"\x2a\x02\x22\x05abcde", b"\x09abc"],
)
def test_bytes_that_are_no_message_are_counted_as_none(data: bytes) -> None:
    with pytest.raises(DecodeError):
        check_parts("ModelInferRequest", data)


@given(names=st.lists(st.text(max_size=9)), shape=st.lists(st.integers(-(2**63), 2**63 - 1)),
       raw=st.lists(st.binary()), number=st.floats())  # fmt: skip
def test_what_is_counted_can_be_parsed(
    names: list[str], shape: list[int], raw: list[bytes], number: float
) -> None:
    request = request_of(raw_input_contents=raw)
    for name in names:
        request.inputs.add(name=name, shape=shape).parameters[name].double_param = number
        request.inputs[-1].contents.fp64_contents.append(number)
    check_parts("ModelInferRequest", request.SerializeToString())


def test_names_that_become_a_path_are_short(service: Service) -> None:
    for name, field in (("ModelReady", "version"), ("RepositoryModelLoad", "model_name")):
        with pytest.raises(grpc.RpcError) as caught:
            service.call(name, CLASSES[f"{name}Request"](**{field: "a" * 5000}))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == f"{field} may have at most 4096 characters"


def test_a_message_of_too_many_parts_is_refused(model: Path) -> None:
    key, long = {"authorization": "Bearer mine"}, request_of(id="x", inputs=[{}] * 70_000)
    with serving(model, grpc_port=0, api_key=["mine"]) as served:
        found = Service(served)
        codes, said = [], []
        for metadata in ({}, key):
            with pytest.raises(grpc.RpcError) as caught:
                found.call("ModelInfer", long, **metadata)
            codes.append(caught.value.code())
            said.append(caught.value.details())
        for metadata in ({}, key):  # short, and no message
            call = found.channel.unary_unary(f"/{SERVICE}/ModelInfer")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"\xff" * 9, timeout=PATIENCE_S, metadata=tuple(metadata.items()))
            codes.append(caught.value.code())
        [answer] = found.stream(iter([long]), **key)
        found.channel.close()
    assert codes == [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT] * 2
    assert "at most 65536 are texts or parameters" in said[1]
    assert answer.error_message == said[1]
