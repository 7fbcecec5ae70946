"""How a model directory says that texts become vectors: the files of sentence-transformers.

``modules.json`` lists the steps, and each step's folder has its ``config.json``. Steps other than
the model, one pooling and a normalisation would change the vectors, so they are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeline.models.tensors import ModelFileError
from ridgeline.physics.arch import Pooling

_MAX_JSON_BYTES = 1 << 20
_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_NAMES: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}

Read = Callable[[str, int], bytes | None]  # a file's name and most bytes, to its content


def pooling_of(read: Read, where: Path) -> tuple[Pooling, bool] | None:
    """Return which final state is a text's vector, and whether it is scaled to length 1.

    None if the directory does not say. ``read`` returns the content of one of its files.

    Raises:
        ModelFileError: a file is damaged, or asks for what is not supported.
    """
    content = read("modules.json", _MAX_JSON_BYTES)
    if content is None:
        return None
    modules = _parsed(content, where / "modules.json")
    if type(modules) is not list or not all(type(module) is dict for module in modules):
        raise ModelFileError(f"{where / 'modules.json'}: not a list of modules")
    pooling: Pooling = ""
    normalises = False
    for module in modules:
        kind = str(module.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            name = f"{module.get('path')}/config.json"
            pooling = _mode(read(name, _MAX_JSON_BYTES), where / name)
        elif kind == "Normalize":
            normalises = True
        elif kind != "Transformer":
            raise ModelFileError(
                f"{where / 'modules.json'}: the module {kind[:40]!r} is not supported; supported: "
                f"Transformer, Pooling, Normalize"
            )
    if not pooling:
        raise ModelFileError(f"{where / 'modules.json'}: no module says how states are pooled")
    return pooling, normalises


def ids_between(tokenizer: dict[str, Any]) -> tuple[int, ...]:
    """Return the ids that a tokenizer.json's post-processor puts between the texts of a pair.

    None where it does not say, or cannot be read.
    """
    step = tokenizer.get("post_processor")
    steps = step.get("processors", [step]) if type(step) is dict else []
    ids: list[Any] = []
    try:
        for step in steps:
            if step["type"] == "BertProcessing":
                ids = [step["sep"][1]]
            elif step["type"] == "RobertaProcessing":
                ids = [step["sep"][1]] * 2
            elif step["type"] == "TemplateProcessing":
                parts = step["pair"]
                first, second = (i for i, part in enumerate(parts) if "Sequence" in part)
                names = [part["SpecialToken"]["id"] for part in parts[first + 1 : second]]
                ids = [number for name in names for number in step["special_tokens"][name]["ids"]]
    except (KeyError, IndexError, TypeError, ValueError):
        return ()
    return tuple(ids) if all(type(number) is int for number in ids) else ()


def _mode(content: bytes | None, where: Path) -> Pooling:
    if content is None:
        raise ModelFileError(f"{where}: modules.json names it, but it is missing")
    config = _parsed(content, where)
    if type(config) is not dict:
        raise ModelFileError(f"{where}: not a JSON object")
    on = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
    found = [_MODES.get(name) for name in on]
    if not on and type(config.get("pooling_mode")) is str:
        on = [config["pooling_mode"]]
        found = [_NAMES.get(on[0])]
    mode = found[0] if len(found) == 1 else None
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
