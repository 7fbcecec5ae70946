"""The reference backend: numpy, float32, written to be read. All others must agree with it.

A step is one flat batch: the tokens of all its items, one after another, whatever they are - a
prompt, a piece of one, a single token of an answer. They go through the layers together, so the
weights are read once for all. Only attention tells sequences apart: items with equally many tokens
are handled as one array, with their keys and values gathered from the paged cache.

It knows nothing of requests and keeps nothing about them: only weights and the cache. With
``Observe`` a model is seen layer by layer: what its matrices read, and no more than a layer's
weights kept.

Shapes are written in names: T tokens of the batch, B sequences of a group, N tokens of each, L
positions of context, H query heads, K key/value heads, G = H / K, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import overload
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.arrays import memory_use, release
from ridgeline.backends.hidden_state_cache import HiddenStateCache
from ridgeline.backends.inputs import FirstInputs, biases_by_distance
from ridgeline.backends.interface import CacheMemory, Counters, MemoryUse, Setup, Traffic
from ridgeline.backends.layer_weights import LayerWeights, Norm, load_layer
from ridgeline.backends.pooling import pooled, pooling_head
from ridgeline.backends.reference.parts import (
    beside_experts,
    expanded,
    feed_forward,
    linear,
    normalised,
    normalised_heads,
    queries_and_key,
    rms_norm,
    rotate,
    scaled,
    sigmoid,
    softcapped,
    softmax,
    with_input,
)
from ridgeline.backends.reference.recurrent import RecurrentStates, mix
from ridgeline.backends.reference.tiles import Tiles, tiled
from ridgeline.backends.sampler.step_output import LogitsRequest, Sampled, answered, finish
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import StepRecord
from ridgeline.core.step import Sampling, Step, StepOutput, Work
from ridgeline.model.files.adapters import AdapterWeights
from ridgeline.model.files.rope_tables import query_scales, rope_tables
from ridgeline.model.files.tensors import Checkpoint, Tensor
from ridgeline.model.shape.cache_groups import CacheGroup, one_group, places, spans
from ridgeline.model.shape.model import Attention, Experts, ModelArch

Floats = NDArray[np.float32]
Ints = NDArray[np.intp]

_Places = tuple[Ints, Ints, list[Tiles]]  # of tokens: positions, slots of the cache, groups
Observe = Callable[..., Floats]  # layer, weight, rows, *names -> weight


class ReferenceRunner:
    """A ``core.step.Runner``: weights and paged K/V in float32."""

    lost = ""

    def __init__(
        self,
        checkpoint: Checkpoint,
        setup: Setup,
        progress: Callable[[int, int], None] = lambda done, total: None,
        observe: Observe | None = None,
    ) -> None:
        """Decode the weights and allocate the cache, and slots for states.

        ``progress`` is told how many of how many bytes of the file's tensors are decoded. For
        ``observe`` see ``run_observed``: with it a layer is decoded when a step reaches it, and
        only the last one is kept.
        """
        self.arch, max_model_len = checkpoint.arch, setup.max_model_len
        self.num_blocks, self.block_size = setup.num_blocks, setup.block_size
        self._threads = setup.threads
        self._observed = observed(observe) if observe else None
        from threadpoolctl import ThreadpoolController  # here: other backends start without

        self._blas = ThreadpoolController()
        self._load(checkpoint, progress)
        ropes = [mixer.rope for mixer in self.arch.attentions]
        self._ropes = {  # cosines and sines
            rope: rope_tables(rope, max_model_len) for rope in dict.fromkeys(ropes) if rope
        }
        self._biases = [biases_by_distance(one, max_model_len) for one in self._relative_bias]
        self._query_scales = {
            rope: query_scales(rope, max_model_len) for rope in self._ropes if rope.query_growth
        }
        groups = setup.groups or one_group(self.arch)
        self._num_groups = len(groups)
        self.cache = KeysAndValues(self.arch, setup.num_blocks, setup.block_size, groups)
        self._recurrent = RecurrentStates(self.arch, setup.num_states)
        self._states = HiddenStateCache(setup.num_blocks, setup.block_size, self.arch.hidden_size)
        self._adapters: WeakValueDictionary[int, AdapterWeights] = WeakValueDictionary()

    def add_adapter(self, number: int, weights: AdapterWeights) -> AdapterWeights:
        """Let work name an adapter by this number while what is returned is kept."""
        self._adapters[number] = weights
        return weights

    def execute(self, step: Step) -> StepOutput:
        """Copy blocks, run the model once over all tokens, write K/V, sample."""
        with (
            self._blas.limit(limits=self._threads, user_api="blas"),
            np.errstate(all="ignore"),  # a damaged row is found by its values, and fails alone
        ):
            self.cache.copy(step.copies)
            self._recurrent.begin(step.state_copies)
            hidden, finite_T = self._forward(step.work)
            ends = np.cumsum([len(work.tokens) for work in step.work])
            of_items = enumerate(np.split(finite_T, ends[:-1]))
            damaged = [(i, int(of_item.argmin())) for i, of_item in of_items if not of_item.all()]
            output = finish(step.work, partial(self._answers, hidden=hidden), lambda: damaged)
            output = self._states.compare(step, output, lambda tokens: hidden[tokens])
            self._recurrent.end()
            return pooled(step, output, lambda tokens: hidden[tokens], *self._scorer)

    def prompt_logits(self, tokens: Sequence[int], start: int = 0) -> Floats:
        """Return the logits after each of ``tokens``, ``[tokens, vocab]``.

        For measuring a runner that no engine uses: the cache holds one text, in blocks 0, 1, ...
        ``tokens`` continue it at position ``start``; earlier calls computed what is before that.
        """
        blocks, *others = (
            tuple(range(group, self.num_blocks, self._num_groups))
            for group in range(self._num_groups)
        )
        sampling = Sampling(SamplingParams(), 0, ())
        work = Work(
            (0, 0), start, tuple(tokens), blocks,
            seeds=(), sampling=sampling, history=(), targets=(), state=0, others=tuple(others),
        )  # fmt: skip
        with self._blas.limit(limits=self._threads, user_api="blas"), np.errstate(all="ignore"):
            hidden = self._forward((work,))[0]
            self._recurrent.end()
            return self._logits(hidden)

    def traffic(self, step: StepRecord, num_experts: int | None = None) -> dict[str, Traffic]:
        """Return nothing: it is not known what numpy reads."""
        return {}

    def memory(self) -> dict[str, MemoryUse]:
        """Return what every array takes that is kept from step to step."""
        arrays = [layer.arrays() for layer in self._layers]
        outer = [self._norm.weight, self._norm.bias, self._head_bias]
        positions = [] if self._positions is None else [self._positions]
        if self._embed_norm is not None:
            outer += [self._embed_norm.weight, self._embed_norm.bias]
        vectors = [array for layer in arrays for array in layer["norms"]]
        of_inputs = [] if self._inputs is None else self._inputs.arrays
        by_name = {
            "weights.embedding": memory_use([self._embed, *positions, *of_inputs]),
            "weights.attention": memory_use(a for layer in arrays for a in layer["attention"]),
            "weights.mlp": memory_use(a for layer in arrays for a in layer["mlp"]),
            "weights.norms": memory_use([*vectors, *(a for a in outer if a is not None)]),
            "weights.rope": memory_use(
                [*(table for both in self._ropes.values() for table in both), *self._biases]
            ),
            "kv_cache": memory_use([self.cache.blocks]),
            "states": memory_use([self._states.array]),
            "recurrent_states": memory_use(self._recurrent.arrays()),
        }
        if self._scorer:
            by_name[f"weights.{self._scorer[0].part}"] = memory_use(self._scorer[0].arrays)
        if self._inputs is not None:
            by_name["weights.inputs"] = memory_use([self._inputs.table], is_mapped=True)
        if self._head is not self._embed:
            by_name["weights.head"] = memory_use([self._head])
        if adapters := list(self._adapters.values()):
            parts = [part for weights in adapters for part in weights.parts.values()]
            by_name["adapters"] = memory_use(array for part in parts for array in (part.a, part.b))
        return by_name

    def cache_memory(self) -> CacheMemory:
        """Return the memory of the cache and of states, and how they are laid out."""
        layout = f"{self.block_size} {self.cache.group_of}"
        return CacheMemory(self.cache.blocks.view(np.uint8), list(self._recurrent.arrays()), layout)

    def give_back(self, *, weights: bool) -> None:
        """Give back the cache and the states; no weights are mapped that a step needs whole."""
        release([self.cache.blocks, self._states.array, *self._recurrent.arrays()])

    def profile(self, announce: Callable[[], None]) -> Counters:
        """Raise ValueError: nothing counts inside numpy."""
        raise ValueError("the reference backend counts no cycles: use --backend cpu")

    def run_whole(self, windows: Sequence[Sequence[int]]) -> None:
        """Compute all these texts in one step, each from its start, and keep no result."""
        of_each = -(-max(map(len, windows)) // self.block_size)
        sampling = Sampling(SamplingParams(), 0, ())
        items = [
            Work(
                (i, 0), 0, tuple(tokens), tuple(range(i * of_each, (i + 1) * of_each)),
                seeds=(), sampling=sampling, history=(), targets=(), state=i,
            )
            for i, tokens in enumerate(windows)
        ]  # fmt: skip
        with self._blas.limit(limits=self._threads, user_api="blas"), np.errstate(all="ignore"):
            self._forward(tuple(items))
            self._recurrent.end()

    # --- the model -----------------------------------------------------------------------------

    def _forward(self, items: tuple[Work, ...]) -> tuple[Floats, NDArray[np.bool_]]:
        """Return the normed hidden state [T, hidden], and which tokens' K/V were finite."""
        arch, block_size = self.arch, self.block_size
        ids = np.array([token for work in items for token in work.tokens])
        position_T = np.concatenate([np.arange(w.start, w.start + len(w.tokens)) for w in items])
        tables = list(zip(*((work.table, *work.others) for work in items), strict=True))
        by_group: list[_Places] = []  # of layers
        for of_items in tables:
            slots = [_slots(w, table, block_size) for w, table in zip(items, of_items, strict=True)]
            tiles = list(tiled(items, of_items, block_size, not arch.is_encoder))
            by_group.append((position_T, np.concatenate(slots), tiles))
        finite_T = np.ones(len(ids), bool)
        x = self._embed[ids]
        self._first_inputs.make(x, position_T, items)
        own_TLC = self._inputs.of(ids, x) if self._inputs else None
        added = np.float32(arch.residual_scale)
        multiply = self._observed or Adapted(arch, items, self._adapters).product
        for i, (layer, weights) in enumerate(zip(arch.layers, self._layers, strict=True)):

            def norm(rows: Floats, name: str, norms: dict[str, Norm] = weights.norms) -> Floats:
                return normalised(rows, norms[name], arch) if name in norms else rows

            row = norm(x, "attn_norm")
            x = row if layer.norms == "within" else x
            product = partial(multiply, i)
            of_layer = by_group[self.cache.group_of[i]]
            mixed, finite = self._mixed(i, row, items, of_layer, product)
            finite_T &= finite
            if layer.is_parallel:
                row = norm(x, "mlp_norm") if "mlp_norm" in weights.norms else row
            x = x + added * norm(mixed, "attn_post_norm")
            if not layer.is_parallel:
                row = norm(x, "mlp_norm")
            x = row if layer.norms == "within" else x
            if weights.ffn is not None:
                if isinstance(layer.ffn, Experts) and layer.ffn.beside:
                    output = beside_experts(x, row, weights.ffn, layer.ffn, norm)
                else:
                    output = feed_forward(row, weights.ffn, layer.ffn, product)
                x = x + added * norm(output, "mlp_post_norm")
            if own_TLC is not None:
                x = with_input(x, own_TLC[:, i], weights, layer.ffn.activation, norm)
            if weights.out_scale is not None:
                x = x * weights.out_scale
        return normalised(x, self._norm, arch), finite_T

    def _mixed(
        self,
        index: int,
        x: Floats,
        items: tuple[Work, ...],
        places: _Places,
        product: Callable[..., Floats],
    ) -> tuple[Floats, NDArray[np.bool_]]:
        """Return what a layer's mixer adds, and which tokens may be built on."""
        layer, weights = self.arch.layers[index], self._layers[index]
        out, finite_T = np.zeros_like(x), np.ones(len(x), bool)
        if layer.attention is not None:
            out, finite_T = self._attention(index, x, *places, product)
        if layer.recurrent is not None:
            go = partial(self._recurrent.go, index, items)
            out = out + mix(x, weights.recurrent, layer.recurrent, self.arch.norm_eps, go)
            finite_T &= np.logical_and.reduce(np.isfinite(out), axis=1)
        return out, finite_T

    def _attention(
        self,
        index: int,
        x: Floats,
        position_T: Ints,
        slot_T: Ints,
        groups: list[Tiles],
        product: Callable[..., Floats],
    ) -> tuple[Floats, NDArray[np.bool_]]:
        """Return what a layer's attention adds, and which tokens' K/V were finite."""
        mixer, weights = self.arch.layers[index].attention, self._layers[index].attention
        assert mixer is not None
        if mixer.latent is not None:
            return self._latent_attention(index, mixer, x, (position_T, slot_T, groups))
        assert weights is not None
        num_q = mixer.num_heads
        num_qk = num_q if mixer.kv_of is not None else num_q + mixer.num_kv_heads
        rows = scaled(x, mixer.in_scale)
        qkv = product(rows, weights.qkv, weights.qkv_bias, *mixer.projections)
        heads, eps = qkv.reshape(len(x), -1, mixer.head_dim), self.arch.norm_eps
        qk, v_TKD = heads[:, :num_qk], heads[:, num_q if mixer.v_is_k else num_qk :]
        if mixer.v_norm:
            v_TKD = rms_norm(v_TKD, None, eps)
        if weights.q_norm is not None and not mixer.norm_turned:
            qk = normalised_heads(qk, weights.q_norm, weights.k_norm, mixer, eps)
        if mixer.rope is not None:
            qk = rotate(qk, *self._angles(mixer, position_T))
            if mixer.rope.query_growth:
                qk[:, :num_q] *= self._query_scales[mixer.rope][position_T, None, None]
        if weights.q_norm is not None and mixer.norm_turned:
            qk = normalised_heads(qk, weights.q_norm, weights.k_norm, mixer, eps)
        finite_T = np.ones(len(x), bool)
        if mixer.kv_of is None:
            finite_T = self.cache.write(index, slot_T, qk[:, num_q:], v_TKD)
        out = np.empty((len(x), num_q, mixer.head_dim), np.float32)
        for group in groups:
            q = qk[group.rows_BN, :num_q]
            out[group.rows_BN] = self._attend(index, mixer, q, group, weights.sinks)
        attended = out.reshape(len(x), -1)
        if weights.gate is not None:
            attended *= sigmoid(linear(x, weights.gate, None))
        out = product(attended, weights.o, weights.o_bias, "o")
        return scaled(out, mixer.out_scale), finite_T

    def _angles(self, mixer: Attention, position_T: Ints) -> tuple[Floats, Floats]:
        """Return cosines and sines of tokens, [T, 1, pairs]."""
        assert mixer.rope is not None
        cos, sin = self._ropes[mixer.rope]
        return cos[position_T, None], sin[position_T, None]

    def _latent_attention(
        self, index: int, mixer: Attention, x: Floats, places: _Places
    ) -> tuple[Floats, NDArray[np.bool_]]:
        """Return what latent attention adds, and which tokens' latents were finite."""
        position_T, slot_T, groups = places
        weights, angles = self._layers[index].latent, self._angles(mixer, position_T)
        q, key = queries_and_key(x, weights, mixer, angles)
        finite_T = self.cache.write(index, slot_T, key)
        latents = np.empty((len(x), mixer.num_heads, mixer.value_dim), np.float32)
        for group in groups:
            latents[group.rows_BN] = self._attend(index, mixer, q[group.rows_BN], group, None)
        return expanded(latents, weights), finite_T

    def _attend(
        self,
        layer: int,
        mixer: Attention,
        q_BNHD: Floats,
        group: Tiles,
        sinks: Floats | None,
    ) -> Floats:
        """Return softmax(scale q k) v over each sequence's own blocks, as [B, N, H, D] of v."""
        B, N, H, D = q_BNHD.shape
        K = mixer.num_kv_heads
        k_BLKD, v_BLKD = self.cache.read(layer, group.tables)
        q = q_BNHD.reshape(B, N, K, H // K, D).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, D)
        scores = q @ k_BLKD.transpose(0, 2, 3, 1)
        scores *= np.float32(mixer.score_scale)
        scores = softcapped(scores, mixer.softcap)
        by_token = scores.reshape(B, K, H // K, N, -1)
        if mixer.slopes:
            slopes = np.array(mixer.slopes, np.float32).reshape(K, H // K, 1, 1)
            by_token -= slopes * group.distance_BNL(by_token.shape[-1])[:, None, None]
        if mixer.bias_buckets:
            by_distance = group.biases_BHNL(self._biases[0], by_token.shape[-1])
            by_token += by_distance.reshape(by_token.shape)
        mask_BNL = group.mask_BNL(self.block_size, mixer)
        np.copyto(by_token, -np.inf, where=mask_BNL[:, None, None])
        softmax(by_token, None if sinks is None else sinks.reshape(K, H // K, 1, 1))
        out = (scores @ v_BLKD.transpose(0, 2, 1, 3)).reshape(B, K, H // K, N, -1)
        result: Floats = out.transpose(0, 3, 1, 2, 4).reshape(B, N, H, -1)
        return result

    # --- results -------------------------------------------------------------------------------

    def _answers(self, asks: list[LogitsRequest], hidden: Floats) -> list[Sampled]:
        """Draw tokens, or rank known ones, by the logits after some tokens."""
        logits = self._logits(hidden[[ask.token for ask in asks]])
        return [answered(row, ask) for row, ask in zip(logits, asks, strict=True)]

    def _logits(self, hidden: Floats) -> Floats:
        logits = linear(hidden, self._head, self._head_bias)
        if self.arch.logit_scale != 1.0:
            logits *= np.float32(self.arch.logit_scale)
        return softcapped(logits, self.arch.logit_softcap)

    # --- weights -------------------------------------------------------------------------------

    def _load(self, checkpoint: Checkpoint, progress: Callable[[int, int], None]) -> None:
        arch, total, done = self.arch, checkpoint.nbytes, 0
        table = checkpoint.tensors.get("inputs")

        def get(name: str) -> Floats:
            nonlocal done
            tensor = checkpoint.tensors[name]
            done += tensor.nbytes
            progress(done, total)
            return tensor.to_f32()

        self._embed = get("embed")
        self._embed_norm = norm = None
        if arch.embed_norm:
            self._embed_norm = Norm(get("embedding_norm"), get("embedding_norm_bias"))
            norm = partial(normalised, norm=self._embed_norm, arch=arch)
        self._positions = get("positions") if arch.position_rows else None
        self._first_inputs = FirstInputs(arch, self._positions, norm)
        has_biases = any(mixer.bias_buckets for mixer in arch.attentions)
        self._relative_bias = [get("relative_bias")] if has_biases else []
        layers: Sequence[LayerWeights] = OneAtATime(partial(load_layer, get, arch), arch.num_layers)
        self._layers = layers if self._observed else list(layers)
        self._norm = Norm(get("norm"), get("norm_bias") if arch.norm_bias else None)
        self._head = self._embed if arch.tied_embeddings else get("head")
        self._head_bias = get("head_bias") if arch.head_bias else None
        self._scorer = pooling_head(checkpoint)
        self._inputs = None
        if table is not None:
            done += table.nbytes
            self._inputs = LayerInputs(arch, table, get)


def _slots(work: Work, table: tuple[int, ...], block_size: int) -> Ints:
    positions = np.arange(work.start, work.start + len(work.tokens))
    slots: Ints = np.array(table)[positions // block_size] * block_size
    return slots + positions % block_size


class KeysAndValues:
    """The cache of all layers, in float32: blocks, each with those of one group of layers.

    Of latent attention only keys are kept, whose last channels are the values. A layer that reads
    another's has that layer's place.

    Attributes:
        blocks: all memory, ``[blocks, values]``.
        by_layer: its parts, keys and values of each layer that has its own, or one of a latent.
    """

    def __init__(
        self,
        arch: ModelArch,
        num_blocks: int,
        block_size: int,
        groups: tuple[CacheGroup, ...],
    ) -> None:
        """Allocate blocks that are large enough for any group.

        In them a layer has ``[blocks, block_size, heads, channels]`` for keys and for values.
        """
        self._block_size = block_size
        mixers = {index: arch.layers[index].known_attention for index in arch.cached_layers}
        values_of = {index: block_size * mixer.cache_size for index, mixer in mixers.items()}
        most = max(sum(values_of[index] for index in group.layers) for group in groups)
        self.blocks = np.zeros((num_blocks, most), np.float32)
        self.by_layer: dict[int, list[Floats]] = {}
        self._value_dims = {index: mixer.value_dim for index, mixer in mixers.items()}
        for index, (begin, end) in spans(groups, values_of).items():
            mixer = mixers[index]
            shape = num_blocks, block_size, mixer.num_kv_heads, mixer.key_dim
            num_parts = 2 if mixer.latent is None else 1
            parts = np.split(self.blocks[:, begin:end], num_parts, axis=1)
            self.by_layer[index] = [part.reshape(shape) for part in parts]
        self.group_of = places(groups, arch)
        self._place = {
            index: index if layer.attention.kv_of is None else layer.attention.kv_of
            for index, layer in enumerate(arch.layers)
            if layer.attention is not None
        }

    def copy(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy blocks, each from the first to the second of a pair."""
        if copies:
            old, new = map(list, zip(*copies, strict=True))
            self.blocks[new] = self.blocks[old]

    def write(self, layer: int, slot_T: Ints, *new_TKD: Floats) -> NDArray[np.bool_]:
        """Store K and V of tokens, or K alone of a latent; return which tokens were finite.

        Values that are not finite are stored as zero: blocks are read whole, later also by their
        next owner, and zero times infinity is not a number.
        """
        finite = np.ones(len(slot_T), bool)
        for new in new_TKD:
            finite &= np.isfinite(new).all((1, 2))
        if not finite.all():
            new_TKD = tuple(np.nan_to_num(new, posinf=0.0, neginf=0.0) for new in new_TKD)
        for array, new in zip(self.by_layer[layer], new_TKD, strict=True):
            array[slot_T // self._block_size, slot_T % self._block_size] = new
        return finite

    def read(self, layer: int, tables: Ints) -> tuple[Floats, Floats]:
        """Return the keys and the values that a layer sees in ``[B, blocks]``, as [B, L, K, D]."""
        arrays = self.by_layer[self._place[layer]]
        shape = len(tables), -1, *arrays[0].shape[2:]
        k, *v = (array[tables].reshape(shape) for array in arrays)
        return k, v[0] if v else k[..., -self._value_dims[layer] :]


class LayerInputs:
    """What every layer of a model reads of each token, beside the residual stream (Gemma 3n, 2025).

    See ``ModelArch.input_scales``. The table is larger than all other weights together: it stays
    encoded, as the file has it, and of a step's tokens alone the rows are decoded.
    """

    def __init__(self, arch: ModelArch, table: Tensor, get: Callable[[str], Floats]) -> None:
        """Keep the table; ``get`` returns another tensor by its canonical name."""
        self._arch, self._table = arch, table
        self._proj, self._norm = self.arrays = [get("inputs_proj"), get("inputs_norm")]

    @property
    def table(self) -> NDArray[np.uint8]:
        """The rows of all tokens as they lie in the file."""
        return self._table.stored

    def of(self, ids: NDArray[np.intp], embedded: Floats) -> Floats:
        """Return the inputs of tokens whose scaled embeddings are given, ``[T, layers, size]``."""
        arch = self._arch
        shape = len(ids), arch.num_layers, arch.input_size
        of_row, of_product, of_sum = map(np.float32, arch.input_scales)
        rows = self._table.rows(ids).to_f32().reshape(shape)
        product = (linear(embedded, self._proj, None) * of_product).reshape(shape)
        out: Floats = (rms_norm(product, self._norm, arch.norm_eps) + rows * of_row) * of_sum
        return out


def observed(observe: Observe) -> Callable[..., Floats]:
    """Return a product with the matrices that ``observe`` returns in place of a layer's own."""

    def product(layer: int, x: Floats, weight: Floats, bias: Floats | None, *names: str) -> Floats:
        return linear(x, observe(layer, weight, x, *names), bias)

    return product


class OneAtATime(Sequence[LayerWeights]):
    """Layers that are loaded when they are asked for; the last one is kept."""

    def __init__(self, load: Callable[[int], LayerWeights], count: int) -> None:
        self._load, self._count = load, count
        self._last: tuple[int, LayerWeights] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> LayerWeights: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerWeights]: ...

    def __getitem__(self, index: int | slice) -> LayerWeights | Sequence[LayerWeights]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not 0 <= index < self._count:
            raise IndexError(index)
        if self._last is None or self._last[0] != index:
            self._last = None  # before the next is there
            self._last = index, self._load(index)
        return self._last[1]


class Adapted:
    """Which rows of a step have which adapter, and what it adds to them (Hu et al., 2021)."""

    def __init__(
        self, arch: ModelArch, items: tuple[Work, ...], adapters: Mapping[int, AdapterWeights]
    ) -> None:
        """Look at a step's items, and at the adapters by their numbers."""
        self._arch = arch
        numbers = np.repeat([work.adapter for work in items], [len(work.tokens) for work in items])
        self._rows = [
            (np.flatnonzero(numbers == number), adapters[number])
            for number in dict.fromkeys(work.adapter for work in items)
            if number
        ]

    def product(
        self, layer: int, x: Floats, weight: Floats, bias: Floats | None, *names: str
    ) -> Floats:
        """Return rows ``x`` times these matrices side by side, with what adapters add."""
        out = linear(x, weight, bias)
        if not self._rows:
            return out
        shapes = self._arch.layers[layer].shapes(self._arch.hidden_size, norm_bias=False)
        begin = 0
        for name in names:
            end = begin + shapes[name][0]
            for rows, adapter in self._rows:
                part = adapter.parts.get(f"layers.{layer}.{name}")
                if part is not None:
                    out[rows, begin:end] += (x[rows] @ part.a.T) @ part.b.T
            begin = end
        return out
