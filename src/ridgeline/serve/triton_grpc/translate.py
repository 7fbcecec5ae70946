"""Requests of gRPC as requests of the routes under /v2, and answers of those as messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ridgeline.serve.dialects.triton.protocol import MAX_DIMENSIONS, MAX_TENSORS
from ridgeline.serve.dialects.triton.routes import LENGTH
from ridgeline.serve.dialects.triton.tensors import pack
from ridgeline.serve.triton_grpc.messages import CLASSES, DATA_TYPES

EMPTY_LAST = "triton_enable_empty_final_response"  # asks for a last message without outputs
_IS_LAST = "triton_final_response"
_CONTENTS = {  # where the elements of a tensor stand; what is not named are the narrow integers
    "BYTES": "bytes_contents",
    "BOOL": "bool_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}

_NARROW = ("int_contents", "uint_contents")


def path_of(model: str, version: str, ending: str) -> str:
    """Return the path of a model's route; without a version it is the only one."""
    return f"/v2/models/{model}" + (f"/versions/{version}" if version else "") + ending


def infer_request(request: Any) -> tuple[dict[str, str], bytes]:
    """Return headers and body of the request to infer that a ModelInferRequest stands for.

    Raises ValueError if its parts do not fit together.
    """
    _check_numbers(request)
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        message = f"raw_input_contents has {len(raw)} tensors, but there are {len(request.inputs)}"
        raise ValueError(f"{message} inputs")
    inputs = []
    for i, tensor in enumerate(request.inputs):
        shown = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        parameters = _values(tensor.parameters)
        if raw:
            parameters["binary_data_size"] = len(raw[i])
        else:
            shown["data"] = _elements(tensor)
        inputs.append(shown | ({"parameters": parameters} if parameters else {}))
    given = _values(request.parameters)
    given.pop(EMPTY_LAST, None)
    head: dict[str, Any] = {"inputs": inputs, "parameters": given}
    head |= {"id": request.id} if request.id else {}
    if request.outputs:
        head["outputs"] = [
            {"name": one.name, "parameters": _values(one.parameters)} for one in request.outputs
        ]
    data = json.dumps(head).encode()
    return {LENGTH: str(len(data))}, b"".join([data, *raw])


def _check_numbers(request: Any) -> None:
    """Raise ValueError for more tensors or dimensions than infer takes; see ``check_parts``."""
    inputs, outputs = request.inputs, request.outputs
    if max(len(inputs), len(outputs)) > MAX_TENSORS:
        raise ValueError(f"a request may have at most {MAX_TENSORS} inputs, and as many outputs")
    if any(len(one.shape) > MAX_DIMENSIONS for one in inputs):
        raise ValueError(f"a tensor may have at most {MAX_DIMENSIONS} dimensions")


def _elements(tensor: Any) -> list[Any]:
    """Return the elements of a tensor without raw bytes. Raises ValueError if they are no text."""
    narrow = _NARROW[tensor.datatype.startswith("UINT")]
    values = list(getattr(tensor.contents, _CONTENTS.get(tensor.datatype, narrow)))
    try:
        return [one.decode() if isinstance(one, bytes) else one for one in values]
    except UnicodeDecodeError:
        raise ValueError(f"the input {tensor.name[:80]!r} is not UTF-8") from None


def _values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {name: one.WhichOneof("parameter_choice") for name, one in parameters.items()}
    return {name: getattr(parameters[name], kind) for name, kind in chosen.items() if kind}


def infer_response(answer: Mapping[str, Any]) -> Any:
    """Return the ModelInferResponse of an answer of infer, which has its elements in JSON."""
    named = {name: answer[name] for name in ("model_name", "model_version", "id") if name in answer}
    response = CLASSES["ModelInferResponse"](**named)
    for one in answer["outputs"]:
        response.outputs.add(name=one["name"], datatype=one["datatype"], shape=one["shape"])
        response.raw_output_contents.append(pack(one["datatype"], one["data"]))
    return response


def last_response(request: Any) -> Any:
    """Return the message without outputs that ends the answers to a request."""
    response = CLASSES["ModelInferResponse"](model_name=request.model_name, id=request.id)
    response.parameters[_IS_LAST].bool_param = True
    return response


def model_config(answer: Mapping[str, Any]) -> Any:
    """Return the ModelConfigResponse of the configuration that the route shows."""
    config = {
        name: [one | {"data_type": DATA_TYPES[one["data_type"]]} for one in value]
        if name in ("input", "output")
        else value
        for name, value in answer.items()
    }
    return CLASSES["ModelConfigResponse"](config=config)
