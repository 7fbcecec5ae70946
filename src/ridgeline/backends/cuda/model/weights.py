"""A checkpoint's matrices on the device: wide, or packed in 8 or 4 bits; vectors are float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ridgeline.backends.cuda.model.latent import by_head
from ridgeline.backends.cuda.packed import Packed, from_gguf, pack, stack
from ridgeline.backends.cuda.ranks.shard import Shard
from ridgeline.backends.cuda.sizes import packed_bits
from ridgeline.backends.layer_weights import FeedForwardWeights, LayerWeights, Norm, load_layer
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.model.shape.model import Experts, ModelArch

_BF16 = torch.bfloat16
_OF_INPUTS = ("inputs", "inputs_proj", "inputs_norm")
DTYPES = {"f32": torch.float32, "bf16": _BF16, "int8": _BF16, "int4": _BF16}  # of activations


class InputWeights(NamedTuple):
    """What makes every layer's own input of a token: see ``ModelArch.input_scales``.

    ``table`` has a row of all layers' for each token, ``[vocabulary, layers * size]``.
    """

    table: Tensor
    proj: Tensor | Packed
    norm: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights. ``layers`` are as in ``backends.layer_weights``, of tensors.

    Those of experts are ``[experts, out, in]``, gate and up stacked in each; or packed, one
    expert's rows after another's.
    """

    embed: Tensor
    embed_norm: Norm | None
    positions: Tensor | None
    layers: list[LayerWeights]
    norm: Norm
    head: Tensor | Packed
    head_bias: Tensor | None
    inputs: InputWeights | None

    def by_name(self) -> dict[str, list[Tensor]]:
        """Return all tensors by what they belong to."""
        layers = [layer.arrays() for layer in self.layers]
        norms = [self.norm, *([self.embed_norm] if self.embed_norm else [])]
        inputs = self.inputs or (None, None, None)
        outer = [
            self.head_bias,
            inputs[2],
            *(array for norm in norms for array in (norm.weight, norm.bias)),
        ]
        by_owner: dict[str, list[Any]] = {
            "embedding": [self.embed, self.positions, *inputs[:2]],
            "attention": [array for layer in layers for array in layer["attention"]],
            "mlp": [array for layer in layers for array in layer["mlp"]],
            "norms": [*outer, *(array for layer in layers for array in layer["norms"])],
        }
        if self.head is not self.embed:
            by_owner["head"] = [self.head]
        return {
            name: [part for array in arrays if array is not None for part in _tensors(array)]
            for name, arrays in by_owner.items()
        }


def _tensors(array: Tensor | Packed) -> list[Tensor]:
    if not isinstance(array, Packed):
        return [array]
    return [part for part in (array.values, array.scales, array.least) if part is not None]


def load(
    checkpoint: Checkpoint,
    dtype: str,
    device: torch.device,
    progress: Callable[[int, int], None],
    share: Shard | None = None,
) -> Weights:
    """Decode, convert and upload a model, a tensor at a time, or a rank's share of each."""
    share, done = share or Shard(checkpoint.arch), 0

    def get(name: str) -> Tensor | Packed:
        nonlocal done
        tensor = checkpoint.tensors[name]
        done += tensor.nbytes
        progress(done, checkpoint.nbytes)
        if share.count > 1:
            tensor = tensor.rows(share.rows(name, tensor.shape[0]))
        bits = packed_bits(name, tensor.shape, dtype, tensor.dtype)
        if bits and len(tensor.shape) == 2:
            rows = torch.from_numpy(np.array(tensor.data)).to(device)
            packed = from_gguf(tensor.dtype, rows, (tensor.shape[0], tensor.shape[1]))
            if packed is not None and packed.bits == bits:
                return packed
        wide = torch.from_numpy(tensor.to_f32())
        return pack(wide.to(device), bits) if bits else wide

    return build(share.arch, get, dtype, device, share.whole)


def build(
    arch: ModelArch,
    get: Callable[[str], Tensor | Packed],
    dtype: str,
    device: torch.device,
    whole: ModelArch | None = None,
) -> Weights:
    """Return a model's weights.

    ``get`` returns a tensor by its canonical name, of any dtype, or packed as it is to be. ``arch``
    may be a rank's share of the model ``whole``.
    """
    shapes = (whole or arch).matrix_shapes()

    def on_device(name: str) -> Any:
        tensor = get(name)
        if isinstance(tensor, Packed):
            return replace(tensor, num_outputs=shapes[name][0])
        tensor = tensor.to(device)
        if bits := packed_bits(name, tuple(tensor.shape), dtype, ""):
            return replace(pack(tensor, bits), num_outputs=shapes[name][0])
        is_matrix = tensor.ndim > 1 and name != "positions"
        return tensor.to(DTYPES[dtype] if is_matrix else torch.float32)

    def norm(name: str, has_bias: bool) -> Norm:
        return Norm(on_device(name), on_device(f"{name}_bias") if has_bias else None)

    embed = on_device("embed")
    layers = []
    for i, layer in enumerate(arch.layers):
        weights = load_layer(on_device, arch, i, _joined)
        if isinstance(layer.ffn, Experts) and weights.ffn is not None:
            weights = replace(weights, ffn=_stacked(weights.ffn, layer.ffn))
        if weights.latent:
            weights = replace(weights, latent=by_head(weights.latent, layer.known_attention))
        layers.append(weights)
    return Weights(
        embed=embed,
        embed_norm=norm("embedding_norm", has_bias=True) if arch.embed_norm else None,
        positions=on_device("positions") if arch.position_rows else None,
        layers=layers,
        norm=norm("norm", has_bias=arch.norm_bias),
        head=embed if arch.tied_embeddings else on_device("head"),
        head_bias=on_device("head_bias") if arch.head_bias else None,
        inputs=InputWeights(*map(on_device, _OF_INPUTS)) if arch.input_size else None,
    )


def _joined(parts: Sequence[Any]) -> Any:
    """Return matrices or vectors joined into one, the first one's rows first."""
    if not isinstance(parts[0], Packed):
        return torch.cat(tuple(parts))
    bits = max(part.bits for part in parts)
    if all(part.bits == bits for part in parts):
        return stack(list(parts))
    num_outputs = sum(part.num_outputs for part in parts)
    return replace(pack(torch.cat([part.wide() for part in parts]), bits), num_outputs=num_outputs)


def _stacked(weights: FeedForwardWeights, experts: Experts) -> FeedForwardWeights:
    """Return the weights of experts with the matrices of each in one piece."""

    def of_each(stack: Any, parts: int) -> Any:
        if stack is None:
            return None
        if isinstance(stack, Packed):
            rows = torch.arange(stack.shape[0], device=stack.values.device)
            return stack.rows(rows.unflatten(0, (parts, experts.num, -1)).transpose(0, 1).flatten())
        whole = stack.unflatten(0, (parts, experts.num, -1)).transpose(0, 1)
        return whole.flatten(1, 2).contiguous()

    parts = 2 if experts.gated else 1
    return replace(
        weights,
        gate_up=of_each(weights.gate_up, parts),
        gate_up_bias=of_each(weights.gate_up_bias, parts),
        down=of_each(weights.down, 1),
        down_bias=of_each(weights.down_bias, 1),
    )
