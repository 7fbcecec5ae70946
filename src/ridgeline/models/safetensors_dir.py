"""Model directories in Hugging Face layout: config.json, safetensors, tokenizer and templates.

Nothing here is ever unpickled or executed, and no file outside the directory is opened, whatever
the directory's files and links say. Weights are mapped, not read. This module does not know what
the names of tensors mean.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ridgeline.models import RECOMMENDED
from ridgeline.models.families import architecture, model_from_config
from ridgeline.models.identity.contents import Contents
from ridgeline.models.quantized import read_quantized
from ridgeline.models.sentence import DenseStep, check_dense, ids_between, steps_of
from ridgeline.models.tensors import Checkpoint, Dense, ModelFileError, Tensor, naming

_ITEM_BYTES = {
    "F32": 4, "F16": 2, "BF16": 2, "I32": 4, "I64": 8, "I8": 1, "U8": 1, "F8_E4M3": 1,
}  # fmt: skip
_MAX_JSON_BYTES = 16 << 20
_MAX_TOKENIZER_BYTES = 64 << 20  # the largest published tokenizer.json has half of this
_MAX_TEMPLATE_BYTES = 1 << 20
_INDEX = "model.safetensors.index.json"
_NUMBERS = ".position_ids"


def load_directory(path: Path) -> Checkpoint:
    """Open the model directory at ``path``.

    Raises:
        ModelFileError: something is missing, damaged, hostile or not supported.
    """
    folder = Folder(path)
    config = folder.json("config.json")
    if config is None:
        raise ModelFileError(f"{path}: no config.json, so not a Hugging Face model directory")
    tokenizer = folder.find("tokenizer.json")
    if tokenizer is None:
        raise ModelFileError(f"{path}: no tokenizer.json; save the model with a fast tokenizer")
    quantized = read_quantized(config, read_weights(folder), str(path))
    arch, tensors = model_from_config(
        quantized.config, quantized.tensors, str(path), quantized.spare
    )
    steps = steps_of(folder.read, path)
    if steps is not None:
        arch = replace(arch, pooling=steps.pooling)
    dense = tuple(_dense(folder, step) for step in steps.dense) if steps else ()
    check_dense(dense, arch.hidden_size, path)
    between = ids_between(folder.json("tokenizer.json", _MAX_TOKENIZER_BYTES) or {})
    if arch.num_segments > 1 and between:
        arch = replace(arch, separator=between[0])
    generation = folder.json("generation_config.json") or {}
    text = folder.json("tokenizer_config.json") or {}

    eos_ids = _ids(generation.get("eos_token_id", config.get("eos_token_id")), "eos_token_id", path)
    bos_ids = _ids(generation.get("bos_token_id", config.get("bos_token_id")), "bos_token_id", path)
    eos_ids += _id_of(text, "eos_token")
    bos_ids += _id_of(text, "bos_token")
    begins = text.get("add_bos_token")
    begin_ids = bos_ids[:1] if begins else []
    if begins is None:
        begin_ids = _beginning(folder.json("tokenizer.json", _MAX_TOKENIZER_BYTES) or {})
        bos_ids = begin_ids or bos_ids
    ends = text.get("add_eos_token")
    # An id beyond the vocabulary can never be produced nor looked up.
    eos_ids, bos_ids, begin_ids = (
        [i for i in ids if i < arch.vocab_size] for ids in (eos_ids, bos_ids, begin_ids)
    )
    return Checkpoint(
        path=path,
        arch=arch,
        tensors=tensors,
        eos_ids=tuple(dict.fromkeys(eos_ids)),
        bos_id=bos_ids[0] if bos_ids else None,
        begin_ids=tuple(begin_ids),
        chat_template=_chat_template(folder, text.get("chat_template")),
        tokenizer=tokenizer,
        family=architecture(config),
        generation_defaults=_sampling_defaults(generation, path),
        between_ids=between,
        normalises=steps is None or steps.normalises,
        dense=dense,
        end_ids=None if ends is None else tuple(eos_ids[:1] if ends else ()),
        quantization=quantized.description,
        contents=Contents(folder.found),
    )


class Folder:
    """A directory whose files are found by name and never outside of it.

    Attributes:
        found: where the files are that were asked for and are there, by name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Path] = {}
        self._root = Path(os.path.realpath(path))
        # A snapshot in the hub's cache consists of links into its sibling "blobs".
        repository = self._root.parent.parent
        if self._root.parent.name == "snapshots" and repository.name.startswith("models--"):
            self._root = repository

    def find(self, name: str) -> Path | None:
        """Return where the file called ``name`` really is, None when there is none."""
        if "\0" in name:
            raise ModelFileError(f"{self.path}: {name!r} is not a file name")
        target = Path(os.path.realpath(self.path / name))
        if not target.is_relative_to(self._root):  # through a link, "..", or a leading "/"
            raise ModelFileError(
                f"{self.path}: {name!r} leads out of the directory; put the file itself there"
            )
        try:
            if not stat.S_ISREG(target.stat().st_mode):
                return None
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:  # such as a name that is too long
            raise ModelFileError(f"{self.path / name}: {error.strerror}") from None
        self.found[name] = target
        return target

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """Return the bytes of a small file, None when there is none."""
        target = self.find(name)
        if target is None:
            return None
        size = target.stat().st_size
        if size > max_bytes:
            raise ModelFileError(f"{self.path / name}: {size} bytes, more than {max_bytes}")
        with naming(self.path / name):
            return target.read_bytes()

    def json(self, name: str, max_bytes: int = _MAX_JSON_BYTES) -> dict[str, Any] | None:
        """Return the JSON object in the file called ``name``, None when there is none."""
        content = self.read(name, max_bytes)
        return None if content is None else _parse_object(content, self.path / name)


