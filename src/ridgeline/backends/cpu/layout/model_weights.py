"""A model's weights as kernels read them: packed matrices, norms, biases, rope tables, embedding.

Part of the keys' bias stays out of an int8 cache (``split``): ``emit.attention`` says how it is
used. The output head is there once more in 5 bits (``proxy``). Greedy decoding of a few rows reads
the proxy, and of the head itself only tiles that could still hold the likeliest token
(``emit.argmax``).

It turns a ``Checkpoint`` into one array of layer words and keeps the memory they point to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.arrays import address, aligned, aligned_copy
from ridgeline.backends.cpu.layout import weight_cache
from ridgeline.backends.cpu.layout.arguments import LAYER, MATRIX
from ridgeline.backends.cpu.layout.formats import TILE
from ridgeline.backends.cpu.layout.latent import per_head
from ridgeline.backends.cpu.layout.model_sizes import (
    head_permutation,
    model_sizes,
    part_bytes,
    rotating_pairs,
)
from ridgeline.backends.cpu.layout.pack import (
    LANES,
    Index,
    PackedMatrix,
    pack,
    pack_nibbles,
    padded,
    unpack_w8,
)
from ridgeline.backends.cpu.layout.quantise import Bytes, nonzero
from ridgeline.backends.cpu.layout.recurrent import places as recurrent_places
from ridgeline.backends.cpu.layout.recurrent import vectors as recurrent_vectors
from ridgeline.backends.cpu.layout.sampling_table import padded_vocab
from ridgeline.backends.cpu.layout.shapes import (
    LINE,
    PRUNED_ROWS,
    TOKENS,
    AttentionLayout,
    KernelConfig,
    LayerVariant,
)
from ridgeline.backends.cpu.layout.weight_cache import PackedArray
from ridgeline.backends.inputs import biases_by_distance
from ridgeline.backends.interface import Footprint, Setup
from ridgeline.backends.sampler.step_output import PROMPT_ROWS
from ridgeline.model.files.rope_tables import query_scales, rope_tables
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.model.shape.cache_groups import one_group
from ridgeline.model.shape.model import ModelArch, Rope
from ridgeline.system.machine import available_bytes
from ridgeline.system.report import gb

Floats = NDArray[np.float32]
PLAIN = frozenset(("router", "shared_scale"))  # matrices of a layer that stay floats in rows
_WORTH_KEEPING_BYTES = 8 << 20  # of a model's file; packing less takes a tenth of a second
# What tensors are for.
_PARTS = {
    **dict.fromkeys(("q", "k", "v", "o", "q_gate"), "attention"),
    **dict.fromkeys(("q_a", "q_b", "kv_a", "k_b", "v_b"), "attention"),
    **dict.fromkeys(("gate", "up", "down"), "mlp"),
    **dict.fromkeys(("dense_gate", "dense_up", "dense_down", "shared_scale"), "mlp"),
    **dict.fromkeys(("input_gate", "input_down", "inputs_proj"), "inputs"),
    **dict.fromkeys(("in", "qkv", "z", "beta", "decay", "out", "conv"), "recurrent"),
    **dict.fromkeys(("proxy", "distances"), "head_proxy"),
    "embedding": "embedding",
    "positions": "embedding",
    "router": "mlp",
}
_LARGE = 2.0
_SIDE_BY_SIDE = 4  # blocks of positions that a kernel reads together
_TILES_AT_ONCE = 64


@dataclass
class Weights:
    """What the arguments point to, and who keeps it alive."""

    layers: NDArray[np.int64]  # [num_layers, words]
    embedding: NDArray[np.floating]  # [vocabulary, padded hidden]
    positions: Floats  # [positions, padded hidden], the learnt embedding of them; or empty
    final_norm: Floats
    final_norm_bias: Floats  # empty if there is none, as the next
    head_bias: Floats
    head: PackedMatrix | None  # None of an encoder: nobody draws from it
    proxy: PackedMatrix | None  # the low-precision proxy of the head; with ``distances`` of outputs
    distances: Floats
    ropes: list[Floats]  # of each kind of layer: see ``tables_of_ropes``
    rope_by_pair: Floats  # [cosines and sines, half, positions]; empty if no key bias is split off
    relative_bias: Floats  # [heads, distances]: see ``backends.inputs``; or empty
    inputs: PackedMatrix | None  # what makes all layers' own inputs, and the weights of their norm
    inputs_norm: Floats
    biases: list[NDArray[Any]]  # what the layers' words say of biases, kept alive
    kinds: tuple[str, ...]
    arrays: Mapping[str, PackedArray]  # all that is packed, by canonical name
    is_mapped: bool  # whether these are read from a file

    def packed(self) -> dict[str, list[NDArray[Any]]]:
        """Return all that is packed by what it is for: embedding, attention, mlp, norms and so on.

        Norms are with biases, and the distances of the proxy with that.
        """
        by_part: dict[str, list[NDArray[Any]]] = {}
        for name, (kind, data) in self.arrays.items():
            last = name.rpartition(".")[2]
            by_part.setdefault(_PARTS.get(last, "norms" if not kind else last), []).append(data)
        return by_part

    def tables(self) -> dict[str, list[NDArray[Any]]]:
        """Return what is made of that, and of the model's facts, at each start."""
        return {
            "rope": [*self.ropes, self.rope_by_pair, self.relative_bias],
            "derived": [self.layers, *self.biases],
        }

    def prunes(self, num_rows: int) -> bool:
        """Return whether the likeliest tokens of this many rows are found by the head's proxy."""
        return self.proxy is not None and num_rows <= PRUNED_ROWS


