"""What a file of a mix stores each module of a model in, by Hugging Face's names of modules."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.model.cost.formats.gguf_mixes import Mix, Role
from ridgeline.model.cost.shapes import Matrix, ModelShape

# Last steps of names. What is not here is of no role: routers, projections of states and so on.
_ROLES: dict[str, Role] = {
    "embed_tokens": "embedding",
    "embed_tokens_per_layer": "embedding",
    "lm_head": "head",
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "kv_b_proj": "value",
    "qkv": "value",
    "up_proj": "up",
    "gate_proj": "up",
    "down_proj": "down",
    "o_proj": "out",
}
_FUSED = ("q_proj", "k_proj", "v_proj")
_KEPT = "per_layer_model_projection"  # the one matrix that converters leave in 16 bits


@dataclass(frozen=True, slots=True)
class MixedModules:
    """The modules of a model in a mix.

    Attributes:
        mix: the rules, for this model.
        fused_qkv: files have queries, keys and values of a layer in one matrix.
    """

    mix: Mix
    fused_qkv: bool

    def format_of(self, full_name: str, matrix: Matrix) -> str:
        """Return the name of the format of a matrix; f32 or bf16 for what is never converted."""
        steps = full_name.split(".")
        role = _ROLES.get(steps[-1], "other")
        if self.fused_qkv and steps[-1] in _FUSED:
            role = "value"
        if not (matrix.linear or role == "embedding"):
            return "f32"
        if steps[-1] == _KEPT:
            return "bf16"
        layer = int(steps[steps.index("layers") + 1]) if "layers" in steps else 0
        return self.mix.format_of(role, layer, matrix.columns, is_expert=matrix.copies > 1)


def mixed_modules(name: str, shape: ModelShape) -> MixedModules:
    """Return what the modules of a model are in a mix of ``MIXES``."""
    return MixedModules(mix_of(name, shape), shape.fused_qkv)


def mix_of(name: str, shape: ModelShape) -> Mix:
    """Return a mix of ``MIXES`` for a model."""
    copies = (matrix.copies for layer in shape.layers for matrix in layer.matrices)
    downs = (
        sum(matrix.name.endswith(".down_proj") for matrix in layer.matrices)
        for layer in shape.layers
    )
    return Mix(
        name,
        num_layers=len(shape.layers),
        per_key=shape.num_heads // max(1, shape.num_kv_heads),
        num_experts=max(copies, default=1),
        is_tied=shape.is_tied,
        num_down=max(1, *downs),
    )