def _number_of_object(value: dict[str, Any]) -> Any:
    """Return an object as it is, but an infinite number where transformers wrote one as an object.

    JSON has no such number.
    """
    return float("inf") if value == {"__float__": "Infinity"} else value


def _parse_object(content: bytes, where: Path) -> dict[str, Any]:
    try:
        value = json.loads(content, object_hook=_number_of_object)
    except ValueError as error:
        raise ModelFileError(f"{where}: not JSON: {error}") from None
    except RecursionError:
        raise ModelFileError(f"{where}: the JSON is nested too deeply") from None
    if type(value) is not dict:
        raise ModelFileError(f"{where}: the JSON is not an object")
    return value


def read_weights(folder: Folder) -> dict[str, Tensor]:
    """Return all tensors of the directory under their files' names."""
    single = folder.find("model.safetensors")
    if single is not None:
        return map_safetensors(single)
    index = folder.json(_INDEX)
    if index is None:
        _refuse_other_weights(folder.path)
    weight_map = index.get("weight_map")
    if type(weight_map) is not dict or not all(type(v) is str for v in weight_map.values()):
        raise ModelFileError(f"{folder.path / _INDEX}: weight_map does not map names to files")
    tensors: dict[str, Tensor] = {}
    for shard in dict.fromkeys(weight_map.values()):
        target = folder.find(shard)
        if target is None:
            raise ModelFileError(f"{folder.path / shard}: the index names it, but it is missing")
        tensors |= {n: t for n, t in map_safetensors(target).items() if weight_map.get(n) == shard}
    missing = sorted(weight_map.keys() - tensors.keys())
    if missing:
        shard = weight_map[missing[0]]
        raise ModelFileError(f"{folder.path / shard}: tensor {missing[0]!r} is missing")
    return tensors


def _refuse_other_weights(path: Path) -> NoReturn:
    pickles = sorted(f.name for f in path.iterdir() if f.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        raise ModelFileError(
            f"{path}: {pickles[0]} is a pickle, which can run any code when it is opened, and is "
            "never read; fetch the model's safetensors or GGUF version"
        )
    raise ModelFileError(f"{path}: neither model.safetensors nor {_INDEX}; fetch the weights again")


def _dense(folder: Folder, step: DenseStep) -> Dense:
    name = f"{step.folder}/model.safetensors"
    path = folder.find(name)
    if path is None:
        raise ModelFileError(f"{folder.path / name}: modules.json names it, but it is missing")
    tensors = map_safetensors(path)
    unknown = sorted(tensors.keys() - {"linear.weight", "linear.bias"})
    if unknown or "linear.weight" not in tensors:
        problem = f"tensor {unknown[0]!r} is no part" if unknown else "linear.weight is missing"
        raise ModelFileError(f"{path}: {problem} of a dense layer")
    return Dense(tensors["linear.weight"], tensors.get("linear.bias"), step.squashes)


def map_safetensors(path: Path) -> dict[str, Tensor]:
    """Map one safetensors file; return read-only views of its tensors.

    The library checks the header (sizes, offsets, no overlaps, no holes) and cannot hand out bf16
    to numpy, so the bytes are taken from a map of our own.
    """
    size = path.stat().st_size
    with naming(path), path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > min(size - 8, _MAX_JSON_BYTES):
            raise ModelFileError(
                f"{path}: a header of {header_bytes} bytes in a file of {size}; fetch it again"
            )
        header = _parse_object(file.read(header_bytes), path)
        try:
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{path}: {error}; fetch it again") from None
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    raw: NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)
    header.pop("__metadata__", None)
    # Older files of encoders have the numbers 0, 1, 2, ... as a tensor.
    header = {name: entry for name, entry in header.items() if not name.endswith(_NUMBERS)}
    return {name: _view(raw, 8 + header_bytes, name, entry, path) for name, entry in header.items()}


