"""What files of weights say of models that the engine does not run: the sizes of their tensors.

Headers are read, tensors never. It knows names of tensors, and of what is in them nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path

from ridgeline.model.files.tensors import ModelFileError, Tensor, refuse_pointer

_MOST_HEADER_BYTES = 64 << 20
_BEGINNING_BYTES = 64  # that tell a pointer of git-lfs
_LAYER = re.compile(r"(?:^|\.)(?:layers|blk|h)\.(\d+)\.")
# The first that is in a tensor's name decides.
_GROUPS = (
    ("vision|visual|audio|mm_|multi_modal|projector", "other towers"),
    ("_scale_inv|_scales?$|qzeros|g_idx|\\.scales|absmax|_blocks_scales", "scales"),
    ("norm|ln_", "norms"),
    ("lm_head|^output\\.", "head"),
    ("embed|^token_embd", "embedding"),
    ("expert|_exps|_shexp|router|\\.gate\\.weight|ffn_gate_inp", "experts"),
    ("mamba|ssm|linear_attn|mixer", "state space"),
    ("attn|attention", "attention"),
    ("mlp|ffn|feed_forward", "MLP"),
)  # fmt: skip


def sizes_of_directory(folder: Path, num_layers: int) -> dict[str, int]:
    """Return the bytes of a directory's safetensors by group.

    Layers beyond the model's own, which predict several tokens, are left out. Raises ModelFileError
    if a header is damaged or a file was cut short.
    """
    sizes: dict[str, int] = {}
    for path in sorted(folder.glob("*.safetensors")):
        if not path.name.startswith("consolidated"):  # the same weights once more
            sizes |= _header_sizes(path)
    return sizes_by_group(sizes.items(), num_layers)


def sizes_by_group(sizes: Iterable[tuple[str, int]], num_layers: int) -> dict[str, int]:
    """Return the sums of tensors' bytes by group, those of further layers left out."""
    by_group: dict[str, int] = {}
    for name, size in sizes:
        layer = _LAYER.search(name)
        if layer is None or int(layer[1]) < num_layers:
            group = next((g for words, g in _GROUPS if re.search(words, name)), "other")
            by_group[group] = by_group.get(group, 0) + size
    order = [group for _, group in _GROUPS]
    return dict(sorted(by_group.items(), key=lambda e: [*order, "other"].index(e[0])))


def _header_sizes(path: Path) -> dict[str, int]:
    size = path.stat().st_size
    with path.open("rb") as file:
        refuse_pointer(path, file.read(_BEGINNING_BYTES))
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, _MOST_HEADER_BYTES):
            raise ModelFileError(f"{path}: a header of {length} bytes in a file of {size}")
        text = file.read(length)
    sizes = {}
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= size - 8 - length:
                raise ModelFileError(f"{path}: tensor {name!r} ends behind the file's end")
            sizes[name] = end - begin
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{path}: its header is damaged ({error})") from error
    return sizes


def bits_per_weight(tensors: Iterable[Tensor]) -> float:
    """Return how many bits a weight takes on average."""
    sizes = [(tensor.nbytes, math.prod(tensor.shape)) for tensor in tensors]
    return 8 * sum(size for size, _ in sizes) / sum(count for _, count in sizes)
