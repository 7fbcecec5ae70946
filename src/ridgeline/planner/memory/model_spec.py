"""What a plan is about: a model's shape, how it is stored, and where that is known from.

A model that the engine can run is known from its file; of any other its config.json or its header
is read, which says the sizes of its tensors. No weight is ever loaded.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.engine.adapters import read_adapters, room_for
from ridgeline.model.cost.format_bytes import FORMATS, Format, Storage, storage_of_config
from ridgeline.model.cost.layers import shape_of_arch
from ridgeline.model.cost.shapes import GROUPS, ModelShape
from ridgeline.model.files.adapters import Base
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.counting import shape_of_config, shape_of_gguf
from ridgeline.model.files.families import (
    BESIDE,
    GGUF_FAMILIES,
    arch_from_config,
    with_quantization,
    without_quantization,
)
from ridgeline.model.files.gguf.parts import read_gguf_parts
from ridgeline.model.files.summary import summarise
from ridgeline.model.files.tensors import Checkpoint, ModelFileError, Tensor, refuse_pointer
from ridgeline.model.hub.library import hub_names
from ridgeline.model.hub.local_models import ModelStores
from ridgeline.model.hub.search import NotPulledError, find_model, home_expanded
from ridgeline.model.hub.short_names import packaged
from ridgeline.model.shape.model import Experts, ModelArch
from ridgeline.model.shape.recurrent import Delta
from ridgeline.planner.memory.flags import PlanFlags
from ridgeline.planner.memory.ledger import ASSUMED, FROM_FILE

_MOST_JSON_BYTES = 16 << 20
_MOST_LETTERS = 200  # of the name that a config gives itself
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


class AdapterRoom(NamedTuple):
    """Room for adapters.

    Attributes:
        max_lora_rank: the largest that steps have working memory for; 0 if there are none.
        num_bytes: of all adapters, on one device.
        how: how that is known.
    """

    max_lora_rank: int = 0
    num_bytes: int = 0
    how: str = FROM_FILE


NO_ADAPTERS = AdapterRoom()


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """A model to plan for.

    Attributes:
        name: as the user gave it.
        shape: what it holds.
        storage: how it is stored.
        config: its config.json, where there is one.
        checkpoint: the opened file, if the engine can run it.
        stored: bytes of its weights as stored, by group, where a file says them.
        adapters: room for adapters beside it.
    """

    name: str
    shape: ModelShape
    storage: Storage
    config: Mapping[str, Any] | None = None
    checkpoint: Checkpoint | None = None
    stored: Mapping[str, int] | None = None
    adapters: AdapterRoom = NO_ADAPTERS

    @property
    def arch(self) -> ModelArch | None:
        """What the engine would run: of the file, or of a config that it understands; or None."""
        outcome = self._arch_or_reason
        return None if isinstance(outcome, str) else outcome

    @property
    def why_no_arch(self) -> str:
        """Why the engine does not understand the config; empty if it does."""
        outcome = self._arch_or_reason
        return outcome if isinstance(outcome, str) else ""

    @cached_property
    def _arch_or_reason(self) -> ModelArch | str:
        if self.checkpoint is not None:
            return self.checkpoint.arch
        if self.config is None:
            return "its file is of a family that does not run"
        try:
            return arch_from_config(without_quantization(self.config), {}, "config.json")
        except ModelFileError as error:
            return str(error)


def read_model_spec(model: str | Path | Mapping[str, Any], stores: ModelStores) -> ModelSpec:
    """Return what a model is.

    Args:
        model: a config.json as parsed or its path; a directory, with weights or without; a .gguf
            file; or a name of a model that is on this machine or, as owner/name, on the hub: of it
            only small files and headers are fetched.
        stores: where models may lie.

    Raises:
        ValueError: there is no such model, it is damaged, or it has what is not understood.
    """
    if isinstance(model, Mapping):
        return _of_config(model, "the config", "config.json")
    path = home_expanded(str(model))
    if path.suffix == ".json":
        return _of_json(path)
    if path.is_dir():
        if not any(path.glob("*.safetensors")):
            return _of_json(path / "config.json", name=path.resolve().name)
        model = str(path)
    try:
        located = find_model(str(model), stores, budget_bytes=1 << 62)
    except NotPulledError:
        return _of_the_hub(str(model))
    name = Path(model).stem if located.path.is_file() and path.is_file() else str(model)
    return _of_files(located.path, name)


def _of_the_hub(model: str) -> ModelSpec:
    """Return a model that is not here, from its outline. Raises ValueError if that is not there."""
    from ridgeline.model.hub.remote_metadata import (
        fetch_metadata,  # here: a plan of a file needs no network
    )

    names = () if packaged(model) else hub_names(model)
    if not names:
        raise ValueError(f"{model!r} is not on this machine: run `ridgeline pull {model}` first")
    name = names[0]
    try:
        with fetch_metadata(name) as path:
            if path.is_dir() and not any(path.glob("*.safetensors")):
                return _of_json(path / "config.json", name=model)
            return _of_files(path, model)
    except ValueError as error:
        raise ValueError(f"{error}; for a plan, the path of its config.json is enough") from error


def _of_files(path: Path, name: str) -> ModelSpec:
    try:
        return _of_checkpoint(name, load_checkpoint(path))
    except ModelFileError as error:
        if path.is_dir():
            return _of_directory(path, name)
        return _of_foreign_gguf(path, name, error)


def _of_directory(path: Path, name: str) -> ModelSpec:
    """Return a model that the engine does not run, with the sizes of its files' headers."""
    spec = _of_json(path / "config.json", name=name)
    sizes = sizes_of_directory(path, len(spec.shape.layers))
    return replace(spec, stored=sizes or None)