def _view(
    raw: NDArray[np.uint8], data_begin: int, name: str, entry: dict[str, Any], path: Path
) -> Tensor:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if dtype not in _ITEM_BYTES:
        supported = ", ".join(_ITEM_BYTES)
        raise ModelFileError(f"{path}: tensor {name!r} has type {dtype}; supported: {supported}")
    num_bytes = math.prod(shape) * _ITEM_BYTES[dtype]
    # Said by the library as well; said again because a JSON key may appear twice.
    if num_bytes == 0 or end - begin != num_bytes or data_begin + end > raw.size:
        raise ModelFileError(f"{path}: tensor {name!r} of shape {shape} has {end - begin} bytes")
    # A vector has one row per element, so that Tensor.rows selects elements of it.
    rows = math.prod(shape[:-1]) if len(shape) > 1 else math.prod(shape)
    data = raw[data_begin + begin : data_begin + end].reshape(rows, num_bytes // rows)
    return Tensor(name, dtype, shape, data)


def _ids(value: Any, key: str, path: Path) -> list[int]:
    ids = value if type(value) is list else [] if value is None else [value]
    if any(type(i) is not int or i < 0 for i in ids):
        raise ModelFileError(f"{path}: {key} is {value!r}, not a token id or a list of them")
    return list(ids)


def _id_of(text: dict[str, Any], role: str) -> list[int]:
    """Return the id of the token that tokenizer_config.json gives ``role``, if it says."""
    token = text.get(role)
    content = token.get("content") if type(token) is dict else token
    added = text.get("added_tokens_decoder")
    if content is None or type(added) is not dict:
        return []
    return [
        int(number)
        for number, entry in added.items()
        if type(entry) is dict and entry.get("content") == content and number.isdecimal()
    ]


def _beginning(tokenizer: dict[str, Any]) -> list[int]:
    """Return the ids that tokenizer.json's post-processor puts in front of a single text."""
    step = tokenizer.get("post_processor")
    steps = step.get("processors", [step]) if type(step) is dict else []
    try:
        for step in steps:
            if step["type"] in ("BertProcessing", "RobertaProcessing"):
                return _ids(step["cls"][1], "cls", Path("tokenizer.json"))
            if step["type"] == "TemplateProcessing":
                first = takewhile(lambda piece: "SpecialToken" in piece, step["single"])
                tokens = [step["special_tokens"][piece["SpecialToken"]["id"]] for piece in first]
                ids = [number for token in tokens for number in token["ids"]]
                return _ids(ids, "ids", Path("tokenizer.json"))
    except (KeyError, IndexError, TypeError):
        pass  # the tokenizers library will say what is wrong with it
    return []


def _chat_template(folder: Folder, inline: Any) -> str | None:
    """Return the chat template: the file of its own, or tokenizer_config.json's default."""
    content = folder.read("chat_template.jinja", _MAX_TEMPLATE_BYTES)
    if content is not None:
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise ModelFileError(f"{folder.path / 'chat_template.jinja'}: not UTF-8") from None
    if type(inline) is list:
        named = [t for t in inline if type(t) is dict and t.get("name") == "default"]
        inline = named[0].get("template") if named else None
    if inline is not None and type(inline) is not str:
        raise ModelFileError(f"{folder.path}: chat_template in tokenizer_config.json is not text")
    return inline


def _sampling_defaults(generation: dict[str, Any], path: Path) -> dict[str, float | int]:
    defaults = {key: generation[key] for key in RECOMMENDED if generation.get(key) is not None}
    for key, value in defaults.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ModelFileError(
                f"{path}: {key} in generation_config.json is {value!r:.80}, not a number"
            )
    return defaults
