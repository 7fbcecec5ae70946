"""How a model directory says that texts become vectors: the files of sentence-transformers.

``modules.json`` lists the steps, and each step's folder has its ``config.json``. Steps other than
the model, one pooling, dense layers and a normalisation would change the vectors, so they are
refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.model.files.tensors import Dense, ModelFileError
from ridgeline.model.shape.model import Pooling

_MAX_JSON_BYTES = 1 << 20
_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_IDENTITY = "torch.nn.modules.linear.Identity"
_SQUASHES = {"Identity": False, "Tanh": True}
_NAMES: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}

Read = Callable[[str, int], bytes | None]  # a file's name and most bytes, to its content


class DenseStep(NamedTuple):
    """A dense layer on vectors: the folder of its weights, and whether tanh follows."""

    folder: str
    squashes: bool


class Steps(NamedTuple):
    """What becomes of a text's final states.

    Attributes:
        pooling: which state is the text's vector.
        normalises: whether that is scaled to length 1 in the end.
        dense: what it goes through before that.
    """

    pooling: Pooling
    normalises: bool
    dense: tuple[DenseStep, ...] = ()


def steps_of(read: Read, where: Path) -> Steps | None:
    """Return the steps from final states to a vector; None if the directory does not say.

    ``read`` returns the content of one of its files.

    Raises:
        ModelFileError: a file is damaged, or asks for what is not supported.
    """
    content = read("modules.json", _MAX_JSON_BYTES)
    if content is None:
        return None
    modules = _parsed(content, where / "modules.json")
    if type(modules) is not list or not all(type(module) is dict for module in modules):
        raise ModelFileError(f"{where / 'modules.json'}: not a list of modules")
    by_kind: dict[str, list[str]] = {"Pooling": [], "Dense": [], "Normalize": []}
    for module in modules:
        kind = str(module.get("type")).rpartition(".")[2]
        if kind in by_kind:
            behind = list(by_kind)[list(by_kind).index(kind) + (kind == "Dense") :]
            if any(by_kind[later] for later in behind):
                raise ModelFileError(f"{where / 'modules.json'}: {kind} stands where it may not")
            by_kind[kind].append(str(module.get("path")))
        elif kind != "Transformer":
            raise ModelFileError(
                f"{where / 'modules.json'}: the module {kind[:40]!r} is not supported; supported: "
                f"Transformer, Pooling, Dense, Normalize"
            )
    if not by_kind["Pooling"]:
        raise ModelFileError(f"{where / 'modules.json'}: no module says how states are pooled")
    name = f"{by_kind['Pooling'][0]}/config.json"
    pooling = _mode(read(name, _MAX_JSON_BYTES), where / name)
    dense = []
    for folder in by_kind["Dense"]:
        name = f"{folder}/config.json"
        dense.append(_dense(read(name, _MAX_JSON_BYTES), where / name, folder))
    return Steps(pooling, bool(by_kind["Normalize"]), tuple(dense))


def check_dense(dense: Sequence[Dense], size: int, where: Path) -> None:
    """Raise ModelFileError unless the layers take a vector of ``size`` one after another."""
    for layer in dense:
        shape = layer.weight.shape
        if len(shape) != 2 or shape[1] != size:
            raise ModelFileError(
                f"{where}: a dense layer of shape {shape} cannot take vectors of {size}"
            )
        size = shape[0]
        if layer.bias is not None and layer.bias.shape != (size,):
            raise ModelFileError(
                f"{where}: a dense layer of shape {shape} has a bias of {layer.bias.shape}"
            )


def _dense(content: bytes | None, where: Path, folder: str) -> DenseStep:
    config = _object(content, where)
    name = str(config.get("activation_function", _IDENTITY)).rpartition(".")[2]
    if name not in _SQUASHES:
        raise ModelFileError(
            f"{where}: activation_function {name[:40]!r} is not supported; supported: "
            f"{', '.join(_SQUASHES)}"
        )
    return DenseStep(folder, _SQUASHES[name])


def _object(content: bytes | None, where: Path) -> dict[str, Any]:
    if content is None:
        raise ModelFileError(f"{where}: modules.json names it, but it is missing")
    config = _parsed(content, where)
    if type(config) is not dict:
        raise ModelFileError(f"{where}: not a JSON object")
    return config


def _mode(content: bytes | None, where: Path) -> Pooling:
    config = _object(content, where)
    on = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
    modes = [_MODES.get(name) for name in on]
    if not on and type(config.get("pooling_mode")) is str:
        on = [config["pooling_mode"]]
        modes = [_NAMES.get(on[0])]
    mode = modes[0] if len(modes) == 1 else None
    if mode is None:
        raise ModelFileError(
            f"{where}: pooling by {' and '.join(on)[:80] or 'nothing'} is not supported; "
            f"supported is one of {', '.join(_NAMES)}"
        )
    return mode


def _parsed(content: bytes, where: Path) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{where}: not JSON: {error}") from None