def _of_foreign_gguf(path: Path, name: str, error: ModelFileError) -> ModelSpec:
    """Return a model of another family; of the engine's own the error is what there is to say."""
    metadata, tensors = read_gguf_parts(path)
    family = metadata.get("general.architecture")
    if family in GGUF_FAMILIES and not metadata.get(f"{family}.expert_count"):
        raise error
    shape = shape_of_gguf(metadata, tensors, str(path))
    sizes = ((tensor_name, tensor.nbytes) for tensor_name, tensor in tensors.items())
    bits = bits_per_weight(tensors.values())
    return ModelSpec(
        name=name,
        shape=shape,
        storage=Storage(FORMATS["f16"], Format(f"gguf, {bits:.2f} bits a weight", bits)),
        stored=sizes_by_group(sizes, len(shape.layers)),
    )


def _of_json(path: Path, name: str = "") -> ModelSpec:
    config, beside = _json(path), path.with_name(BESIDE)
    if path.name == "config.json" and beside.is_file():
        config = with_quantization(config, _json(beside), str(path.parent))
    return _of_config(config, name or _stem(path), str(path))


def _json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file. Raises ValueError that names the file."""
    try:
        if path.stat().st_size > _MOST_JSON_BYTES:
            raise ValueError(f"{path}: {path.stat().st_size} bytes are too many for a config.json")
        content = path.read_bytes()
        refuse_pointer(path, content)
        parsed = json.loads(content)  # also with a byte order mark in front
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such file") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{path}: the JSON is not an object")
    return parsed


def _stem(path: Path) -> str:
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def _of_config(config: Mapping[str, Any], name: str, where: str) -> ModelSpec:
    own_name = str(config.get("_name_or_path") or name)[:_MOST_LETTERS]
    return ModelSpec(
        name=own_name if name == "the config" else name,
        shape=shape_of_config(config, where),
        storage=storage_of_config(config, where),
        config=config,
    )


def _of_checkpoint(name: str, checkpoint: Checkpoint) -> ModelSpec:
    stored = stored_by_group(checkpoint.arch, checkpoint.tensors)
    if checkpoint.quantization:  # which its config says, but no type of tensors
        spec = _of_json(checkpoint.path / "config.json", name=name)
        stands = shape_of_arch(checkpoint.arch, name)  # the head too, whatever the config says
        shape = replace(spec.shape, is_tied=stands.is_tied, end=stands.end)
        return replace(spec, shape=shape, checkpoint=checkpoint, stored=stored)
    summary = summarise(checkpoint)
    main = next(iter(summary.formats))
    linear = FORMATS.get(main.lower(), FORMATS["f16"])
    fused_qkv = _has_fused_qkv(checkpoint)
    return ModelSpec(
        name=name,
        shape=shape_of_arch(checkpoint.arch, summary.family, fused_qkv=fused_qkv),
        storage=Storage(FORMATS["f16"] if linear.bits < 16 else linear, linear),
        checkpoint=checkpoint,
        stored=stored,
    )


def _has_fused_qkv(checkpoint: Checkpoint) -> bool:
    """Whether the file has queries, keys and values of a layer in one matrix."""
    for i in range(checkpoint.arch.num_layers):
        q, v = (checkpoint.tensors.get(f"layers.{i}.{part}") for part in "qv")
        if q is not None and v is not None:
            return q.name.partition("/")[0] == v.name.partition("/")[0]
    return False


def stored_by_group(arch: ModelArch, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the bytes of canonical tensors as their file stores them, by group."""
    by_group: Counter[str] = Counter()
    for name, tensor in tensors.items():
        by_group[_group(arch, name)] += tensor.nbytes
    return {group: by_group[group] for group in GROUPS if by_group[group]}


