"""A model as calls of operations: from token ids to final states.

It knows neither kernels nor steps: what it calls are kernels on a GPU, and their twins on a CPU.
The residual stream is float32; all else is as wide as the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.backends.cuda.layer_spec import head_spec
from ridgeline.backends.cuda.model.adapters import Adapt, AdaptedRows, adaptation, not_adapted
from ridgeline.backends.cuda.model.experts import mixture
from ridgeline.backends.cuda.model.latent import Places, latent_attention
from ridgeline.backends.cuda.model.recurrent import MixerContext, mix
from ridgeline.backends.cuda.model.weights import Weights
from ridgeline.backends.cuda.packed import Packed
from ridgeline.backends.cuda.ranks.group import Ranks
from ridgeline.backends.cuda.step.batch import Kind
from ridgeline.backends.cuda.step.cache import Cache, States
from ridgeline.backends.cuda.step.plan import AttentionPlan, StatePlan
from ridgeline.backends.layer_weights import AttentionWeights, LayerWeights, Norm
from ridgeline.model.files.rope_tables import query_scales, rope_tables
from ridgeline.model.shape.model import Attention, Experts, ModelArch


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the layers read of a step; ``tables`` are ``[groups, rows, width]``.

    ``poison`` is what they write to: which tokens have keys or values that are not finite.
    ``adapted`` says which tokens have an adapter, if any has one.
    """

    tokens: Tensor
    positions: Tensor
    table_rows: Tensor
    tables: Tensor
    poison: Tensor
    plans: Mapping[Kind, AttentionPlan]
    state_plan: StatePlan | None = None
    adapted: AdaptedRows | None = None


