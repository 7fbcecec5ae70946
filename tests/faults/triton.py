"""Attacks on Triton's protocol before a fleet, over HTTP and gRPC: F14."""

from __future__ import annotations

import gzip
import json
import random
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from ridgeline.serve.dialects.triton.tensors import pack
from ridgeline.serve.triton_grpc.messages import CLASSES, SERVICE
from tests.faults.fleet import servers, two_servers
from tests.fleet.test_router import Routed
from tests.waiting import PATIENCE_S

_INFER = "/v2/models/model/infer"
_BOMB = gzip.compress(bytes(64 << 20))
_TEXT = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["one two"]}
_BODY: dict[str, Any] = {"inputs": [_TEXT], "parameters": {"temperature": 0, "max_tokens": 8}}
_ENDLESS = 110  # tokens, of 64 answers
_REFUSED = {
    grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED,
}  # fmt: skip
Attack = Callable[[Routed, grpc.Channel, random.Random], None]


def _refused(routed: Routed, body: bytes, **headers: str) -> None:
    status, answer, _ = routed.call(_INFER, body, **headers)
    assert 400 <= status < 500, (status, answer)
    assert isinstance(answer["error"], str)


def _bomb(routed: Routed, channel: grpc.Channel, rng: random.Random) -> None:
    """64 MiB in 64 KiB."""
    _refused(routed, _BOMB[: len(_BOMB) - rng.randrange(2)], content_encoding="gzip")


def _noise(routed: Routed, channel: grpc.Channel, rng: random.Random) -> None:
    """Random bytes, as JSON, as tensors behind it, and as if they were compressed."""
    noise, head = rng.randbytes(rng.randrange(1, 300)), json.dumps(_BODY).encode()
    length = rng.choice([len(head), rng.randrange(1 << 20), -1])
    said = {"inference_header_content_length": str(length)}
    _refused(routed, noise, **rng.choice([{}, said, {"content_encoding": "gzip"}]))
    _refused(routed, head + noise, **said)


def _torn(routed: Routed, channel: grpc.Channel, rng: random.Random) -> None:
    """A sender who leaves amid a body, or amid the answer."""
    body = json.dumps(_BODY | {"parameters": {"max_tokens": _ENDLESS, "n": 64}}).encode()
    head = f"POST {_INFER} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", routed.port)) as connection:
        connection.sendall(head.encode() + body[: rng.choice([1, len(body) // 2, len(body)])])


def _noise_by_grpc(routed: Routed, channel: grpc.Channel, rng: random.Random) -> None:
    """Random bytes where a message belongs, and tensors that say too much."""
    request = CLASSES["ModelInferRequest"](model_name="model")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[rng.randrange(2, 1 << 62)])
    request.raw_input_contents.append(pack("BYTES", ["one"]) + rng.randbytes(rng.randrange(9)))
    for message in (b"\xff" + rng.randbytes(rng.randrange(300)), request.SerializeToString()):
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer").future(message, timeout=PATIENCE_S)
        assert call.code() in _REFUSED, (message, call.code(), call.details())


def _cancelled(routed: Routed, channel: grpc.Channel, rng: random.Random) -> None:
    """A call that is cancelled before it is read, or behind its first answer."""
    request = CLASSES["ModelInferRequest"](model_name="model")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.inputs.add(name="stream", datatype="BOOL", shape=[1])
    request.raw_input_contents.extend([pack("BYTES", ["one two"]), pack("BOOL", [True])])
    request.parameters["max_tokens"].int64_param = _ENDLESS
    call = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(
        iter([request.SerializeToString()]), timeout=PATIENCE_S
    )
    if rng.random() < 0.5:
        assert next(call)
    call.cancel()
    with suppress(grpc.RpcError):
        list(call)


_ATTACKS: tuple[Attack, ...] = (_bomb, _noise, _torn, _noise_by_grpc, _cancelled)


def f14(model: Path, count: int, rng: random.Random) -> str:
    """All of these at once: a refusal or what is right, and at the end nothing runs."""
    flags = ("--grpc-port", "0", "--max-body", "64KiB")
    with two_servers(model, *flags) as routed, ThreadPoolExecutor(4) as pool:
        whole = routed.call(_INFER, _BODY)[1]["outputs"]
        before = [one["pid"] for one in servers(routed)]
        target = routed.said.split("gRPC: ")[1].strip().rstrip(")")
        with grpc.insecure_channel(target) as channel:

            def attack(number: int) -> None:
                own = random.Random(number)
                own.choice(_ATTACKS)(routed, channel, own)

            list(pool.map(attack, (rng.randrange(1 << 31) for _ in range(count))))
        assert routed.call(_INFER, _BODY)[1]["outputs"] == whole
        assert [one["pid"] for one in servers(routed)] == before
    return f"{count} attacks over HTTP and gRPC: refused or right, and nothing ran on"