def _group(arch: ModelArch, name: str) -> str:
    """Return the group of a canonical tensor, which its part of the model says."""
    part = name.rpartition(".")[2].removesuffix("_bias")
    if part.endswith("norm"):
        return "norms"
    if "." not in name:
        return "head" if part == "head" else "embedding"
    layer = arch.layers[int(name.split(".")[1])]
    if part in layer.ffn.shapes(arch.hidden_size):
        return "experts" if isinstance(layer.ffn, Experts) else "MLP"
    if part in ("input_gate", "input_proj"):
        return "MLP"
    state = layer.recurrent is not None and part in layer.recurrent.shapes(arch.hidden_size)
    return "state space" if state and not isinstance(layer.recurrent, Delta) else "attention"


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


def adapter_room(flags: PlanFlags, checkpoint: Checkpoint | None) -> AdapterRoom:
    """Return the room that the engine leaves for adapters.

    Args:
        flags: the flags.
        checkpoint: the model, if the engine can run it; no other can be asked what fits it.

    Raises:
        ValueError: an adapter cannot be read, is for another model, has too large a rank, or does
            not fit the room that was wished for.
    """
    options = flags.of_adapters
    if not (options.adapters or options.enable_lora):
        if flags.max_lora_rank or flags.lora_memory:
            raise ValueError(
                "--max-lora-rank and --lora-memory need adapters: name some with --lora, or "
                "give --enable-lora"
            )
        return NO_ADAPTERS
    if options.adapters and checkpoint is None:
        raise ValueError(
            "--lora: adapters are read for models that this engine runs; for this one give "
            "--enable-lora and --lora-memory"
        )
    base = Base.of(checkpoint) if checkpoint else None
    adapters = read_adapters(options.adapters, base) if base else {}
    weights = [one for _, one in adapters.values()]
    max_lora_rank, num_bytes = room_for(options, weights)
    for name, one in zip(adapters, weights, strict=True):
        if one.rank > max_lora_rank:
            raise ValueError(
                f"--lora {name}: its rank is {one.rank}: give --max-lora-rank {one.rank}"
            )
    is_read = not flags.lora_memory and not flags.enable_lora
    return AdapterRoom(max_lora_rank, num_bytes, FROM_FILE if is_read else ASSUMED)
