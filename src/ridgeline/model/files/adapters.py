"""LoRA adapters (Hu et al., 2021) on disk: PEFT directories and GGUF files, under canonical names.

An adapter adds ``B A`` to some matrices of layers. Names and the order of rows are those of
``model.files.families``, so any adapter fits any file of its base: one of safetensors runs on a
quantised GGUF, and the other way round. What would change an answer and is not supported is refused
by name. Nothing is ever unpickled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.families import (
    GGUF_FAMILIES,
    HF_FAMILIES,
    TABLES,
    TEXT_HALVES,
    Family,
    halves_order,
)
from ridgeline.model.files.families.weight_names import number_in_file, row_order
from ridgeline.model.files.folder import Folder
from ridgeline.model.files.gguf.file import read_gguf
from ridgeline.model.files.safetensors_dir import map_safetensors
from ridgeline.model.files.tensors import Checkpoint, ModelFileError, Tensor
from ridgeline.model.shape.model import Attention, Experts, ModelArch

Floats = NDArray[np.float32]

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
_MAX_RANK = 1024
_MAX_PATTERN, _MAX_REPEATS = 2000, 5  # of a pattern for names of modules: characters, and * + {
# Converters multiply weights of these, and of their adapters, by numbers that a GGUF file does not
# keep: an adapter of one kind does not fit a base of the other.
_SCALED = ("falcon-h1",)
_PEFT_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_REFUSED = (
    "use_dora", "use_qalora", "modules_to_save", "lora_bias", "fan_in_fan_out", "layer_replication",
    "trainable_token_indices", "target_parameters", "alora_invocation_tokens", "arrow_config",
    "megatron_config", "loftq_config", "ensure_weight_tying", "use_bdlora", "monteclora_config",
)  # fmt: skip
# What says how it was trained, where it comes from, or nothing that the tensors do not say.
_HARMLESS = frozenset((
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout",
    "peft_version", "runtime_config", "megatron_core", "eva_config", "corda_config",
    "qalora_group_size", "lora_ga_config", "layers_pattern",
))  # fmt: skip
# Other beginnings (PiSSA, OLoRA, LoftQ, CorDA) change the weights of the base as well.
_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


class Base(NamedTuple):
    """What is asked of the model that an adapter is for; none of its weights are kept."""

    arch: ModelArch
    family: str

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Base:
        """Return it of a model's files."""
        return cls(checkpoint.arch, checkpoint.family)


