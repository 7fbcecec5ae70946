"""What a decoder-only transformer looks like, as structural facts.

One description serves every family: a backend reads these facts and never asks for a model's name.
This module holds no tensors, reads no files, and knows no file format.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (Su et al., 2021), halves rotated together ("NeoX" order).

    Pair ``i`` of ``dim // 2`` turns by ``position * theta ** (-2 i / dim) / divisor[i]`` radians;
    cosine and sine are then multiplied by ``attention_factor``. Every published scaling of the
    context (linear, Llama 3, YaRN, LongRoPE) is such a list of divisors.

    Attributes:
        theta: base of the frequencies.
        dim: how many of a head's first channels rotate (``< head_dim`` is "partial" rope).
        divisors: one per pair; empty means all ones.
        attention_factor: multiplies cosine and sine.
        long_divisors: LongRoPE's second list, for models run beyond ``original_max_position``.
        original_max_position: context length before extension, tokens; 0 where it does not matter.
    """

    theta: float
    dim: int
    divisors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    long_divisors: tuple[float, ...] = ()
    original_max_position: int = 0

    def divisors_for(self, max_model_len: int) -> tuple[float, ...]:
        """Return the divisors for an engine whose sequences may reach ``max_model_len`` tokens.

        The choice is made once for all positions, so that a cached key never depends on how long
        its sequence became later.
        """
        if self.long_divisors and max_model_len > self.original_max_position:
            return self.long_divisors
        return self.divisors or (1.0,) * (self.dim // 2)


@dataclass(frozen=True, slots=True)
class ModelArch:
    """Shapes and switches of one decoder: pre-norm attention and SwiGLU blocks with RMS norms.

    Attributes:
        num_layers: blocks.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP.
        num_heads: query heads.
        num_kv_heads: key and value heads; each serves ``num_heads // num_kv_heads`` query heads.
        head_dim: channels per head.
        vocab_size: rows of the embedding.
        max_position: context length the model was trained for, tokens.
        norm_eps: epsilon of the RMS norms.
        rope: rotary embedding.
        windows: per layer, how many last tokens a token sees (itself included); None sees all.
        qkv_bias: the q, k and v projections have a bias.
        o_bias: the output projection of attention has a bias.
        qk_norm: RMS norm over each head's channels of q and k before rope.
        tied_embeddings: the output head is the embedding.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False

    def matrix_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return canonical name and shape ``(out, in)`` of every tensor that the model needs."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, self.hidden_size)}
        for i in range(self.num_layers):
            layer: dict[str, tuple[int, ...]] = {
                "attn_norm": (self.hidden_size,),
                "q": (q_size, self.hidden_size),
                "k": (kv_size, self.hidden_size),
                "v": (kv_size, self.hidden_size),
                "o": (self.hidden_size, q_size),
                "mlp_norm": (self.hidden_size,),
                "gate": (self.intermediate_size, self.hidden_size),
                "up": (self.intermediate_size, self.hidden_size),
                "down": (self.hidden_size, self.intermediate_size),
            }
            if self.qkv_bias:
                layer |= {"q_bias": (q_size,), "k_bias": (kv_size,), "v_bias": (kv_size,)}
            if self.o_bias:
                layer["o_bias"] = (self.hidden_size,)
            if self.qk_norm:
                layer |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        shapes["norm"] = (self.hidden_size,)
        if not self.tied_embeddings:
            shapes["head"] = (self.vocab_size, self.hidden_size)
        return shapes
