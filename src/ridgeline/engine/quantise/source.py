"""A model as it is to be written again: tensors, where the engine's matrices lie, and texts.

What a GGUF file says of texts: tokens, which ones begin and end them, a template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.model.files.adapters import AdapterWeights, Base, read_adapter
from ridgeline.model.files.checkpoint import eos_ids_of, load_checkpoint
from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.families import model_from_config, model_from_gguf
from ridgeline.model.files.gguf.file import stored_keys
from ridgeline.model.files.gguf.parts import part_paths, read_gguf_parts
from ridgeline.model.files.gguf.write import stored
from ridgeline.model.files.lossy import as_gguf, numbered, numbers_of
from ridgeline.model.files.safetensors_dir import read_stored
from ridgeline.model.files.tensors import Checkpoint, ModelFileError, Tensor
from ridgeline.text.checkpoint_tokenizer import tokenizer_of
from ridgeline.text.tokenizers.gguf_keys import gguf_vocabulary
from ridgeline.text.tokenizers.tokenizer import Tokenizer, read_spec

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

_OF_GGUF = re.compile(r"blk\.\d+\.(attn_(q|k|v|qkv|output)|ffn_(gate|up|down))\.weight")
_OF_DIRECTORIES = re.compile(r".+\.(q|k|v|o|qkv|gate|up|down|gate_up)_proj\.weight")


class MatrixPlace(NamedTuple):
    """Where a matrix of the engine's lies: a tensor of the file, and which of its rows."""

    name: str
    rows: Ints


class SourceFile(NamedTuple):
    """A model's file.

    Attributes:
        checkpoint: what the engine makes of it.
        raw: its tensors, by their names there.
        metadata: its keys, as they stand there.
        places: of dense matrices of layers, by canonical name.
    """

    checkpoint: Checkpoint
    raw: Mapping[str, Tensor]
    metadata: Mapping[str, bytes]
    places: Mapping[str, MatrixPlace]


class Added(NamedTuple):
    """What an adapter adds to some rows of a tensor: ``b a`` to ``rows``."""

    rows: Ints
    a: Floats
    b: Floats


def read_source(path: Path) -> SourceFile:
    """Read a model that becomes a GGUF file: such a file, several, or a directory of safetensors.

    A directory's tensors are as they would stand in a GGUF file; no matrix is read yet.

    Raises:
        ModelFileError: it is none, damaged or not supported.
    """
    if path.is_dir():
        checkpoint = _unquantised(path)
        form = as_gguf(checkpoint)
        values, raw = form.values, form.tensors
        texts = text_keys(checkpoint, values["general.architecture"])
        metadata = {key: stored(value) for key, value in (values | texts).items()}
    else:
        checkpoint = load_checkpoint(path)
        values, raw = read_gguf_parts(path)
        in_file = stored_keys(next(part_paths(path)))
        metadata = {key: value for key, value in in_file.items() if not key.startswith("split.")}
    _, bound = model_from_gguf(values, _numbered(raw, _OF_GGUF), str(path))
    return SourceFile(checkpoint, raw, metadata, _places(bound, _OF_GGUF))


def _unquantised(path: Path) -> Checkpoint:
    """Return the model of a directory. Raises ModelFileError if it is quantised already."""
    checkpoint = load_checkpoint(path)
    if checkpoint.quantization:
        raise ModelFileError(
            f"{path}: quantised already ({checkpoint.quantization}): give the model it was made of"
        )
    return checkpoint


def read_directory(path: Path) -> SourceFile:
    """Read a directory of safetensors that are not quantised.

    Raises:
        ModelFileError: it is none, damaged or not supported.
    """
    if not path.is_dir():
        raise ModelFileError(
            f"{path}: a GGUF file; int4-gptq is made of a directory of safetensors"
        )
    checkpoint, (config, raw) = _unquantised(path), read_stored(path)
    _, bound = model_from_config(config, _numbered(raw, _OF_DIRECTORIES), str(path))
    places = _places(bound, _OF_DIRECTORIES)
    if not places:
        raise ModelFileError(f"{path}: no matrix of its layers can be written as int4-gptq")
    return SourceFile(checkpoint, raw, {}, places)


