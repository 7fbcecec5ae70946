"""What any decoder holds, as shapes: enough to count weights and cache, too little to compute with.

``ModelArch`` describes models that the engine runs; a ``ModelShape`` also those that it does not,
with experts, latent attention or state-space layers. It knows nothing of bytes (see
``format_bytes``), devices and files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

GROUPS = ("embedding", "attention", "state space", "MLP", "experts", "norms", "head")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor of weights, or several equal ones.

    Attributes:
        name: as Hugging Face names the module; within a layer without the layer's prefix.
        group: one of ``GROUPS``.
        rows: outputs; the length of a vector.
        columns: inputs; 1 for a vector.
        ways: over how many ranks of tensor parallelism it can be divided; 1 is copied to each.
        copies: how many there are: experts.
        active: how many of the copies a token uses.
        linear: whether formats that quantise convert it; norms, routers and such are left alone.
    """

    name: str
    group: str
    rows: int
    columns: int = 1
    ways: int = 1
    copies: int = 1
    active: int = 1
    linear: bool = True

    @property
    def num_params(self) -> int:
        """All weights, those of every copy."""
        return self.rows * self.columns * self.copies

    @property
    def num_active_params(self) -> int:
        """Weights that one token meets."""
        return self.rows * self.columns * self.active


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What a layer keeps of a sequence.

    Attributes:
        kind: "full attention", "sliding window", "latent", "state", or "shared" for a layer that
            reads another layer's.
        values_per_head: of one token: its key and its value, or its latent vector.
        num_heads: heads that ranks divide among them; with more ranks than heads each has one.
        window: how many last tokens are seen; None sees all.
        state_values: of a sequence, however long it is; divided among ranks.
    """

    kind: str
    values_per_head: int = 0
    num_heads: int = 1
    window: int | None = None
    state_values: int = 0

    def values_per_token(self, num_ranks: int = 1) -> int:
        """Return the values that one rank keeps of one token."""
        return self.values_per_head * -(-self.num_heads // num_ranks)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer.

    Attributes:
        kind: mha, gqa, mqa, mla, linear attention or state space.
        matrices: its weights.
        cache: what it keeps of a sequence.
        attention_values: of one token, while attention computes: queries, keys, values, output.
        mlp_values: of one token, while the MLP or the chosen experts compute.
    """

    kind: str
    matrices: tuple[Matrix, ...]
    cache: LayerCache
    attention_values: int
    mlp_values: int


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class ModelShape:
    """A model.

    Attributes:
        name: the family, as the file calls it.
        hidden_size: width of the residual stream.
        vocab_size: rows of the embedding.
        max_position: context that it was trained for, tokens; 0 where the file does not say.
        num_heads: query heads; tensor parallelism must divide them.
        num_kv_heads: key and value heads; the ranks divide them, or they divide the ranks.
        layers: in order.
        embedding: the embedding and what else stands before the layers.
        end: what follows the layers: the last norm, and the head unless it is tied.
        is_tied: the head is the embedding.
        fused_qkv: files have queries, keys and values of a layer in one matrix, not three.
        mtp: weights for predicting several tokens, apart: only speculative decoding loads them.
        not_counted: fields whose weights are not in here.
        towers: the same, of halves that see or hear: the half that reads text runs without them.
        assumptions: what was taken for granted, each a sentence.
    """

    name: str
    hidden_size: int
    vocab_size: int
    max_position: int
    num_heads: int
    num_kv_heads: int
    layers: tuple[LayerShape, ...]
    embedding: tuple[Matrix, ...]
    end: tuple[Matrix, ...]
    is_tied: bool = False
    fused_qkv: bool = False
    mtp: tuple[Matrix, ...] = ()
    not_counted: tuple[str, ...] = ()
    towers: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    def matrices(self) -> Iterator[tuple[str, Matrix]]:
        """Yield every matrix with its full name; those for several tokens are left out."""
        for matrix in self.embedding:
            yield f"model.{matrix.name}", matrix
        for i, layer in enumerate(self.layers):
            for matrix in layer.matrices:
                yield f"model.layers.{i}.{matrix.name}", matrix
        for matrix in self.end:
            yield matrix.name if matrix.group == "head" else f"model.{matrix.name}", matrix

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its layers, and of what else is special, each once."""
        kinds = [layer.kind for layer in self.layers]
        kinds += [layer.cache.kind for layer in self.layers if layer.cache.kind != "full attention"]
        kinds += ["state" for layer in self.layers if layer.cache.state_values]
        kinds += ["moe" for _, matrix in self.matrices() if matrix.copies > 1]
        return tuple(dict.fromkeys(kinds))


def check_ranks(shape: ModelShape, count: int) -> None:
    """Raise ValueError unless ranks of tensor parallelism can divide the model's heads."""
    if shape.num_heads % count:
        raise ValueError(f"--tensor-parallel-size {count} does not divide {shape.num_heads} heads")
    if shape.num_kv_heads % count and count % shape.num_kv_heads:
        raise ValueError(
            f"--tensor-parallel-size {count} and {shape.num_kv_heads} key and value heads: one "
            f"must divide the other"
        )


def weight_params(shape: ModelShape) -> int:
    """Return the number of weights; an embedding that is also the head counts once."""
    return sum(matrix.num_params for _, matrix in shape.matrices())


def active_params(shape: ModelShape) -> int:
    """Return the number of weights that one token meets: of the experts only the chosen ones."""
    return sum(matrix.num_active_params for _, matrix in shape.matrices())


def mtp_params(shape: ModelShape) -> int:
    """Return the number of weights that only predict further tokens."""
    return sum(matrix.num_params for matrix in shape.mtp)