def scores_stride(max_model_len: int) -> int:
    """Return the bytes from one row of scores to the next, off the page grid.

    Planes of probabilities, half as far apart, have 64 tokens side by side.
    """
    return (-(-max_model_len // LINE) * LINE + 2 * LANES) * 4


def logits_stride(vocab_size: int) -> int:
    """Return the bytes from one row of logits to the next: whole blocks, off the page grid."""
    return (padded_vocab(vocab_size) + 2 * TILE) * 4


def footprint(arch: ModelArch, setup: Setup, *, has_tiles: bool) -> Footprint:
    """Return how much memory a setup takes."""
    sizes = model_sizes(
        arch, setup.dtype, setup.kv_cache_dtype, setup.max_lora_rank, has_tiles=has_tiles
    )
    per_row = sizes.hidden * 10 + sizes.query_bytes + 2 * sizes.inputs_stride + sizes.mixed_stride
    local_bytes = sizes.local_bytes(scores_stride(setup.max_model_len))
    step_bytes = setup.max_num_batched_tokens * per_row + setup.threads * local_bytes
    if arch.has_head:
        step_bytes += max(setup.max_num_seqs, PROMPT_ROWS) * logits_stride(arch.vocab_size)
        step_bytes += PRUNED_ROWS * sizes.proxy_stride
    return Footprint(
        step_bytes,
        kv_bytes_per_token=part_bytes(sizes, setup.groups or one_group(arch)) // TOKENS,
        state_bytes_per_seq=4 * sizes.state_ends[-1],
        maps_weights=True,
    )


@np.errstate(all="ignore")  # values that are not finite are an error of the answers that they reach
def load_weights(
    checkpoint: Checkpoint,
    sizes: KernelConfig,
    dtype: str,
    max_model_len: int,
    cache: Path | None,
    progress: Callable[[int, int], None],
    say: Callable[[str], None] = lambda line: None,
) -> Weights:
    """Return the weights, mapped from a file in the directory ``cache``; it is made if need be.

    They are packed into that file one by one, so memory for all of them at once is not needed.
    Small models are packed into memory each time, for each place they are moved to would leave a
    file; so are all where no file can be kept. ``progress`` is told how many of how many bytes of
    the model's file are packed, ``say`` that a file was damaged. Raises ValueError if they fit
    neither there nor into memory.
    """
    arrays, packed = None, partial(_pack_all, checkpoint, sizes, dtype, progress)
    is_worth_it = checkpoint.contents.files and checkpoint.nbytes >= _WORTH_KEEPING_BYTES
    if cache is not None and is_worth_it:
        arrays = weight_cache.mapped(cache, checkpoint, dtype, packed, say)
    is_mapped = arrays is not None
    if arrays is None:
        if checkpoint.nbytes > available_bytes():
            raise ValueError(
                f"the weights do not fit into memory, and {cache} has no room for a file of them: "
                f"it needs {gb(checkpoint.nbytes)} and more; set RIDGELINE_HOME to a "
                f"directory with room"
            )
        arrays = {name: PackedArray(kind, aligned_copy(data)) for name, (kind, data) in packed()}
    return _assemble(arrays, checkpoint.arch, sizes, max_model_len, is_mapped=is_mapped)


def _pack_all(
    checkpoint: Checkpoint, sizes: KernelConfig, dtype: str, progress: Callable[[int, int], None]
) -> Iterator[tuple[str, PackedArray]]:
    """Pack the tensors one after another; yield their canonical names with them."""
    arch = checkpoint.arch
    total, done = checkpoint.nbytes, 0

    def matrix(
        name: str, rows: Index | None = None, columns: Index | None = None, dtype: str = dtype
    ) -> PackedArray:
        nonlocal done
        tensor = checkpoint.tensors[name]
        done += tensor.nbytes
        progress(done, total)
        return PackedArray(*pack(tensor, dtype, rows, columns))

    vector = partial(_vector, checkpoint)
    for i, kind in enumerate(sizes.layers):
        prefix, heads = f"layers.{i}.", kind.heads
        head_rows, head_columns = head_permutation(arch, sizes, i)
        # Blocks of 32 inputs stay whole where heads need no padding, and with them their values.
        places: dict[str, tuple[Index | None, Index | None]] = {
            **{name: (rows, None) for name, rows in head_rows.items()},
            "o": (None, head_columns["o"] if -1 in head_columns["o"] else None),
            "q_gate": (head_columns["o"], None),
            **_expert_places(arch, sizes, i),
            **(recurrent_places(kind.recurrence) if kind.recurrence else {}),
        }
        for name, size in vector_sizes(kind, norm_bias=sizes.norm_bias).items():
            to = places.get(name.removesuffix("_bias"), (None, None))[0]
            values = vector(prefix + name, size, to)
            mixer = arch.layers[i].attention
            if mixer is not None and name == "attn_norm":
                values *= np.float32(mixer.in_scale)
            yield prefix + name, PackedArray("", values)
        yield from _of_heads(checkpoint, prefix, heads, head_rows).items()
        tensor = partial(_floats, checkpoint, prefix)
        vectors: dict[str, NDArray[np.floating]] = {}
        vectors |= recurrent_vectors(kind.recurrence, tensor) if kind.recurrence else {}
        vectors |= per_head(tensor, heads.num_heads, heads.latent) if heads.latent else {}
        yield from ((prefix + name, PackedArray("", values)) for name, values in vectors.items())
        names = file_names(kind)
        for name in kind.matrices:
            of_file = prefix + names.get(name, name)
            yield prefix + name, matrix(of_file, *places.get(name, (None, None)))
        for name in sorted(PLAIN & arch.layers[i].ffn.shapes(arch.hidden_size).keys()):
            yield prefix + name, _plain_rows(checkpoint, prefix + name, sizes)
    for name, size in outer_sizes(arch, sizes).items():
        yield name, PackedArray("", vector(name, size))
    if sizes.inputs:
        stacked = _stacked(arch.num_layers, arch.input_size, sizes.inputs.size)
        yield "inputs_proj", matrix("inputs_proj", stacked)
        yield "inputs_norm", PackedArray("", vector("inputs_norm", sizes.inputs.size))
    if "relative_bias" in checkpoint.tensors:
        yield "relative_bias", PackedArray("", checkpoint.tensors["relative_bias"].to_f32())
    if arch.position_rows:
        yield "positions", _plain_rows(checkpoint, "positions", sizes)
    yield "embedding", PackedArray("", _embedding(checkpoint, sizes, dtype))
    if arch.has_head:
        name = "embed" if arch.tied_embeddings else "head"
        head = matrix(name, dtype=head_dtype(dtype, checkpoint.tensors[name].dtype))
        yield "head", head
        if head.kind == "w8" and not arch.head_bias and (of_proxy := proxy(PackedMatrix(*head))):
            yield "proxy", PackedArray(of_proxy[0].kind, of_proxy[0].data)
            yield "distances", PackedArray("", of_proxy[1])
    progress(total, total)


def _of_heads(
    checkpoint: Checkpoint, prefix: str, heads: AttentionLayout, head_rows: dict[str, Index]
) -> dict[str, PackedArray]:
    """Return the biases and norms of a layer's heads, by canonical name."""
    vectors: dict[str, PackedArray] = {}
    if heads.attention.qkv_bias:
        parts = [(f"{name}_bias", head_rows[name]) for name in heads.projections]
        biases = [_vector(checkpoint, prefix + name, len(rows), rows) for name, rows in parts]
        vectors[prefix + "qkv_bias"] = PackedArray("", np.concatenate(biases))
    if heads.attention.qkv_bias and heads.owns:
        norm = checkpoint.tensors[prefix + "attn_norm"].to_f32()
        sizes_of_keys = spreads(checkpoint.tensors[prefix + "k"].to_f32(), norm)
        by_row = np.append(sizes_of_keys, np.float32(0))  # 0 where there is no channel
        vectors[prefix + "key_spreads"] = PackedArray("", by_row[head_rows["k"]])
    if heads.attention.qk_norm:
        orders = [head_rows[name] for name in heads.projections[:2]]
        if heads.attention.qk_norm == "head":
            orders = [order[: heads.size] for order in orders]  # the first head's
        norms = [
            _vector(checkpoint, prefix + n, len(order), order)
            for n, order in zip(("q_norm", "k_norm"), orders, strict=False)
        ]
        vectors[prefix + "qk_norms"] = PackedArray("", np.concatenate(norms))
    return vectors


def _floats(checkpoint: Checkpoint, prefix: str, name: str) -> Floats:
    """Return a tensor of a layer in f32."""
    return checkpoint.tensors[prefix + name].to_f32()


def _vector(checkpoint: Checkpoint, name: str, size: int, places: Index | None = None) -> Floats:
    """Return a tensor of one dimension in f32, padded; ``places`` are where values come from."""
    values = checkpoint.tensors[name].to_f32()
    out = np.zeros(size, np.float32)
    spread = np.arange(len(values)) if places is None else places
    out[: len(spread)][spread >= 0] = values[spread[spread >= 0]]
    return out


def _assemble(
    arrays: dict[str, PackedArray],
    arch: ModelArch,
    sizes: KernelConfig,
    max_model_len: int,
    *,
    is_mapped: bool,
) -> Weights:
    """Write the addresses and shapes of all weights into words."""
    layers = np.zeros((arch.num_layers, len(LAYER)), np.int64)
    column_of = {name: i for i, name in enumerate(LAYER)}
    layers[:, column_of["number"]] = np.arange(arch.num_layers)
    layers[:, column_of["kind"]] = sizes.kind_of
    layers[1:, column_of["state_at"]] = sizes.state_ends[:-1]
    layers[:, column_of["state_at"]] *= 4
    for i, one in enumerate(arch.layers):
        mixer = one.attention
        layers[i, column_of["window"]] = (mixer.window or 0) if mixer else 0
    for name, (kind, data) in arrays.items():
        if not name.startswith("layers.") or name.endswith(".key_spreads"):
            continue
        _, index, part = name.split(".")
        layer = layers[int(index)]
        if kind:
            facts = (address(data), *PackedMatrix(kind, data).words)
            for word, value in zip(MATRIX, facts, strict=True):
                layer[column_of[f"{part}_{word}"]] = value
        else:
            layer[column_of[part]] = address(data)
    biases = list[NDArray[Any]]()
    for i, of_layer in enumerate(sizes.layers):
        if not of_layer.heads.splits_key_bias:
            continue
        if (owner := arch.layers[i].known_attention.kv_of) is not None:
            for word in ("key_bias", "key_bias_pairs"):
                layers[i, column_of[word]] = layers[owner, column_of[word]]
            continue
        both = (arrays[f"layers.{i}.{name}"].data for name in ("qkv_bias", "key_spreads"))
        parts = split(of_layer.heads, *both)
        for word, data in zip(("qkv_bias", "key_bias", "key_bias_pairs"), parts, strict=True):
            layers[i, column_of[word]] = address(data)
            biases.append(data)
    tables = tables_of_ropes(arch, sizes, max_model_len)
    for row, one, of_layer in zip(layers, arch.layers, sizes.layers, strict=True):
        if one.attention is not None:
            of_rope = tables[one.attention.rope, of_layer.heads.half]
            words = [column_of[word] for word in ("cos", "sin", "query_scales")]
            row[words] = [address(table) for table in of_rope]
    final_norm, final_norm_bias, head_bias = (
        _scaled(arrays[name].data, arch.logit_scale) if name in arrays else np.zeros(0, np.float32)
        for name in ("norm", "norm_bias", "head_bias")
    )
    split_heads = [heads for heads in sizes.all_heads if heads.splits_key_bias]
    by_pair = np.zeros((2, 1, 0), np.float32)
    if split_heads:  # then there is one rope
        pairs, (cos, sin, _) = rotating_pairs(arch, arch.layers[0]), next(iter(tables.values()))
        by_pair = rope_by_pair(split_heads[0], cos[:, :pairs], sin[:, :pairs])
    by_distance = np.zeros((1, 0), np.float32)
    if "relative_bias" in arrays:
        by_distance = biases_by_distance(arrays["relative_bias"].data, max_model_len)
    return Weights(
        layers=layers,
        embedding=arrays["embedding"].data,
        positions=arrays["positions"].data if arch.position_rows else np.zeros(0, np.float32),
        final_norm=final_norm,
        final_norm_bias=final_norm_bias,
        head_bias=head_bias,
        head=PackedMatrix(*arrays["head"]) if "head" in arrays else None,
        proxy=PackedMatrix(*arrays["proxy"]) if "proxy" in arrays else None,
        distances=arrays["distances"].data if "proxy" in arrays else np.zeros(0, np.float32),
        ropes=[table for of_rope in tables.values() for table in of_rope],
        rope_by_pair=by_pair,
        relative_bias=by_distance,
        inputs=PackedMatrix(*arrays["inputs_proj"]) if sizes.inputs else None,
        inputs_norm=arrays["inputs_norm"].data if sizes.inputs else np.zeros(0, np.float32),
        biases=biases,
        kinds=tuple(dict.fromkeys(kind for kind, _ in arrays.values() if kind)),
        arrays=arrays,
        is_mapped=is_mapped,
    )


def _expert_places(
    arch: ModelArch, sizes: KernelConfig, layer: int
) -> dict[str, tuple[Index | None, Index | None]]:
    """Return where the outputs of a layer's stacked experts come from: each is whole tiles."""
    ffn = sizes.layers[layer].ffn
    if ffn.experts is None:
        return {}
    inner = _stacked(ffn.experts.num, arch.layers[layer].ffn.size, ffn.size)
    outer = _stacked(ffn.experts.num, arch.hidden_size, sizes.hidden)
    return {"gate": (inner, None), "up": (inner, None), "down": (outer, None)}


def _stacked(count: int, size: int, room: int) -> Index:
    """Return where rows come from that stand in groups of ``size``, each with ``room``."""
    rows = np.full((count, room), -1)
    rows[:, :size] = np.arange(count)[:, None] * size + np.arange(size)
    return rows.reshape(-1)


def file_names(kind: LayerVariant) -> dict[str, str]:
    """Return the canonical names of matrices that have others in a layer's words."""
    experts = kind.ffn.experts
    names = {"input_down": "input_proj"}
    if experts and kind.dense:
        of_dense = "beside" if experts.beside else "shared"
        names |= {f"dense_{name}": f"{of_dense}_{name}" for name in (*kind.dense.inner, "down")}
    return names


def _scaled(norm: Floats, logit_scale: float) -> Floats:
    """Return the last norm: a larger one scales all logits, whatever the head's weights are."""
    return norm if logit_scale == 1.0 else norm * np.float32(logit_scale)


def vector_sizes(kind: LayerVariant, *, norm_bias: bool) -> dict[str, int]:
    """Return the padded lengths of a layer's norms and biases, but those of its heads."""
    ffn, hidden = kind.ffn, kind.hidden
    lengths = dict.fromkeys(kind.norm_names, hidden)
    if norm_bias:
        lengths |= {f"{name}_bias": hidden for name in kind.norm_names}
    if kind.o_bias and kind.heads.num_heads:
        lengths["o_bias"] = hidden
    if kind.heads.attention.sinks:
        lengths["sinks"] = kind.heads.num_heads
    if ffn.bias:
        num = ffn.experts.num if ffn.experts else 1
        lengths |= {f"{name}_bias": num * ffn.size for name in ffn.inner}
        lengths["down_bias"] = num * hidden
    if ffn.experts and ffn.experts.bias:
        lengths["router_bias"] = ffn.experts.num
    if kind.heads.latent:
        lengths["kv_a_norm"] = kind.heads.latent.rank
        if kind.heads.latent.q_rank:
            lengths["q_a_norm"] = kind.heads.latent.q_rank
    if ffn.experts and ffn.experts.choice_bias:
        lengths["choice_bias"] = ffn.experts.num
    if ffn.experts and ffn.experts.own_scales:
        lengths["expert_scales"] = ffn.experts.num
    if kind.out_scale:
        lengths["out_scale"] = 1
    return lengths


def outer_sizes(arch: ModelArch, sizes: KernelConfig) -> dict[str, int]:
    """Return the padded lengths of the vectors behind the layers."""
    lengths = {"norm": sizes.hidden}
    if arch.norm_bias:
        lengths["norm_bias"] = sizes.hidden
    if arch.head_bias:
        lengths["head_bias"] = padded(arch.vocab_size)
    return lengths


def _plain_rows(checkpoint: Checkpoint, name: str, sizes: KernelConfig) -> PackedArray:
    """Return rows as wide as the residual stream, in f32, padded."""
    values = checkpoint.tensors[name].to_f32()
    out = np.zeros((len(values), sizes.hidden), np.float32)
    out[:, : values.shape[1]] = values
    return PackedArray("", out)


def _embedding(checkpoint: Checkpoint, sizes: KernelConfig, dtype: str) -> NDArray[np.floating]:
    """Return the embedding by rows."""
    tensor = checkpoint.tensors["embed"]
    shape = (tensor.shape[0], sizes.hidden)
    out: NDArray[np.floating] = aligned(shape, embedding_type(dtype))
    for low in range(0, tensor.shape[0], 8192):
        part = tensor.rows(slice(low, low + 8192)).to_f32()
        out[low : low + len(part), : part.shape[1]] = part
    return out


def embedding_type(dtype: str) -> type[np.floating]:
    """Half precision, if weights are quantised anyway."""
    return np.float32 if dtype in ("f32", "bf16") else np.float16


def head_dtype(dtype: str, file_dtype: str) -> str:
    """The output head matters most for accuracy: never 4 bits if the file has more.

    6 bits are widened: few rows read hardly any of it but its proxy, and for more the products
    of 8 bits are a fifth quicker.
    """
    dtype = "auto" if dtype == "int4" else dtype
    return "int8" if (dtype, file_dtype) == ("auto", "Q6_K") else dtype


def spreads(weight: Floats, norm: Floats) -> Floats:
    """Return how large keys are without their bias, by channel: their standard deviation.

    Args:
        weight: of the projection, ``[channels, hidden]``.
        norm: weights of the norm before it, ``[hidden]``; after it, channels are taken to be
            independent and to have a mean square of 1.
    """
    scaled = weight * norm
    size: Floats = np.sqrt(np.einsum("ij,ij->i", scaled, scaled))
    return size


def split(
    heads: AttentionLayout, bias: Floats, spread: Floats
) -> tuple[Floats, Floats, NDArray[np.int32]]:
    """Return the bias that stays with queries, keys and values, and what is taken out.

    Args:
        heads: shape.
        bias: of queries, keys and values, heads padded, ``[channels]``.
        spread: of keys without their bias, ``[key channels]``.

    The part taken out is ``[kv heads, first and second channels of pairs]``. The pairs are, for
    each K/V head, their number, then their indices. A pair is among them if its bias is larger than
    the middle one of the head's keys without theirs.
    """
    stays, half = bias.copy(), heads.half
    keys = stays[heads.num_heads * heads.size :][: heads.num_kv_heads * heads.size]
    keys = keys.reshape(heads.num_kv_heads, heads.size)
    keys[:, 2 * half :] = 0  # the same for all keys, and so for all scores of a query
    spread = spread.reshape(keys.shape)
    sizes = np.hypot(spread[:, :half], spread[:, half : 2 * half])
    biases = np.hypot(keys[:, :half], keys[:, half : 2 * half])
    apart = np.zeros((heads.num_kv_heads, 2 * half), np.float32)
    pairs = np.zeros((heads.num_kv_heads, 1 + half), np.int32)
    for head, size in enumerate(sizes):
        positive = size[size > 0]  # neither padding nor damaged
        middle = np.median(positive) if len(positive) else 0
        large = np.flatnonzero(biases[head] > _LARGE * middle)
        pairs[head, 0], pairs[head, 1 : 1 + len(large)] = len(large), large
        for channels in (large, half + large):
            apart[head, channels] = keys[head, channels]
            keys[head, channels] = 0
    return stays, apart, pairs


def rope_by_pair(heads: AttentionLayout, cos: Floats, sin: Floats) -> Floats:
    """Return the rope tables by pairs, ``[cosines and sines, half, positions]``, zero behind."""
    if not heads.splits_key_bias:
        return np.zeros((2, 1, 0), np.float32)
    positions, pairs = cos.shape
    length = (-(-positions // TOKENS) + _SIDE_BY_SIDE) * TOKENS
    out = np.zeros((2, heads.half, length), np.float32)
    out[:, :pairs, :positions] = cos.T, sin.T
    return out


def proxy(head: PackedMatrix) -> tuple[PackedMatrix, NDArray[np.float32]] | None:
    """Return a w8 matrix again in 5 bits, and each output's distance from it; None if not finite.

    Outputs have much in common, which would make their steps coarse: it is taken off, and stands
    behind them as the first output of one more tile. However head and proxy are multiplied by
    activations x, a result differs from its own plus the common one by at most the distance times
    the length of x: the distance (Euclidean) holds what all three may lose by rounding.
    """
    parts = range(0, len(head.data), _TILES_AT_ONCE)
    total = sum(_weights_of(head, low)[0].sum(axis=0) for low in parts)
    mean = np.zeros((TILE, len(total)), np.float32)
    mean[0] = total / (len(head.data) * TILE)
    with np.errstate(over="ignore", invalid="ignore"):  # checked at the end
        centre = _to_five_bits(mean)
        common = _of_five_bits(*centre)[0]
        tiles, distances = [], []
        for low in parts:
            weights, scale = _weights_of(head, low)
            own = _to_five_bits(weights - common)
            lost = weights - common - _of_five_bits(*own)
            # Bounds on a record's terms, without the sum of 32 activations.
            terms = 384 * scale + 47 * np.abs(own[1]) + 47 * np.abs(centre[1][0])
            rounding = (terms.shape[1] + 16) * 2.0**-24 * TILE**0.5
            lengths = [np.linalg.norm(part, axis=1) for part in (lost, terms)]
            distances.append(1.001 * lengths[0] + rounding * lengths[1])
            tiles.append(pack_nibbles("s5", *own).data)
    tiles.append(pack_nibbles("s5", *centre).data)
    distance = np.concatenate(distances).astype(np.float32)
    return (
        (PackedMatrix("s5", np.concatenate(tiles)), distance)
        if np.isfinite(distance).all()
        else None
    )


def _weights_of(head: PackedMatrix, low: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the weights and scales of some tiles of a w8 matrix, from ``low`` on."""
    q, scale = unpack_w8(head.data[low : low + _TILES_AT_ONCE])
    wide = scale.astype(np.float32)
    return q.astype(np.float32) * np.repeat(wide, TILE, axis=1), wide


def _to_five_bits(weights: NDArray[np.float32]) -> tuple[Bytes, NDArray[np.float16]]:
    """Quantise to 5 bits with a scale for each 32: as Q5_0 does, w = d (q - 16)."""
    groups = weights.reshape(len(weights), -1, TILE)
    place = np.abs(groups).argmax(axis=2)
    largest = np.take_along_axis(groups, place[:, :, None], axis=2)[:, :, 0]
    scale = (largest / -16).astype(np.float16)
    q = np.rint(groups / nonzero(scale)[:, :, None]).clip(-16, 15) + 16
    return q.astype(np.uint8).reshape(weights.shape), scale


def _of_five_bits(q: Bytes, scale: NDArray[np.float16]) -> NDArray[np.float32]:
    """Return the weights that ``_to_five_bits`` quantised."""
    return (q.astype(np.float32) - 16) * np.repeat(scale.astype(np.float32), TILE, axis=1)


def tables_of_ropes(
    arch: ModelArch, sizes: KernelConfig, max_model_len: int
) -> dict[tuple[Rope | None, int], tuple[Floats, Floats, Floats]]:
    """Return the tables of each rope, by it and the pairs of a head.

    They are cosines and sines, ``[positions, pairs]``, where nothing turns 1 and 0, and what
    queries are multiplied by, ``[positions]``: empty where that is nothing.
    """
    tables: dict[tuple[Rope | None, int], tuple[Floats, Floats, Floats]] = {}
    for layer, kind in zip(arch.layers, sizes.layers, strict=True):
        if layer.attention is None:
            continue
        rope, half = key = layer.attention.rope, kind.heads.half
        if key in tables:
            continue
        shape = (max_model_len, half)
        cos, sin = np.ones(shape, np.float32), np.zeros(shape, np.float32)
        scales = np.zeros(0, np.float32)
        if rope:
            padding = ((0, 0), (0, half - rope.dim // 2))
            cos, sin = rope_tables(rope, max_model_len)
            cos, sin = np.pad(cos, padding), np.pad(sin, padding)
            if rope.query_growth:
                scales = query_scales(rope, max_model_len)
        tables[key] = cos, sin, scales
    return tables
