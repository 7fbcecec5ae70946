"""What the names of files mean: of which type each tensor of a q4_k_m is, and of the others.

The mixes are llama.cpp's (``llama_tensor_get_type``, 2024), so that a name promises the same here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ridgeline.models.gguf.file import BLOCK_SIZES
from ridgeline.models.tensors import Tensor

# Name -> GGML's type of most tensors, and the number that the file says it with.
TARGETS = {
    "q4_k_m": ("Q4_K", 15),
    "q5_k_m": ("Q5_K", 17),
    "q6_k": ("Q6_K", 18),
    "q8_0": ("Q8_0", 7),
    "q4_0": ("Q4_0", 2),
}
PLAIN = ("F32", "F16", "BF16")
# Where rows are not whole blocks of 256: the next wider type with blocks of 32.
_INSTEAD = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
# Matrices that stay as they are: small, and their errors decide which experts and states are met.
_KEPT = re.compile(
    r"_norm\.weight$|ffn_gate_inp|altup|laurel|per_layer_model_proj|position_embd|token_types"
    r"|ssm_conv1d|shortconv\.conv|attn_rel_b|dense_[23]|cls\.|rope_"
)
_OF_LAYER = re.compile(r"blk\.(\d+)\.")


def types_of(target: str, raw: Mapping[str, Tensor], num_experts: int) -> dict[str, str]:
    """Return the type of each tensor of a GGUF file in a file of this name.

    A tensor that cannot be quantised, or stays as it is by the rules of such files, keeps its own.
    """
    main, _ = TARGETS[target]
    deep = [
        _place(name) for name in raw if name.endswith("ffn_down.weight") or "ffn_down_exps" in name
    ]
    num_layers = max((place for place in deep if place is not None), default=0) + 1
    has_head = _HEAD in raw
    found = {}
    for name, tensor in raw.items():
        if len(tensor.shape) < 2 or not name.endswith("weight") or _KEPT.search(name):
            found[name] = tensor.dtype
            continue
        wanted = _of_mix(name, main, num_layers, num_experts)
        if name == (_HEAD if has_head else _EMBEDDING) and main != "Q8_0":
            wanted = "Q6_K"
        found[name] = _that_fits(wanted, tensor)
    return found


def _of_mix(name: str, main: str, num_layers: int, num_experts: int) -> str:
    """Return what a matrix of a layer is in a mix whose main type is this."""
    if main not in ("Q4_K", "Q5_K"):
        return main
    is_important = _gets_more_bits(_place(name) or 0, num_layers)
    wider = {"Q4_K": "Q5_K", "Q5_K": "Q6_K"}[main]
    part = name.split(".")[-2]
    match part:
        case "attn_v" if num_experts == 8:
            return "Q8_0"
        case "attn_v" | "ffn_down" | "ffn_down_exps" if is_important:
            return "Q6_K"
        case "attn_k" if num_experts == 8:
            return "Q8_0"
        case "attn_output" if num_experts == 8:
            return "Q5_K"
        case "attn_qkv":
            return wider
    return main


def _place(name: str) -> int | None:
    """Return the layer of a tensor."""
    match = _OF_LAYER.match(name)
    return int(match[1]) if match else None


def _gets_more_bits(layer: int, num_layers: int) -> bool:
    """Whether a layer is among the first or last eighth, or each third of those between."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _that_fits(wanted: str, tensor: Tensor) -> str:
    """Return a type whose blocks divide the tensor's rows: its own if there is none."""
    width = tensor.shape[-1]
    for dtype in (wanted, _INSTEAD.get(wanted, wanted)):
        if width % BLOCK_SIZES[dtype][0] == 0:
            return dtype
    return tensor.dtype if tensor.dtype in PLAIN else "F16"
