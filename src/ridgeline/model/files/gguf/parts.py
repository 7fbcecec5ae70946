"""Models in several GGUF files, as ``llama-gguf-split`` names them: NAME-00001-of-00003.gguf.

The first part has the model's metadata; each part describes the tensors that it holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.gguf.file import read_gguf
from ridgeline.model.files.tensors import ModelFileError, Tensor

# What a file that is no model says of itself, and where it is of use.
_OTHERS = {
    "adapter": ("of a LoRA adapter", "give a model, and this as --lora NAME=FILE"),
    "imatrix": ("of importance", "give a model; `ridgeline quantize --imatrix FILE` takes this"),
    "mmproj": ("of the part that sees or hears", "give the model that lies beside it"),
    "vocab": ("of a vocabulary alone", "give a model's"),
}
_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.I)


def part_paths(path: Path) -> Iterator[Path]:
    """Yield the files of the model that ``path`` belongs to, in order; ``path`` if it is one.

    They are told by the name alone, which may say 99,999; whether they are there is not looked at.
    """
    match = _PART.fullmatch(path.name)
    count = int(match["count"]) if match else 1
    if not match or count < 2:
        yield path
        return
    for i in range(1, count + 1):
        yield path.with_name(f"{match['name']}-{i:05}-of-{count:05}{match['suffix']}")


def read_gguf_parts(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the metadata and the tensors of a model in one file, or in several.

    Args:
        path: the file, or any of its parts.

    Raises:
        ModelFileError: a part is missing, belongs to another model, or is damaged.
    """
    paths = []
    for part in part_paths(path):
        if not part.is_file():
            raise ModelFileError(
                f"{path}: {part.name} is missing beside it; all parts belong together: fetch it too"
            )
        paths.append(part)
    metadata, tensors = read_gguf(paths[0])
    config = ConfigReader(metadata, str(paths[0]))
    kind = config.text("general.type", "model")
    if kind != "model":
        what, way_out = _OTHERS.get(kind, (f"of type {kind[:40]!r}", "give a model's"))
        config.fail(f"a GGUF file {what}, not a model: {way_out}")
    count = config.integer("split.count", 0, low=0)
    if max(count, 1) != len(paths):
        config.fail(
            f"it says that it is one of {count} parts, but its name says {len(paths)}: parts are "
            f"named as NAME-00001-of-{max(count, 1):05}.gguf"
        )
    for number, part in enumerate(paths[1:], start=1):
        part_metadata, part_tensors = read_gguf(part)
        own = ConfigReader(part_metadata, str(part))
        place = own.integer("split.no", 0, low=0), own.integer("split.count", 0, low=0)
        if place != (number, count):
            own.fail(f"it is part {place[0] + 1} of {place[1]}, not {number + 1} of {count}")
        if twice := tensors.keys() & part_tensors.keys():
            own.fail(f"tensor {min(twice)!r} is in another part too")
        tensors |= part_tensors
    announced = config.integer("split.tensors.count", len(tensors), low=0)
    if announced != len(tensors):
        config.fail(f"its parts have {len(tensors)} tensors, not {announced}; fetch them again")
    return metadata, tensors
