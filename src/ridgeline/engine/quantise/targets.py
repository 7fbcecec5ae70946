"""What the names of files mean: of which type each tensor of a q4_k_m is, and of the others.

The mixes are llama.cpp's, so that a name promises the same here; their rules are those that plans
count by (``model.cost.gguf_mixes``). Here stands which tensor has which role in them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ridgeline.model.cost.gguf_mixes import MIXES, Mix, Role, mix_of
from ridgeline.model.cost.layers import shape_of_arch
from ridgeline.model.files.tensors import Tensor
from ridgeline.model.shape.model import ModelArch

# The mixes that are written -> the number that the file says it with.
TARGETS = {"q4_k_m": 15, "q5_k_m": 17, "q6_k": 18, "q8_0": 7, "q4_0": 2}
PLAIN = ("F32", "F16", "BF16")
# Names of tensors without their layer and their ending. What is not here is of no role.
_ROLES: dict[str, Role] = {
    "token_embd": "embedding",
    "per_layer_token_embd": "embedding",
    "output": "head",
    "attn_k": "key",
    "attn_v": "value",
    "attn_qkv": "value",
    "attn_kv_b": "value",
    "attn_output": "out",
    "ffn_down": "down",
    "ffn_down_exps": "down",
    "ffn_down_shexp": "down",
}
# Matrices that stay as they are: small, and their errors decide which experts and states are met.
_KEPT = re.compile(
    r"_norm\.weight$|ffn_gate_inp|altup|laurel|per_layer_model_proj|position_embd|token_types"
    r"|ssm_conv1d|shortconv\.conv|attn_rel_b|dense_[23]|cls\.|rope_"
)
_PLACE = re.compile(r"(?:blk\.(\d+)\.)?(.*)\.weight")


def main_type(target: str) -> str:
    """Return GGML's type of most tensors of a file of this name."""
    return MIXES[target].upper()


def mix_of_file(target: str, raw: Mapping[str, Tensor], arch: ModelArch) -> Mix:
    """Return the mix of this name for the model of a GGUF file.

    Layers are counted as the file numbers them.
    """
    places = (_PLACE.fullmatch(name) for name in raw)
    numbers = [int(place[1]) for place in places if place and place[1]]
    mix = mix_of(target, shape_of_arch(arch, ""))
    return replace(mix, num_layers=max(numbers, default=-1) + 1)


def types_of(mix: Mix, raw: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the type of each tensor of a GGUF file in a file of this mix.

    A tensor that cannot be quantised, or stays as it is by the rules of such files, keeps its own.
    """
    return {name: _type_of(mix, name, tensor) for name, tensor in raw.items()}


def _type_of(mix: Mix, name: str, tensor: Tensor) -> str:
    place = _PLACE.fullmatch(name)
    if len(tensor.shape) < 2 or place is None or _KEPT.search(name):
        return tensor.dtype
    layer, part = int(place[1] or 0), place[2]
    format_name = mix.format_of(_ROLES.get(part, "other"), layer, tensor.shape[-1]).upper()
    # Where no blocks fit, what has 16 bits already keeps them as they are.
    return tensor.dtype if format_name == "F16" and tensor.dtype == "BF16" else format_name
