"""Answers as tensors of the Open Inference Protocol, and as the objects of Triton's generate."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from ridgeline.serve.answer.reply import PING, SSE, RawBody, sse
from ridgeline.serve.answer.response_builder import Choice, ResponseBuilder
from ridgeline.serve.dialects.triton.schemas import Generated, Inferred, OutputTensor
from ridgeline.serve.dialects.triton.tensors import pack
from ridgeline.serve.engine.request_stream import StreamEvent
from ridgeline.serve.http.errors import ApiError

VERSION = "1"  # the only one of each model
OUTPUTS = {  # of a generative model; all but the first only on request
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}


class Output(NamedTuple):
    """A tensor of an answer."""

    name: str
    datatype: str
    shape: list[int]
    values: list[Any]


def generated(model: str, outputs: Sequence[Output]) -> Generated:
    """Return the object of Triton's generate; an output of one element stands there alone."""
    shown = {one.name: one.values[0] if len(one.values) == 1 else one.values for one in outputs}
    return cast(Generated, {"model_name": model, "model_version": VERSION, **shown})


def inferred(model: str, outputs: Sequence[Output], *, request_id: str | int | None) -> Inferred:
    """Return the protocol's answer in JSON."""
    tensors: list[OutputTensor] = [
        {"name": one.name, "datatype": one.datatype, "shape": one.shape, "data": one.values}
        for one in outputs
    ]
    if request_id is None:
        return {"model_name": model, "model_version": VERSION, "outputs": tensors}
    name = str(request_id)
    return {"model_name": model, "model_version": VERSION, "id": name, "outputs": tensors}


def packed(answer: Inferred, wants_bytes: Callable[[str], bool]) -> Inferred | RawBody:
    """Return an answer with those tensors behind its JSON that are wanted as bytes."""
    tensors, behind = [], b""
    for tensor in answer["outputs"]:
        if wants_bytes(tensor["name"]):
            data = pack(tensor["datatype"], tensor.pop("data"))
            tensor["parameters"] = {"binary_data_size": len(data)}
            behind += data
        tensors.append(tensor)
    if not any("parameters" in tensor for tensor in tensors):
        return answer
    head = json.dumps({**answer, "outputs": tensors}, separators=(",", ":")).encode()
    length = {"inference-header-content-length": str(len(head))}
    return RawBody(head + behind, {"content-type": "application/octet-stream", **length})


class TritonWriter:
    """Answers, whole or as events."""

    stream_type, ping = SSE, PING

    def __init__(
        self,
        answers: ResponseBuilder,
        model: str,
        fingerprint: str,
        *,
        names: Sequence[str],
        write: Callable[[str, list[Output]], Generated | Inferred],
        pack: Callable[[Any], Generated | Inferred | RawBody],
    ) -> None:
        """Write the outputs of ``answers`` that have ``names``.

        ``write`` makes an object of the model's name and of outputs; ``pack`` says how one that is
        the whole answer is sent.
        """
        self._answers, self._model = answers, model
        self._names, self._write, self._pack = list(names), write, pack

    def whole(self) -> Generated | Inferred | RawBody:
        """Return the whole answer."""
        return self._pack(self._write(self._model, self._outputs(self._answers.whole())))

    def take(self, event: StreamEvent) -> list[bytes]:
        """Take an event; return the new parts of a streamed answer as server-sent events."""
        return self._answers.take_written(event, self._chunk)

    def _chunk(self, choice: Choice) -> bytes:
        """Return a piece of text as an event; the end is one if more than text is wanted."""
        is_end = choice["finish_reason"] is not None
        if is_end and self._names == ["text_output"]:
            return b""
        outputs = self._outputs([choice])
        shown = outputs if is_end else [one for one in outputs if one.name == "text_output"]
        return sse(self._write(self._model, shown)) if shown else b""

    def _outputs(self, choices: Sequence[Choice]) -> list[Output]:
        usage = self._answers.usage()
        values: dict[str, list[Any]] = {
            "text_output": [choice["text"] for choice in choices],
            "finish_reason": [choice["finish_reason"] for choice in choices],
            "num_input_tokens": [usage["prompt_tokens"]],
            "num_output_tokens": [usage["completion_tokens"]],
        }
        return [
            Output(name, OUTPUTS[name], [len(values[name])], values[name]) for name in self._names
        ]

    def ending(self) -> bytes:
        """Return nothing: the end of the body is the end."""
        return b""

    def failure(self, error: ApiError) -> bytes:
        """Return the server-sent event of a stream that fails."""
        return sse({"error": str(error)})
