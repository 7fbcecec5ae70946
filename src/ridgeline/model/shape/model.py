"""What a transformer looks like, a decoder or an encoder, as structural facts.

One description serves every family: a backend reads these facts and never asks for a model's name.
This module holds no tensors, reads no files, and knows nothing of their formats. It computes no
angle of rotary embedding: see ``files.rope_tables``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ridgeline.model.shape.latent import Latent
from ridgeline.model.shape.recurrent import Conv, Delta, Recurrent, Ssm, num_state_values

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped"]
Pooling = Literal["", "last", "mean", "cls"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (Su et al., 2021), halves rotated together ("NeoX" order).

    Pair ``i`` of ``dim // 2`` turns by ``position * theta ** (-2 i / dim) / divisor[i]`` radians;
    cosine and sine are then multiplied by ``attention_factor``. Every published scaling of the
    context (linear, Llama 3, YaRN, LongRoPE) is such a list of divisors.

    Attributes:
        theta: base of the frequencies.
        dim: how many of a head's first channels rotate (``< head_dim`` is "partial" rope).
        divisors: one per pair, infinite for one that stands still; empty means all ones.
        attention_factor: multiplies cosine and sine.
        long_divisors: LongRoPE's second list, for models run beyond ``original_max_position``.
        original_max_position: context length before extension, tokens; 0 where it does not matter.
        query_growth: queries are multiplied by ``1 + growth ln(1 + position //
            original_max_position)``, so that scores stay sharp in long texts (Llama 4, 2025).
    """

    theta: float
    dim: int
    divisors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    long_divisors: tuple[float, ...] = ()
    original_max_position: int = 0
    query_growth: float = 0.0

    def divisors_for(self, max_model_len: int) -> tuple[float, ...]:
        """Return the divisors for an engine whose sequences may reach ``max_model_len`` tokens.

        The choice is made once for all positions, so that a cached key never depends on how long
        its sequence became later.
        """
        if self.long_divisors and max_model_len > self.original_max_position:
            return self.long_divisors
        return self.divisors or (1.0,) * (self.dim // 2)


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention with a key and a value for each token and key/value head.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key and value heads; each serves ``num_heads // num_kv_heads`` query heads.
        head_dim: channels per head.
        rope: rotary embedding; None turns nothing (NoPE).
        window: how many last tokens a token sees (itself included), and, where it sees what
            follows, how many of these; None sees all.
        scale: of the products of queries and keys; None means ``head_dim ** -0.5``.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 leaves them.
        qk_norm: RMS norm of q and k before rope: "" for none, over each "head", or over the whole
            "width" of all heads.
        norm_turned: that norm stands behind rope.
        causal: a token sees those before it alone; else all of the text, as in an encoder.
        qkv_bias: the q, k and v projections have a bias.
        o_bias: the output projection has a bias.
        sinks: each query head has a learnt score that takes its share of the softmax and has no
            value (Xiao et al., 2023).
        gated: the output is multiplied by the sigmoid of another projection of the input.
        in_scale: multiplies the input.
        out_scale: multiplies the output.
        kv_of: the number of an earlier layer whose keys and values it reads, of as many heads and
            channels; it has none of its own (Brandon et al., 2024). None: it has its own.
        v_norm: RMS norm of each value head, without a weight.
        v_is_k: values are the products for keys, before these are normed and turned.
        slopes: of each query head; a score loses the head's slope times the distance of the two
            tokens (ALiBi; Press et al., 2022). Empty: nothing.
        bias_buckets: scores gain a learnt number of each head, by the distance of key and query in
            this many buckets; the numbers serve all layers (T5; Raffel et al., 2020). 0: nothing.
        latent: keys and values of all heads are made of one vector of a token, which alone is kept;
            ``num_kv_heads`` is 1, and ``head_dim`` that of a query before it is absorbed.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    window: int | None = None
    scale: float | None = None
    softcap: float = 0.0
    qk_norm: Literal["", "head", "width"] = ""
    norm_turned: bool = False
    causal: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    sinks: bool = False
    gated: bool = False
    in_scale: float = 1.0
    out_scale: float = 1.0
    kv_of: int | None = None
    v_norm: bool = False
    v_is_k: bool = False
    latent: Latent | None = None
    slopes: tuple[float, ...] = ()
    bias_buckets: int = 0

    @property
    def projections(self) -> tuple[str, ...]:
        """Canonical names of the matrices that make queries, keys and values, in this order."""
        if self.latent is not None:
            return self.latent.projections
        if self.kv_of is not None:
            return ("q",)
        return ("q", "k") if self.v_is_k else ("q", "k", "v")

    @property
    def score_scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def q_size(self) -> int:
        """Channels of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Channels of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def o_size(self) -> int:
        """Channels that the output projection reads."""
        return self.q_size if self.latent is None else self.num_heads * self.latent.v_dim

    @property
    def rope_dim(self) -> int:
        """Channels of a head that turn."""
        return self.rope.dim if self.rope else 0

    @property
    def key_dim(self) -> int:
        """Channels of a cached key, and of a query that meets it."""
        return self.head_dim if self.latent is None else self.latent.kv_rank + self.rope_dim

    @property
    def value_dim(self) -> int:
        """Channels of a cached value; of a latent it is part of the key."""
        return self.head_dim if self.latent is None else self.latent.kv_rank

    @property
    def cache_size(self) -> int:
        """Values of a token in the cache: all keys and values, or one latent."""
        return 2 * self.kv_size if self.latent is None else self.key_dim

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return canonical name and shape ``(out, in)`` of each of its tensors but the norm's."""
        if self.latent is not None:
            return self.latent.shapes(hidden_size, self.num_heads, self.rope_dim)
        q_size, kv_size = self.q_size, self.kv_size
        rows = {"q": q_size, "k": kv_size, "v": kv_size}
        rows = {name: rows[name] for name in self.projections}
        shapes: dict[str, tuple[int, ...]] = {
            name: (num_rows, hidden_size) for name, num_rows in rows.items()
        }
        shapes["o"] = (hidden_size, q_size)
        if self.qkv_bias:
            shapes |= {f"{name}_bias": (num_rows,) for name, num_rows in rows.items()}
        if self.o_bias:
            shapes["o_bias"] = (hidden_size,)
        if self.sinks:
            shapes["sinks"] = (self.num_heads,)
        if self.gated:
            shapes["q_gate"] = (q_size, hidden_size)
        if self.qk_norm == "head":
            shapes |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        elif self.qk_norm == "width":
            shapes |= {"q_norm": (q_size,), "k_norm": (kv_size,)}
        if self.kv_of is not None:
            shapes.pop("k_norm", None)
        return shapes


@dataclass(frozen=True, slots=True)
class Mlp:
    """A dense feed-forward network.

    Attributes:
        size: inner width; 0 where there is no such network.
        activation: "silu", "gelu", "gelu_tanh" (its approximation by tanh), "relu", "relu2" (its
            square; So et al., 2021), or "swiglu_clamped" of gates and inner values together:
            ``g sigmoid(1.702 g) (u + 1)``, where g is at most 7 and u from -7 to 7.
        gated: a gate, put through the activation, multiplies the inner values; without a gate the
            activation is theirs.
        bias: all its projections have a bias.
        gate_scale: multiplies what goes into the activation of a gate.
        out_scale: multiplies the output.
    """

    size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    gate_scale: float = 1.0
    out_scale: float = 1.0

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return canonical name and shape ``(out, in)`` of each of its tensors but the norm's."""
        if not self.size:
            return {}
        shapes: dict[str, tuple[int, ...]] = (
            {"gate": (self.size, hidden_size)} if self.gated else {}
        )
        shapes |= {"up": (self.size, hidden_size), "down": (hidden_size, self.size)}
        if self.bias:
            shapes |= {f"{name}_bias": shape[:1] for name, shape in shapes.items()}
        return shapes

    def active_weights(self, hidden_size: int) -> int:
        """Return how many weights of matrices a token meets."""
        return hidden_size * self.size * (3 if self.gated else 2)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: networks, of which a token goes to a few (Shazeer et al., 2017).

    The router's products are put through softmax or a sigmoid, and the experts of the largest are
    met: of equal ones the first. What they make is added up with these shares as weights.

    Attributes:
        num: experts.
        per_token: how many of them a token goes to.
        size: inner width of each.
        activation: as of ``Mlp``.
        gated: as of ``Mlp``.
        normalised: the weights of a token's experts are divided by their sum.
        scale: multiplies them.
        bias: the router and all projections have a bias.
        scales_input: its weight multiplies what an expert reads, not what it makes, and experts
            are chosen by products (Llama 4).
        shared: a network that every token goes to as well.
        shared_gated: its output is multiplied by the sigmoid of one more product.
        own_scales: each expert's weight is multiplied by a learnt number of its own, behind all
            else.
        beside: a dense network beside the experts (Gemma 4). It alone reads what "mlp_norm" made
            of the residual stream; the experts read what "experts_norm" makes of it, and the
            router what "router_norm" does. Behind each of the two stands a norm, "beside_post_norm"
            and "experts_post_norm", before both are added.
        router: what shares are of the router's products: "softmax", or each one's "sigmoid". With
            "sparsemixer" (Phi-3.5-MoE, 2024) experts are taken one by one: each one's weight is its
            share of a softmax over those that are not taken yet and not far from the best of them.
        jitter: how far: twice this part of the larger of that best product and an own magnitude.
        choice_bias: a learnt number is added to a share where experts are chosen, not where it is
            a weight (DeepSeek-V3, 2024).
        num_groups: runs of experts; 1 limits nothing.
        groups_met: runs that a token's experts may be in: those with the largest share, or with
            "sigmoid" the largest sum of two.
    """

    num: int
    per_token: int
    size: int
    activation: Activation = "silu"
    normalised: bool = True
    scale: float = 1.0
    bias: bool = False
    shared: Mlp | None = None
    shared_gated: bool = False
    own_scales: bool = False
    beside: Mlp | None = None
    router: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    choice_bias: bool = False
    num_groups: int = 1
    groups_met: int = 1
    gated: bool = True
    jitter: float = 0.0
    scales_input: bool = False

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return canonical name and shape of each tensor; matrices of experts stand in a stack."""
        inner, outer = self.num * self.size, self.num * hidden_size
        all_shapes: dict[str, tuple[int, ...]] = {
            "router": (self.num, hidden_size),
            **({"gate": (inner, hidden_size)} if self.gated else {}),
            "up": (inner, hidden_size),
            "down": (outer, self.size),
        }
        if self.bias:
            all_shapes |= {f"{name}_bias": shape[:1] for name, shape in all_shapes.items()}
        for prefix, network in (("shared", self.shared), ("beside", self.beside)):
            shapes = {} if network is None else network.shapes(hidden_size)
            all_shapes |= {f"{prefix}_{name}": shape for name, shape in shapes.items()}
        if self.shared_gated:
            all_shapes["shared_scale"] = (1, hidden_size)
        if self.own_scales:
            all_shapes["expert_scales"] = (self.num,)
        if self.choice_bias:
            all_shapes["choice_bias"] = (self.num,)
        return all_shapes

    def active_weights(self, hidden_size: int) -> int:
        """Return how many weights of matrices a token meets."""
        dense = [network for network in (self.shared, self.beside) if network is not None]
        of_dense = sum(network.active_weights(hidden_size) for network in dense)
        matrices = 3 if self.gated else 2
        return hidden_size * (self.num + matrices * self.per_token * self.size) + of_dense

    def expected_met(self, num_tokens: int) -> float:
        """Return how many experts this many tokens meet together if all are equally likely."""
        return self.num * (1.0 - (1.0 - self.per_token / self.num) ** num_tokens)


@dataclass(frozen=True, slots=True)
class Layer:
    """One block: a mixer of tokens, and what each token goes through by itself.

    Attributes:
        mixer: attention, or a mixer that keeps a state.
        ffn: the feed-forward network; an MLP of size 0 for none.
        norms: where norms stand: "before" each of the two, "behind" each, "around" each (four
            norms), or "beside": one norm before both, which read the same row; with "beside, own"
            each has a norm of its own of that row. "within" is as "before", but a norm replaces the
            residual stream: so the norm behind each of the two (Vaswani et al., 2017) is that
            before the next. "before mlp": the mixer reads the stream as it is.
        beside: a mixer that keeps a state and reads the same row as attention; both are added.
        input_size: channels of this layer's own input of each token (``ModelArch.input_scales``);
            0 for none. Behind the feed-forward network the residual stream goes through
            "input_gate" and its activation; the input multiplies that; "input_proj" and then
            "input_post_norm" make of it what is added to the stream.
        out_scale: a learnt number multiplies the residual stream behind the layer.
    """

    mixer: Attention | Recurrent
    ffn: Mlp | Experts
    norms: Literal[
        "before", "behind", "around", "beside", "beside, own", "within", "before mlp"
    ] = "before"
    beside: Recurrent | None = None
    input_size: int = 0
    out_scale: bool = False

    @property
    def attention(self) -> Attention | None:
        """The mixer, if it is attention."""
        return self.mixer if isinstance(self.mixer, Attention) else None

    @property
    def known_attention(self) -> Attention:
        """The mixer, where all layers are known to have attention."""
        assert isinstance(self.mixer, Attention)
        return self.mixer

    @property
    def recurrent(self) -> Recurrent | None:
        """The mixer that keeps a state, alone or beside attention."""
        return self.mixer if isinstance(self.mixer, Conv | Delta | Ssm) else self.beside

    @property
    def norm_names(self) -> tuple[str, ...]:
        """Canonical names of the norms over the residual stream."""
        before, behind = ("attn_norm", "mlp_norm"), ("attn_post_norm", "mlp_post_norm")
        if not self.ffn.size:
            return before[:1]
        others = {"behind": behind, "around": before + behind, "beside": before[:1]}
        others["before mlp"] = before[1:]
        names = others.get(self.norms, before)
        if isinstance(self.ffn, Experts) and self.ffn.beside is not None:
            names += ("router_norm", "experts_norm", "experts_post_norm", "beside_post_norm")
        return (*names, "input_post_norm") if self.input_size else names

    @property
    def is_parallel(self) -> bool:
        """Whether attention and the feed-forward network read the same row."""
        return self.norms in ("beside", "beside, own")

    def shapes(self, hidden_size: int, *, norm_bias: bool) -> dict[str, tuple[int, ...]]:
        """Return canonical name and shape of each of its tensors."""
        norms: dict[str, tuple[int, ...]] = dict.fromkeys(self.norm_names, (hidden_size,))
        if norm_bias:
            norms |= {f"{name}_bias": shape for name, shape in norms.items()}
        beside = {} if self.beside is None else self.beside.shapes(hidden_size)
        inputs: dict[str, tuple[int, ...]] = {}
        if self.input_size:
            inputs["input_gate"] = (self.input_size, hidden_size)
            inputs["input_proj"] = (hidden_size, self.input_size)
        if self.out_scale:
            inputs["out_scale"] = (1,)
        mixer, ffn = self.mixer.shapes(hidden_size), self.ffn.shapes(hidden_size)
        return norms | mixer | beside | ffn | inputs


@dataclass(frozen=True, slots=True)
class ModelArch:
    """A model: its layers, and what stands before and behind them.

    Attributes:
        layers: blocks, in order; equal ones may be the same object.
        hidden_size: width of the residual stream.
        vocab_size: rows of the embedding.
        max_position: context length the model was trained for, tokens.
        chunk: tokens of chunks that layers would see, so that the context ends there; 0 for none.
        norm_eps: epsilon of the norms.
        norm: "rms" (Zhang and Sennrich, 2019) or "layer", which subtracts the mean.
        norm_bias: norms over the residual stream have a bias.
        embed_norm: rows of the embedding are normed before the first layer; the head's are not.
        embed_scale: multiplies the rows of the embedding.
        residual_scale: multiplies what a mixer or a feed-forward network adds.
        logit_scale: multiplies logits.
        logit_softcap: logits become ``softcap * tanh(logit / softcap)``; 0 leaves them.
        position_rows: rows of a learnt embedding of positions; 0 for none.
        position_offset: the row of position 0.
        head_bias: the output head has a bias.
        tied_embeddings: the output head is the embedding, or there is none.
        has_head: tokens can be predicted; else the model makes vectors alone, or scores.
        pooling: which final state is a text's vector: the "last", the first ("cls"), or the
            "mean" of all; "" if the file does not say.
        scores: what the score goes through that a classifier gives to a pair of texts, made of the
            pooled state; "" for a model without one.
        num_segments: parts of a text, of which each has rows of its own among ``position_rows``.
        separator: the token that ends the first segment; -1 where there is one segment.
        num_guessing: blocks of the files that guess tokens ahead: no answer needs them.
    """

    layers: tuple[Layer, ...]
    hidden_size: int
    vocab_size: int
    max_position: int
    norm_eps: float
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    embed_norm: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    position_rows: int = 0
    position_offset: int = 0
    head_bias: bool = False
    tied_embeddings: bool = False
    has_head: bool = True
    chunk: int = 0
    pooling: Pooling = ""
    scores: Literal["", "sigmoid", "identity"] = ""
    num_segments: int = 1
    separator: int = -1
    num_guessing: int = field(default=0, compare=False)

    @property
    def num_layers(self) -> int:
        """Blocks."""
        return len(self.layers)

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The attention of each layer that has some, in order."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with keys and values of their own, in order."""
        attentions = ((i, layer.attention) for i, layer in enumerate(self.layers))
        return tuple(i for i, mixer in attentions if mixer is not None and mixer.kv_of is None)

    @property
    def input_size(self) -> int:
        """Channels of each layer's own input; 0 where layers have none."""
        return self.layers[0].input_size

    @property
    def input_scales(self) -> tuple[float, float, float]:
        """What makes all layers' inputs, ``[layers, input_size]`` of a token (Gemma 3n, 2025).

        Its row of "inputs" times the first number is added to the product of "inputs_proj" with
        its scaled embedding times the second, each layer's share of which is normed first with
        "inputs_norm". The third multiplies the sum.
        """
        return self.input_size**0.5, self.hidden_size**-0.5, 0.5**0.5

    @property
    def num_state_values(self) -> int:
        """Values, each a float32, of the state of one sequence: of all recurrent layers."""
        mixers = [layer.recurrent for layer in self.layers]
        return sum(num_state_values(one, self.hidden_size) for one in mixers if one is not None)

    @property
    def is_encoder(self) -> bool:
        """Whether tokens see what follows them."""
        return not all(attention.causal for attention in self.attentions)

    @property
    def reads_whole(self) -> bool:
        """Whether a text's vector needs all of the text in one step."""
        return self.is_encoder or self.pooling in ("mean", "cls")

    def matrix_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return canonical name and shape ``(out, in)`` of every tensor that the model needs."""
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, self.hidden_size)}
        if self.embed_norm:
            shapes |= dict.fromkeys(("embedding_norm", "embedding_norm_bias"), (self.hidden_size,))
        if self.position_rows:
            shapes["positions"] = (self.position_rows, self.hidden_size)
        if self.input_size:
            channels = self.num_layers * self.input_size
            shapes["inputs"] = (self.vocab_size, channels)
            shapes["inputs_proj"] = (channels, self.hidden_size)
            shapes["inputs_norm"] = (self.input_size,)
        for mixer in self.attentions[:1]:
            if mixer.bias_buckets:
                shapes["relative_bias"] = (mixer.bias_buckets, mixer.num_heads)
        for i, layer in enumerate(self.layers):
            of_layer = layer.shapes(self.hidden_size, norm_bias=self.norm_bias)
            shapes |= {f"layers.{i}.{name}": shape for name, shape in of_layer.items()}
        shapes["norm"] = (self.hidden_size,)
        if self.norm_bias:
            shapes["norm_bias"] = (self.hidden_size,)
        if not self.tied_embeddings:
            shapes["head"] = (self.vocab_size, self.hidden_size)
        if self.head_bias:
            shapes["head_bias"] = (self.vocab_size,)
        if self.scores:
            shapes |= {"pooler": (self.hidden_size, self.hidden_size), "scores_bias": (1,)}
            shapes |= {"pooler_bias": (self.hidden_size,), "scores": (1, self.hidden_size)}
        return shapes