def _numbered(raw: Mapping[str, Tensor], matrices: re.Pattern[str]) -> dict[str, Tensor]:
    """Return tensors, with numbers for rows where names say matrices of layers.

    When the engine has bound them, the numbers say where its rows came from.
    """
    return {
        name: numbered(name, tensor.shape)
        if matrices.fullmatch(name) and len(tensor.shape) == 2
        else tensor
        for name, tensor in raw.items()
    }


def _places(bound: Mapping[str, Tensor], matrices: re.Pattern[str]) -> dict[str, MatrixPlace]:
    places = {}
    for name, tensor in bound.items():
        in_file = tensor.name.partition("/")[0]
        if tensor.make is not None and matrices.fullmatch(in_file):
            places[name] = MatrixPlace(in_file, numbers_of(tensor))
    return places


def additions(path: Path, source: SourceFile) -> dict[str, list[Added]]:
    """Return what an adapter adds to the tensors of a file, by their names.

    Raises ModelFileError if it is damaged, or not for this model.
    """
    adapter: AdapterWeights = read_adapter(path, Base.of(source.checkpoint))
    by_name: dict[str, list[Added]] = {}
    for name, part in adapter.parts.items():
        place = source.places.get(name)
        if place is None:
            raise ModelFileError(
                f"{path}: it adapts {name!r}, which cannot be merged into this file"
            )
        by_name.setdefault(place.name, []).append(Added(place.rows, part.a, part.b))
    return by_name


def text_keys(checkpoint: Checkpoint, architecture: str) -> dict[str, Any]:
    """Return keys and values that make of a file's reader the same tokenizer and template.

    ``architecture`` is GGUF's name of the model's.

    Raises:
        ModelFileError: no GGUF file can say it.
    """
    assert isinstance(checkpoint.tokenizer, Path)
    spec, own = read_spec(checkpoint.tokenizer), tokenizer_of(checkpoint)

    def loaded(keys: Mapping[str, Any]) -> Tokenizer:
        metadata = {"general.architecture": architecture, **keys}
        return tokenizer_of(replace(checkpoint, tokenizer=metadata))

    try:
        values = gguf_vocabulary(spec, own, loaded, checkpoint.arch.vocab_size)
    except ModelFileError as error:
        raise ModelFileError(f"{checkpoint.path}: {error}") from None
    bos, begin = checkpoint.bos_id, checkpoint.begin_ids
    if begin not in ((), (bos,)) or own.end_ids:
        raise ModelFileError(
            f"{checkpoint.path}: its texts begin with the tokens {list(begin)} and end with "
            f"{list(own.end_ids)}; GGUF files of decoders can say one token, in front"
        )
    values["general.name"] = checkpoint.path.resolve().name
    values["tokenizer.ggml.add_bos_token"] = bool(begin)
    if bos is not None:
        values["tokenizer.ggml.bos_token_id"] = bos
    if checkpoint.chat_template is not None:
        values["tokenizer.chat_template"] = checkpoint.chat_template
    if checkpoint.tool_template is not None:
        values["tokenizer.chat_template.tool_use"] = checkpoint.tool_template
    return values | _ends(checkpoint, values)


def _ends(checkpoint: Checkpoint, values: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of tokens that end an answer, but for those that any reader takes for ends.

    Raises ModelFileError: there are more than keys.
    """
    keys: dict[str, Any] = {}
    roles = iter(("eos", "eot", "eom"))
    for token in checkpoint.eos_ids:
        reader = ConfigReader(values | keys, str(checkpoint.path))
        if keys and token in eos_ids_of(reader, checkpoint.arch.vocab_size):
            continue
        role = next(roles, None)
        if role is None:
            reader.fail(f"{len(checkpoint.eos_ids)} tokens end an answer, more than a GGUF file "
                        f"can say: shorten eos_token_id in generation_config.json")  # fmt: skip
        keys[f"tokenizer.ggml.{role}_token_id"] = token
    return keys
