"""The Open Inference Protocol before several models: over HTTP, and over gRPC."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import grpc

from ridgeline.serve.dialects.triton.tensors import pack, unpack
from ridgeline.serve.triton_grpc.messages import CLASSES, SERVICE
from tests.fleet.test_router import ASK, Routed, routed, routing

__all__ = ["routed"]  # a fixture


def test_a_path_of_triton_names_its_model(routed: Routed) -> None:
    for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/c/ready"):
        assert routed.call(path)[0] == 200
    index = routed.call("/v2/repository/index", b"")[1]
    assert {"a", "b", "c"} <= {one["name"] for one in index}
    text = routed.complete("a")
    body = {"text_input": ASK["prompt"], "parameters": ASK}
    for path in ("/v2/models/a/generate", "/v2/models/a/versions/1/generate"):
        status, answer, _ = routed.call(path, body)
        assert (status, answer["text_output"], answer["model_name"]) == (200, text, "a")
    stream = routed.call("/v2/models/a/generate_stream", body)[1]
    events = [json.loads(line[6:]) for line in stream.splitlines() if line]
    assert "".join(event["text_output"] for event in events) == text
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1]}
    raw = pack("BYTES", [ASK["prompt"]])
    inputs = [tensor | {"parameters": {"binary_data_size": len(raw)}}]
    head = json.dumps({"inputs": inputs, "parameters": ASK}).encode()
    packed, form = gzip.compress(head + raw), {"inference_header_content_length": str(len(head))}
    _, answer, _ = routed.call("/v2/models/a/infer", packed, content_encoding="gzip", **form)
    assert answer["outputs"][0]["data"] == [text]
    assert routed.call("/v2/models/a")[1]["inputs"][0]["name"] == "text_input"
    assert routed.call("/v2/models/nope/infer", b"")[:1] == (404,)
    assert routed.call("/v2/models/a/versions/7/ready")[0] == 404


def test_its_grpc_names_models_too(folder: Path, tmp_path: Path) -> None:
    with routing(folder, tmp_path / "log", "--grpc-port", "0") as routed:
        request = CLASSES["ModelInferRequest"](model_name="b")
        request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        request.raw_input_contents.append(pack("BYTES", [ASK["prompt"]]))
        request.parameters["temperature"].int64_param = 0
        request.parameters["max_tokens"].int64_param = ASK["max_tokens"]
        request.parameters["ignore_eos"].bool_param = True
        with grpc.insecure_channel(routed.said.split("gRPC: ")[1].strip()) as channel:
            answer = channel.unary_unary(f"/{SERVICE}/ModelInfer")(request.SerializeToString())
        [text] = CLASSES["ModelInferResponse"].FromString(answer).raw_output_contents
        assert unpack("BYTES", text, 1) == [routed.complete("b")]
