"""The messages of Triton's gRPC service, made from this table as the program starts.

There is no generated code, which would fit few versions of protobuf alone, and no pool of
descriptors is shared, so that a program may use Triton's own client beside us. Only what is
answered stands here, in the numbers of Triton's grpc_service.proto and model_config.proto; fields
that are not known are skipped by protobuf itself.

A message's parts are counted by its bytes before it is parsed. Two bytes are a tensor, which takes
80 of memory: 8 MB would be 340 MB, and would stop the event loop while they are made. The format is
that of protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from ridgeline.serve.dialects.triton.protocol import MAX_TENSORS
from ridgeline.serve.http.request_body import MAX_PARTS, MAX_VALUES

SERVICE = "inference.GRPCInferenceService"
_PACKAGE = "inference"
_SCALARS = {
    "bool": Field.TYPE_BOOL,
    "bytes": Field.TYPE_BYTES,
    "double": Field.TYPE_DOUBLE,
    "float": Field.TYPE_FLOAT,
    "int32": Field.TYPE_INT32,
    "int64": Field.TYPE_INT64,
    "string": Field.TYPE_STRING,
    "uint32": Field.TYPE_UINT32,
    "uint64": Field.TYPE_UINT64,
}
# Name, number and type of each field; "*" is repeated, "%" a map from strings, "|" one of several.
_NAMED = "name 1 string, version 2 string"
_PARAMETERS = "%InferParameter"
_TENSOR = f"name 1 string, datatype 2 string, shape 3 *int64, parameters 4 {_PARAMETERS}"
_MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "live 1 bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "ready 1 bool",
    "ModelReadyRequest": _NAMED,
    "ModelReadyResponse": "ready 1 bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "name 1 string, version 2 string, extensions 3 *string",
    "ModelMetadataRequest": _NAMED,
    "TensorMetadata": "name 1 string, datatype 2 string, shape 3 *int64",
    "ModelMetadataResponse": (
        "name 1 string, versions 2 *string, platform 3 string, "
        "inputs 4 *TensorMetadata, outputs 5 *TensorMetadata"
    ),
    "InferParameter": (
        "bool_param 1 |bool, int64_param 2 |int64, string_param 3 |string, "
        "double_param 4 |double, uint64_param 5 |uint64"
    ),
    "InferTensorContents": (
        "bool_contents 1 *bool, int_contents 2 *int32, int64_contents 3 *int64, "
        "uint_contents 4 *uint32, uint64_contents 5 *uint64, fp32_contents 6 *float, "
        "fp64_contents 7 *double, bytes_contents 8 *bytes"
    ),
    "InferInputTensor": f"{_TENSOR}, contents 5 InferTensorContents",
    "InferRequestedOutputTensor": f"name 1 string, parameters 2 {_PARAMETERS}",
    "ModelInferRequest": (
        f"model_name 1 string, model_version 2 string, id 3 string, parameters 4 {_PARAMETERS}, "
        "inputs 5 *InferInputTensor, outputs 6 *InferRequestedOutputTensor, "
        "raw_input_contents 7 *bytes"
    ),
    "InferOutputTensor": _TENSOR,
    "ModelInferResponse": (
        f"model_name 1 string, model_version 2 string, id 3 string, parameters 4 {_PARAMETERS}, "
        "outputs 5 *InferOutputTensor, raw_output_contents 6 *bytes"
    ),
    "ModelStreamInferResponse": "error_message 1 string, infer_response 2 ModelInferResponse",
    "ModelConfigRequest": _NAMED,
    "ModelInput": "name 1 string, data_type 2 int32, dims 4 *int64, optional 8 bool",
    "ModelOutput": "name 1 string, data_type 2 int32, dims 3 *int64",
    "ModelTransactionPolicy": "decoupled 1 bool",
    "ModelConfig": (
        "name 1 string, platform 2 string, max_batch_size 4 int32, input 5 *ModelInput, "
        "output 6 *ModelOutput, backend 17 string, "
        "model_transaction_policy 19 ModelTransactionPolicy"
    ),
    "ModelConfigResponse": "config 1 ModelConfig",
    "ModelStatisticsRequest": _NAMED,
    "StatisticDuration": "count 1 uint64, ns 2 uint64",
    "InferStatistics": (
        "success 1 StatisticDuration, fail 2 StatisticDuration, queue 3 StatisticDuration, "
        "compute_input 4 StatisticDuration, compute_infer 5 StatisticDuration, "
        "compute_output 6 StatisticDuration, cache_hit 7 StatisticDuration, "
        "cache_miss 8 StatisticDuration"
    ),
    "InferBatchStatistics": (
        "batch_size 1 uint64, compute_input 2 StatisticDuration, "
        "compute_infer 3 StatisticDuration, compute_output 4 StatisticDuration"
    ),
    "ModelStatistics": (
        f"{_NAMED}, last_inference 3 uint64, inference_count 4 uint64, "
        "execution_count 5 uint64, inference_stats 6 InferStatistics, "
        "batch_stats 7 *InferBatchStatistics"
    ),
    "ModelStatisticsResponse": "model_stats 1 *ModelStatistics",
    "RepositoryIndexRequest": "repository_name 1 string, ready 2 bool",
    "ModelIndex": "name 1 string, version 2 string, state 3 string, reason 4 string",
    "RepositoryIndexResponse": "models 1 *ModelIndex",
    "RepositoryModelLoadRequest": "repository_name 1 string, model_name 2 string",
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": "repository_name 1 string, model_name 2 string",
    "RepositoryModelUnloadResponse": "",
}
# Of model_config.proto: the numbers of the types that the routes name.
DATA_TYPES = {"TYPE_BOOL": 1, "TYPE_UINT32": 4, "TYPE_FP32": 11, "TYPE_STRING": 13}
_MOST_FIELDS = MAX_PARTS + 8 * MAX_TENSORS  # texts and parameters, and what tensors have besides
_FIXED_BYTES = {FieldDescriptor.CPPTYPE_FLOAT: 4, FieldDescriptor.CPPTYPE_DOUBLE: 8}
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5  # what follows a field's number
_ENDLESS = bytes(range(128, 256))  # bytes of a number that goes on


def _file() -> FileDescriptorProto:
    file = FileDescriptorProto(name="ridgeline/triton.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in filter(None, fields.split(", ")):
            _add_field(message, *field.split(" "))
    return file


def _add_field(message: Any, name: str, number: str, kind: str) -> None:
    field = message.field.add(name=name, number=int(number), label=Field.LABEL_OPTIONAL)
    mark, kind = (kind[0], kind[1:]) if kind[0] in "*%|" else ("", kind)
    if mark:
        field.label = Field.LABEL_OPTIONAL if mark == "|" else Field.LABEL_REPEATED
    if mark == "|":
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    if mark == "%":
        entry = message.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        _add_field(entry, "key", "1", "string")
        _add_field(entry, "value", "2", kind)
        kind = f"{message.name}.{entry.name}"
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


def _classes() -> dict[str, Any]:
    pool = DescriptorPool()
    pool.Add(_file())
    descriptors = {name: pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in _MESSAGES}
    return {name: GetMessageClass(descriptor) for name, descriptor in descriptors.items()}


CLASSES = _classes()


def check_parts(kind: str, data: bytes) -> None:
    """Check that a message of this kind has no more parts than a request in JSON may have.

    Raises ValueError if it has more, and DecodeError if it is no message.
    """
    num_fields = num_elements = 0
    to_read = [(_layout(CLASSES[kind].DESCRIPTOR), 0, len(data))]
    while to_read:
        layout, at, end = to_read.pop()
        while at < end:
            num_fields += 1
            if num_fields > _MOST_FIELDS:
                raise _too_many()
            tag, at = _varint(data, at)
            number, follows = tag >> 3, tag & 7
            if follows == _LENGTH:
                size, at = _varint(data, at)
                inside = layout.get(number)
                if isinstance(inside, dict):
                    to_read.append((inside, at, at + size))
                elif inside is not None:
                    num_elements += _num_elements(inside, data[at : at + size])
                at += size
            elif follows == _VARINT:
                _, at = _varint(data, at)
            elif follows in (_EIGHT_BYTES, _FOUR_BYTES):
                at += 8 if follows == _EIGHT_BYTES else 4
            else:
                raise DecodeError("groups are not read")
        if at != end:
            raise DecodeError("a field is longer than its message")
    if num_elements > MAX_VALUES:
        raise _too_many()


def _too_many() -> ValueError:
    return ValueError(
        f"a request may have at most {MAX_VALUES} elements and parameters, of which at most "
        f"{MAX_PARTS} are texts or parameters"
    )


@cache
def _layout(message: Any) -> dict[int, Any]:
    """Return what holds parts, by number: the same of a message, or the bytes of an element.

    Elements that take as many as they need have 0. A map's entries are counted, but not read: what
    stands in them more than once takes no memory.
    """
    layout: dict[int, Any] = {}
    for field in message.fields:
        inside = field.message_type
        if (
            inside is None
            and field.is_repeated
            and field.cpp_type != FieldDescriptor.CPPTYPE_STRING
        ):
            layout[field.number] = _FIXED_BYTES.get(field.cpp_type, 0)
        elif inside is not None and not inside.GetOptions().map_entry:
            layout[field.number] = _layout(inside)
    return layout


def _num_elements(element_bytes: int, data: bytes) -> int:
    if element_bytes:
        return len(data) // element_bytes
    return len(data.translate(None, _ENDLESS))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at a place, and where it ends. Raises DecodeError."""
    number = shift = 0
    for byte in data[at : at + 10]:
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7
    raise DecodeError("a number does not end")