@dataclass(frozen=True, eq=False, slots=True)
class LowRank:
    """What is added to a matrix: ``b`` ``[out, rank]``, scaled, times ``a`` ``[rank, in]``."""

    a: Floats
    b: Floats


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class AdapterWeights:
    """An adapter as found on disk.

    Attributes:
        digest: of all values, names and shapes: equal adapters have equal ones, whatever the file.
        parts: canonical name of a matrix to what is added to it.
    """

    digest: bytes
    parts: Mapping[str, LowRank]

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(len(part.a) for part in self.parts.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return sum(part.a.nbytes + part.b.nbytes for part in self.parts.values())


def read_adapter(path: Path, base: Base) -> AdapterWeights:
    """Read a PEFT directory or a GGUF file for a model.

    Raises:
        ModelFileError: it is missing, damaged, not supported, or made for another model.
    """
    if path.is_dir():
        unordered = _from_peft(path, base)
    elif path.is_file():
        unordered = _from_gguf(path, base)
    else:
        raise ModelFileError(f"{path}: no such adapter: give a PEFT directory or a GGUF file")
    if not unordered:
        raise ModelFileError(f"{path}: the adapter is empty")
    parts = {name: unordered[name] for name in sorted(unordered)}
    digest = blake2b(digest_size=16, person=b"adapter")
    for name, part in parts.items():
        digest.update(repr((name, part.a.shape, part.b.shape)).encode())
        digest.update(part.a.data)  # without a copy, and other threads run meanwhile
        digest.update(part.b.data)
    return AdapterWeights(digest.digest(), parts)


# --- PEFT ----------------------------------------------------------------------------------------


def _from_peft(path: Path, base: Base) -> dict[str, LowRank]:
    folder = Folder(path)
    values = folder.json("adapter_config.json")
    if values is None:
        raise ModelFileError(f"{path}: no adapter_config.json, so not an adapter of PEFT")
    weights = folder.find("adapter_model.safetensors")
    if weights is None:
        raise ModelFileError(
            f"{path}: no adapter_model.safetensors; pickles can run any code and are never read: "
            f"save the adapter with safe_serialization=True"
        )
    config = ConfigReader(values, str(path / "adapter_config.json"))
    modules = _TargetModules(config)
    name = TABLES.class_of_gguf.get(base.family, base.family)
    if base.family in _SCALED:
        config.fail(f"a GGUF file of the family {base.family!r} has its multipliers within "
                    f"its weights: convert the adapter to GGUF too, or take the base's "
                    f"safetensors")  # fmt: skip
    if name not in HF_FAMILIES:
        config.fail(f"adapters of PEFT for a base of the family {name!r} are not supported")
    pairs: dict[str, dict[str, Tensor]] = {}
    for tensor_name, tensor in map_safetensors(weights).items():
        match = _PEFT_NAME.fullmatch(tensor_name)
        if match is None:
            config.fail(f"tensor {tensor_name!r} is not part of a LoRA as supported: only matrices "
                        f"of layers can be adapted")  # fmt: skip
        pairs.setdefault(match["module"], {})[match["side"]] = tensor
    binding = _Binding(base.arch, HF_FAMILIES[name], str(path))
    for module, pair in pairs.items():
        text_module = module
        for half in TEXT_HALVES:
            if module.startswith(half):
                text_module = "model." + module.removeprefix(half)
        index = binding.layer_of(f"{text_module}.weight", module)
        modules.check(module, index)
        rank, alpha = modules.rank_and_alpha(module)
        scale = alpha / (math.sqrt(rank) if modules.uses_rslora else rank)
        binding.add(f"{text_module}.weight", module, pair, rank, scale)
    return binding.parts


class _TargetModules:
    """What adapter_config.json says of modules: which are adapted, of what rank and alpha."""

    def __init__(self, config: ConfigReader) -> None:
        """Read everything. Raises ModelFileError for what is not supported."""
        self._config = config
        kind = config.text("peft_type")
        if kind != "LORA":
            config.fail(f"peft_type is {kind!r}, which is not supported; supported: LORA")
        task = config.text("task_type", "CAUSAL_LM")
        if task != "CAUSAL_LM":
            config.fail(f"task_type is {task!r}, which is not supported; supported: CAUSAL_LM")
        for key in _REFUSED:
            if config.get(key):
                config.fail(f"{key} is set, which is not supported")
        if (bias := config.text("bias", "none")) != "none":
            config.fail(f"bias is {bias!r}, which is not supported; supported: none")
        if (init := config.get("init_lora_weights")) not in _INITS:
            config.fail(f"init_lora_weights is {init!r}, which changes the base too: not supported")
        self.uses_rslora = config.flag("use_rslora", False)
        self._rank, self._alpha = config.integer("r", 8), config.number("lora_alpha", 8.0)
        self._ranks = self._patterns("rank_pattern")
        self._alphas = self._patterns("alpha_pattern")
        self._targets = self._names("target_modules")
        self._excluded = self._names("exclude_modules")
        self._layers = self._layer_numbers()
        for key, value in config.values.items():
            if value and key not in config.read_keys and key not in _HARMLESS:
                config.fail(f"{key} is set, which is not supported: it is not known whether it "
                            f"changes what the adapter computes")  # fmt: skip

    def check(self, module: str, layer: int) -> None:
        """Raise ModelFileError if a module with tensors would not be adapted by PEFT."""
        is_target = self._targets in (None, "all-linear") or _is_named(module, self._targets)
        if not is_target or (self._excluded and _is_named(module, self._excluded)):
            self._config.fail(f"{module!r} has tensors, but is not among target_modules")
        if self._layers is not None and layer not in self._layers:
            self._config.fail(f"{module!r} has tensors, but is not in layers_to_transform")

    def rank_and_alpha(self, module: str) -> tuple[int, float]:
        """Return the rank and the alpha of a module."""
        rank = next((v for k, v in self._ranks if _matches(k, module)), self._rank)
        alpha = next((v for k, v in self._alphas if _matches(k, module)), self._alpha)
        if type(rank) is not int or not 0 < rank <= _MAX_RANK:
            self._config.fail(f"the rank of {module!r} is {rank!r}, not 1 to {_MAX_RANK}")
        if type(alpha) not in (int, float) or not 0 < alpha < 1e9:
            self._config.fail(f"the alpha of {module!r} is {alpha!r}, not a positive number")
        return rank, float(alpha)

    def _patterns(self, key: str) -> list[tuple[str, Any]]:
        patterns: Any = self._config.get(key) or {}
        if type(patterns) is not dict:
            self._config.fail(f"{key} is not an object")
        return [(self._pattern(key, pattern), value) for pattern, value in patterns.items()]

    def _names(self, key: str) -> Any:
        modules: Any = self._config.get(key)
        if modules is None or modules == "all-linear":
            return modules
        if type(modules) is str:
            return self._pattern(key, modules)
        if type(modules) is not list or not all(type(name) is str for name in modules):
            self._config.fail(f"{key} is neither a list of names nor a pattern")
        return modules

    def _pattern(self, key: str, pattern: str) -> str:
        """Return a regular expression that is sane: what repeats a group may take for ever."""
        repeats = re.findall(r"[*+{]", pattern)
        too_many = len(pattern) > _MAX_PATTERN or len(repeats) > _MAX_REPEATS
        if too_many or re.search(r"\)[*+{]", pattern):
            self._config.fail(f"{key}: the pattern {pattern[:40]!r} is too involved")
        try:
            re.compile(pattern)
        except re.error as error:
            self._config.fail(f"{key}: {pattern[:40]!r} is no pattern: {error}")
        return pattern

    def _layer_numbers(self) -> list[int] | None:
        numbers: Any = self._config.get("layers_to_transform")
        layers = numbers if type(numbers) is list or numbers is None else [numbers]
        if layers is not None and any(type(layer) is not int for layer in layers):
            self._config.fail(f"layers_to_transform is {numbers!r:.80}, not numbers of layers")
        return layers


def _is_named(module: str, names: Any) -> bool:
    """Whether a module is one of these names or ends with it; or matches, if it is a pattern."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _matches(pattern: str, module: str) -> bool:
    """Whether a key of PEFT's rank_pattern or alpha_pattern means this module."""
    return re.match(rf"(?:.*\.)?(?:{pattern})$", module) is not None


# --- GGUF ----------------------------------------------------------------------------------------


def _from_gguf(path: Path, base: Base) -> dict[str, LowRank]:
    metadata, raw = read_gguf(path)
    config = ConfigReader(metadata, str(path))
    kind = config.text("general.type", "model")
    if kind != "adapter":
        config.fail(f"general.type is {kind!r}: this is not an adapter")
    if (method := config.text("adapter.type")) != "lora":
        config.fail(f"adapter.type is {method!r}, which is not supported; supported: lora")
    for key in metadata:
        if key.startswith("adapter.") and key not in ("adapter.type", "adapter.lora.alpha"):
            config.fail(f"{key} is set, which is not supported")
    name = config.text("general.architecture")
    if name not in GGUF_FAMILIES:
        config.fail(f"adapters of the architecture {name!r} are not supported")
    if base.family in GGUF_FAMILIES and base.family != name:
        config.fail(f"an adapter for {name!r}, but the model is {base.family!r}")
    if name in _SCALED and base.family not in GGUF_FAMILIES:
        config.fail(f"it has multipliers of {name!r} within it, which the base's safetensors have "
                   f"beside them: take the adapter as PEFT saved it, or a GGUF base")  # fmt: skip
    alpha = config.get("adapter.lora.alpha") or 0.0
    if type(alpha) not in (int, float) or not 0 <= alpha < 1e9:
        config.fail(f"adapter.lora.alpha is {alpha!r}, not a number of at least 0")
    pairs: dict[str, dict[str, Tensor]] = {}
    for tensor_name, tensor in raw.items():
        module, _, side = tensor_name.rpartition(".lora_")
        if side not in ("a", "b"):
            config.fail(f"tensor {tensor_name!r} is not part of a LoRA as supported")
        pairs.setdefault(module, {})[side.upper()] = tensor
    binding = _Binding(base.arch, GGUF_FAMILIES[name], str(path))
    for module, pair in pairs.items():
        rank = pair["A"].shape[0] if "A" in pair else 1
        if rank > _MAX_RANK:
            config.fail(f"the rank of {module!r} is {rank}, not 1 to {_MAX_RANK}")
        binding.add(module, module, pair, rank, alpha / rank if alpha else 1.0)
    return binding.parts


# --- both ----------------------------------------------------------------------------------------


def _of_attention(mixer: Attention | None) -> tuple[str, ...]:
    """Return which matrices of attention can be adapted."""
    if mixer is None or mixer.latent is not None:
        return ()
    return MATRICES[1:4] if mixer.gated else MATRICES[:4]  # a gate stands within q in files


class _Binding:
    """From a family's names of matrices to canonical parts, shapes checked."""

    def __init__(self, arch: ModelArch, family: Family, where: str) -> None:
        self.parts: dict[str, LowRank] = {}
        self._arch, self._family, self._where = arch, family, where
        self._modules: dict[str, tuple[int, list[str]]] = {}  # name in a file: layer, parts
        for i, layer in enumerate(arch.layers):
            inner = () if isinstance(layer.ffn, Experts) else MATRICES[4:]
            for part in (*_of_attention(layer.attention), *inner):
                if part in layer.shapes(1, norm_bias=False) and part in family.layer:
                    number = number_in_file(arch, family, i, part)
                    in_file = family.prefix.format(number) + family.layer[part]
                    self._modules.setdefault(in_file, (i, []))[1].append(part)

    def layer_of(self, in_file: str, module: str) -> int:
        """Return the layer of a matrix. Raises ModelFileError if it cannot be adapted."""
        if in_file not in self._modules:
            raise ModelFileError(
                f"{self._where}: {module!r} is adapted, which is not supported, or is no part of "
                f"this model: only the matrices of its layers, those of experts apart, can be"
            )
        return self._modules[in_file][0]

    def add(
        self, in_file: str, module: str, pair: Mapping[str, Tensor], rank: int, scale: float
    ) -> None:
        """Add what is added to one matrix of a file, which may be several of ours."""
        index, names = self.layer_of(in_file, module), self._modules[in_file][1]
        shapes = self._arch.layers[index].shapes(self._arch.hidden_size, norm_bias=False)
        num_rows = sum(shapes[name][0] for name in names)
        wanted = {"A": (rank, shapes[names[0]][1]), "B": (num_rows, rank)}
        values: dict[str, Floats] = {}
        for side, shape in wanted.items():
            if side not in pair:
                raise ModelFileError(f"{self._where}: {module!r} lacks its matrix {side}")
            if pair[side].shape != shape:
                raise ModelFileError(
                    f"{self._where}: {module!r} has a matrix {side} of shape {pair[side].shape}, "
                    f"wanted {shape}: is the adapter for this model?"
                )
            values[side] = pair[side].to_f32()
            if not np.isfinite(values[side]).all():
                raise ModelFileError(f"{self._where}: {module!r} has values that are not finite")
        b = values["B"] * np.float32(scale)
        parts = [f"layers.{index}.{name}" for name in names]
        order = row_order(self._arch, self._family, parts)
        b = b if order is None else b[order]
        begin = 0
        for name in names:
            end = begin + shapes[name][0]
            own = b[begin:end]
            if self._family.interleaved and name in ("q", "k"):
                own = own[halves_order(self._arch.layers[index].known_attention, len(own))]
            self.parts[f"layers.{index}.{name}"] = LowRank(values["A"], np.ascontiguousarray(own))
            begin = end