class Model:
    """Weights and tables of angles. ``kinds`` are the kinds of attention, by layer that has it."""

    def __init__(
        self,
        arch: ModelArch,
        weights: Weights,
        ops: Any,
        dtype: torch.dtype,
        max_model_len: int,
        group_of: Sequence[int],
        states: States,
        ranks: Ranks,
    ) -> None:
        """Take weights, operations, the groups of layers, states, and the ranks with the rest."""
        self.arch, self.weights, self.ops, self.dtype = arch, weights, ops, dtype
        device, self._states, self._ranks = weights.embed.device, states, ranks
        mixers = {
            i: one.attention for i, one in enumerate(arch.layers) if one.attention is not None
        }
        self._specs = {i: head_spec(mixer, arch.norm_eps) for i, mixer in mixers.items()}
        self._angles = {
            rope: tuple(torch.from_numpy(t).to(device) for t in rope_tables(rope, max_model_len))
            for rope in dict.fromkeys(mixer.rope for mixer in mixers.values())
            if rope
        }
        self._growth = {
            rope: torch.from_numpy(query_scales(rope, max_model_len)).to(device)
            for rope in self._angles
            if rope.query_growth
        }
        self._slopes = {
            i: torch.tensor(mixer.slopes, dtype=torch.float32, device=device)
            for i, mixer in mixers.items()
            if mixer.slopes
        }
        self._state_sizes = {
            i: {name: shape[0] for name, shape in one.recurrent.shapes(arch.hidden_size).items()}
            for i, one in enumerate(arch.layers)
            if one.recurrent is not None
        }
        self.kinds = {
            i: Kind(group_of[i], spec.shared, spec.window, is_wide=spec.is_wide)
            for i, spec in self._specs.items()
        }

    def tables(self) -> list[Tensor]:
        """Return the tables that are kept beside the weights."""
        angles = [table for both in self._angles.values() for table in both]
        return [*angles, *self._growth.values(), *self._slopes.values()]

    def __call__(self, given: Inputs, cache: Cache) -> Tensor:
        """Return the normed final states, ``[tokens, hidden]``."""
        arch, x = self.arch, self._first(given)
        delta: Tensor | None = None  # what the part before added, not yet in the stream,
        post: Norm | None = None  # and the norm that it goes through first
        own = self._own_inputs(x, given.tokens)
        for i, (layer, w) in enumerate(zip(arch.layers, self.weights.layers, strict=True)):
            norms, replaces = w.norms, layer.norms == "within"
            x, row = self._enter(x, delta, post, norms.get("attn_norm"), replaces)
            mixed, post = self._mixed(i, row, w, given, cache), norms.get("attn_post_norm")
            if layer.is_parallel:
                if "mlp_norm" in norms:
                    row = self._enter(x, None, None, norms["mlp_norm"])[1]
                x = self._enter(x, mixed, post, None)[0]
            else:
                x, row = self._enter(x, mixed, post, norms.get("mlp_norm"), replaces)
            delta, post = self._feed_forward(i, x, row, w, given), norms.get("mlp_post_norm")
            if own is not None:
                x = x if delta is None else self._enter(x, delta, post, None)[0]
                x, delta = self._with_input(x, own[:, i], w, layer.ffn.activation), None
            if w.out_scale is not None:
                x = x if delta is None else self._enter(x, delta, post, None)[0]
                x, delta = x * w.out_scale, None
        return self._enter(x, delta, post, self.weights.norm)[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits behind final states, float32."""
        arch, w = self.arch, self.weights
        out = self._product(hidden, w.head, w.head_bias, torch.float32)
        out = self._ranks.gather(out, arch.vocab_size)
        if arch.logit_scale != 1.0:
            out = out * arch.logit_scale
        if arch.logit_softcap:
            out = arch.logit_softcap * torch.tanh(out / arch.logit_softcap)
        return out

    def _first(self, given: Inputs) -> Tensor:
        """Return what the first layer reads, float32: ``backends.inputs`` says it for numpy."""
        arch, w = self.arch, self.weights
        x = self._ranks.embedded(w.embed, given.tokens.long(), arch.vocab_size).float()
        if w.embed_norm is not None:
            x = self._normed(x, w.embed_norm, torch.float32)
        if arch.embed_scale != 1.0:
            x = x * arch.embed_scale
        if w.positions is not None:
            x = x + w.positions[given.positions.long() + arch.position_offset]
        return x

    def _own_inputs(self, x: Tensor, tokens: Tensor) -> Tensor | None:
        """Return all layers' own inputs, ``[T, layers, size]`` float32, of scaled embeddings ``x``.

        ``ModelArch.input_scales`` says what is added up; None in a model without.
        """
        arch, inputs = self.arch, self.weights.inputs
        if inputs is None:
            return None
        of_row, of_product, of_sum = arch.input_scales
        shape = len(x), arch.num_layers, arch.input_size
        products = self._product(x.to(self.dtype), inputs.proj, None, torch.float32) * of_product
        products = self.ops.norm(
            products.reshape(shape), inputs.norm, None, arch.norm_eps, "rms", torch.float32
        )
        rows = inputs.table[tokens.long()].float().reshape(shape)
        out: Tensor = (products + rows * of_row) * of_sum
        return out

    def _with_input(self, x: Tensor, own: Tensor, w: LayerWeights, activation: str) -> Tensor:
        """Return the residual stream with what a layer makes of its own input, ``[T, size]``."""
        weights: Any = w.inputs
        gates = self._product(x.to(self.dtype), weights["input_gate"], None, None)
        inner = torch.cat([gates, own.to(self.dtype)], 1)
        inner = self.ops.gate(inner, activation, True, 1.0)
        products = self._product(inner, weights["input_proj"], None, None)
        return x + self._normed(products, w.norms["input_post_norm"], torch.float32)

    def _product(
        self, x: Tensor, weight: Any, bias: Tensor | None, dtype: torch.dtype | None
    ) -> Tensor:
        is_packed = isinstance(weight, Packed)
        call = self.ops.packed_product if is_packed else self.ops.product
        out: Tensor = call(x, weight, bias, dtype)
        return out

    def _normed(self, x: Tensor, norm: Norm, dtype: torch.dtype) -> Tensor:
        arch = self.arch
        return self.ops.norm(x, norm.weight, norm.bias, arch.norm_eps, arch.norm, dtype)

    def _enter(
        self,
        x: Tensor,
        delta: Tensor | None,
        post: Norm | None,
        norm: Norm | None,
        replaces: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Add to the residual stream, then norm it: return the stream and the normed rows.

        If the norm ``replaces`` the stream, both are its rows.
        """
        arch = self.arch
        dtype = torch.float32 if replaces else self.dtype
        if delta is None:
            row = x.to(dtype) if norm is None else self._normed(x, norm, dtype)
        else:
            behind = None if post is None else (post.weight, post.bias)
            weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
            row = self.ops.add_norm(
                x, delta, arch.residual_scale, behind, weight, bias, arch.norm_eps, arch.norm, dtype
            )
        return (row, row.to(self.dtype)) if replaces else (x, row)

    def _mixed(self, i: int, x: Tensor, w: LayerWeights, given: Inputs, cache: Cache) -> Tensor:
        """Return what a layer's attention, its recurrence, or both add."""
        layer = self.arch.layers[i]
        attended = self._attention(i, x, w, given, cache) if i in self._specs else None
        if layer.recurrent is None or given.state_plan is None:
            assert attended is not None
            return attended
        context = MixerContext(
            w.recurrent, self._states.by_layer[i], given.state_plan, self.ops, self._product,
            self.arch.norm_eps, self._ranks, self._state_sizes[i],
        )  # fmt: skip
        out = mix(x, layer.recurrent, context)
        out = out if attended is None else out + attended
        given.poison[: len(out)].masked_fill_(~torch.isfinite(out).all(1), 1)
        return out

    def _attention(self, i: int, x: Tensor, w: LayerWeights, given: Inputs, cache: Cache) -> Tensor:
        mixer, ops = self.arch.layers[i].known_attention, self.ops
        spec, kind = self._specs[i], self.kinds[i]
        if mixer.latent is not None and mixer.rope is not None:
            places = Places(
                cache=cache.of(i, None),
                table=given.tables[kind.group],
                positions=given.positions,
                table_rows=given.table_rows,
                angles=self._angles[mixer.rope],
                poison=given.poison,
                plan=given.plans[kind],
            )
            return latent_attention(
                x, w.latent, mixer, spec, places, ops, self._product, self._ranks
            )
        attention: Any = w.attention
        row = x if mixer.in_scale == 1.0 else x * mixer.in_scale
        adapt = adaptation(i, given.adapted)
        qkv = self._product(row, attention.qkv, attention.qkv_bias, None)
        qkv = adapt(qkv, row, *mixer.projections)
        if mixer.qk_norm == "width":
            qkv = self._normed_widths(qkv, mixer, attention)
        cos, sin = self._angles[mixer.rope] if mixer.rope else (None, None)
        own, table = cache.of(i, mixer.kv_of), given.tables[kind.group]
        q_norm, k_norm = (attention.q_norm, attention.k_norm) if spec.qk_norm else (None, None)
        q = ops.rope_and_cache(
            qkv, own, table, given.positions, given.table_rows, cos, sin, q_norm, k_norm,
            given.poison, spec,
        )  # fmt: skip
        if mixer.rope in self._growth:
            q = (q * self._growth[mixer.rope][given.positions.long(), None, None]).to(q.dtype)
        out = ops.attend(
            q, own, table, given.plans[kind], self._slopes.get(i), attention.sinks, spec
        )
        out = out.reshape(len(x), -1)
        if attention.gate is not None:
            gate = self._product(x, attention.gate, None, torch.float32)
            out = (out * torch.sigmoid(gate)).to(out.dtype)
        whole = self._ranks.gather(out)
        out = adapt(self._product(whole, attention.o, attention.o_bias, None), whole, "o")
        out = self._ranks.gather(out)
        return out if mixer.out_scale == 1.0 else out * mixer.out_scale

    def _normed_widths(self, qkv: Tensor, mixer: Attention, w: AttentionWeights) -> Tensor:
        """Return products whose queries are normed over all heads together, and keys too."""
        q, k, rest = qkv.tensor_split([mixer.q_size, mixer.q_size + mixer.kv_size], 1)
        parts: Any = ((q, w.q_norm), (k, w.k_norm))
        q, k = (
            part if weight is None else self._normed_part(part, weight) for part, weight in parts
        )
        return torch.cat([q, k, rest], 1)

    def _normed_part(self, part: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's heads, normed over those of all ranks together."""
        width, whole = part.shape[1], self._ranks.gather(part)
        copies = whole.shape[1] // len(weight)  # of each key head, where there are few of them
        if copies > 1:
            whole = whole.unflatten(1, (self._ranks.count, width))[:, ::copies].flatten(1)
        eps, first = self.arch.norm_eps, self._ranks.rank // copies * width
        whole = self.ops.norm(whole.contiguous(), weight, None, eps, "rms", part.dtype)
        return whole[:, first : first + width]

    def _feed_forward(
        self, i: int, x: Tensor, row: Tensor, w: LayerWeights, given: Inputs
    ) -> Tensor | None:
        """Return what a network makes of normed rows; some experts read the stream ``x`` itself."""
        ffn = self.arch.layers[i].ffn
        if w.ffn is None:
            return None
        if not isinstance(ffn, Experts):
            return self._network(row, w.ffn, ffn, adaptation(i, given.adapted))
        if ffn.beside is None:
            return mixture(row, row, w.ffn, ffn, self.ops, self._product, self._ranks)
        norms, wide = w.norms, torch.float32
        dense = self._network(row, w.ffn.beside, ffn.beside, not_adapted)
        read, routed = (
            self._normed(x, norms[name], self.dtype) for name in ("experts_norm", "router_norm")
        )
        met = mixture(read, routed, w.ffn, ffn, self.ops, self._product, self._ranks)
        dense = self._normed(dense, norms["beside_post_norm"], wide)
        return dense + self._normed(met, norms["experts_post_norm"], wide)

    def _network(self, row: Tensor, weights: Any, ffn: Any, adapt: Adapt) -> Tensor:
        inner = self._product(row, weights.gate_up, weights.gate_up_bias, None)
        inner = adapt(inner, row, *(("gate", "up") if ffn.gated else ("up",)))
        inner = self._ranks.gather(self.ops.gate(inner, ffn.activation, ffn.gated, ffn.gate_scale))
        out = adapt(self._product(inner, weights.down, weights.down_bias, None), inner, "down")
        out = self._ranks.gather(out)
        return out if ffn.out_scale == 1.0 else out * ffn.out_scale
