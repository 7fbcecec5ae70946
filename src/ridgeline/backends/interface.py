"""The interface of a backend: the functions that others call, and their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ridgeline.core.records import StepRecord
from ridgeline.core.step import Step, StepOutput
from ridgeline.model.files.adapters import AdapterWeights
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.model.shape.cache_groups import CacheGroup
from ridgeline.model.shape.model import ModelArch


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings that a backend runs with, called as their flags are.

    Attributes:
        dtype: what weights are computed in; "auto" is the backend's choice.
        kv_cache_dtype: what keys and values are stored in, or "auto".
        block_size: tokens in a block of the cache.
        threads: that compute, the caller's among them.
        max_model_len: longest sequence, tokens.
        max_num_seqs: sequences that may run at once.
        max_num_batched_tokens: longest step, tokens.
        num_blocks: blocks of the cache; 0 while that is still to be chosen.
        max_lora_rank: largest rank of adapters; 0 if there will be none.
        lora_bytes: memory to leave for them.
        num_states: slots for states of recurrent layers.
        groups: of layers, each with a block table of its own; none is one of all layers.
        tensor_parallel_size: devices that divide each layer among them.
        stages: processes that have some consecutive layers each.
        stage_port: where stages of other machines join; None starts all of them here.
        stage_key_file: file with the key that they prove to know.
        uses_all_memory: the cache gets what a device has left when all else is there:
            ``num_blocks`` is an estimate then, and the runner's own number counts.
    """

    dtype: str
    kv_cache_dtype: str
    block_size: int
    threads: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int = 0
    max_lora_rank: int = 0
    lora_bytes: int = 0
    num_states: int = 0
    groups: tuple[CacheGroup, ...] = ()
    tensor_parallel_size: int = 1
    stages: int = 1
    stage_port: int | None = None
    stage_key_file: Path | None = None
    uses_all_memory: bool = False


S = TypeVar("S", bound=Setup)  # a setup, with what its owner adds to it


class Footprint(NamedTuple):
    """Memory in bytes beside the weights: of the longest step, of a token in a block of the cache,
    which is one group's, and of a sequence's state in recurrent layers. ``maps_weights`` says
    whether they may be larger than memory, as they are mapped from a file.
    """

    step_bytes: int
    kv_bytes_per_token: int
    state_bytes_per_seq: int = 0
    maps_weights: bool = False


class MemoryUse(NamedTuple):
    """Memory under one name.

    Attributes:
        num_bytes: that it may take: all bytes of its arrays.
        resident_bytes: that it takes now: those that are in memory.
        is_mapped: whether it is read from a file, whose pages the system may drop and read again.
        device: that has the memory; none is the machine's own.
    """

    num_bytes: int
    resident_bytes: int
    is_mapped: bool = False
    device: str = ""


class BackendContext(NamedTuple):
    """Where a runner may keep files, and whom it tells about progress.

    Attributes:
        home: returns a directory for compiled kernels and packed weights; called only by backends
            that need one.
        progress: told how many of how many bytes of the model's file are read.
        announce: called before something that takes seconds, such as a compilation.
        say: told in a line what is wrong and can be done without: a file that was kept and is made
            again, a graph that a device cannot capture.
    """

    home: Callable[[], Path]
    progress: Callable[[int, int], None] = lambda done, total: None
    announce: Callable[[], None] = lambda: None
    say: Callable[[str], None] = lambda line: None


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that must be read, and operations; a multiply-add is two.

    ``form`` is the type of the factors: int8, bf16 or f32.
    """

    read_bytes: int
    ops: int
    form: str = "f32"

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.read_bytes + other.read_bytes, self.ops + other.ops, other.form)

    @property
    def ops_per_byte(self) -> float:
        """Arithmetic intensity."""
        return self.ops / self.read_bytes


class CacheMemory(NamedTuple):
    """What a runner keeps of texts.

    Attributes:
        blocks: of the cache, ``[blocks, bytes]``.
        states: of recurrent layers, ``[slots, ...]`` each, f32; empty where there are none.
        layout: how both are laid out.
    """

    blocks: NDArray[np.uint8]
    states: Sequence[NDArray[np.float32]]
    layout: str


class Counters(Protocol):
    """Cycles by kind of work, counted inside a step."""

    def take(self) -> Mapping[str, NDArray[np.int64]]:
        """Return the cycles of each thread since the last call, by kind.

        Of the kind "experts" it is how many experts' matrices it read, in all layers.
        """

    def seconds_per_cycle(self) -> float:
        """Return how long a cycle takes."""


class KeptAdapter(Protocol):
    """An adapter as a backend has it: known to it as long as this is kept."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""


class BackendRunner(Protocol):
    """A ``core.step.Runner``, with methods for measurements.

    Attributes:
        arch: the model.
        num_blocks: of the cache.
    """

    arch: ModelArch
    num_blocks: int

    @property
    def lost(self) -> str:
        """Why no step can run any more, if that is known; else empty. Any thread may ask."""

    def execute(self, step: Step) -> StepOutput:
        """Copy, compute, sample."""

    def add_adapter(self, number: int, weights: AdapterWeights) -> KeptAdapter:
        """Let work name an adapter by this number, which is new, while the result is kept.

        Any thread may call.
        """

    def prompt_logits(self, tokens: Sequence[int], start: int = 0) -> NDArray[np.float32]:
        """Return the logits after each token of one text, for measuring."""

    def traffic(self, step: StepRecord, num_experts: int | None = None) -> Mapping[str, Traffic]:
        """Return what a step read and computed, by kind; empty if the backend does not know.

        ``num_experts`` is how many experts' matrices it read, in all layers; None takes what its
        tokens meet if all experts are equally likely.
        """

    def memory(self) -> Mapping[str, MemoryUse]:
        """Return what every array that it keeps takes, by name: ``weights.mlp``, ``kv_cache``.

        What belongs together has the same beginning. Any thread may call.
        """

    def cache_memory(self) -> CacheMemory:
        """Return the memory of the cache and of states.

        Equal tokens behind equal ones have equal bytes in any process with the same fingerprint
        and layout. Raises ValueError where it is not this machine's memory.
        """

    def give_back(self, *, weights: bool) -> None:
        """Give memory back to the system, between two steps, as far as it can be had again.

        What is in the cache and in states is lost. With ``weights`` go those that are mapped from a
        file, which are read again when they are needed. Raises ValueError if the backend cannot.
        """

    def profile(self, announce: Callable[[], None]) -> Counters:
        """Count cycles from now on. Raises ValueError if the backend cannot."""


class Backend(Protocol):
    """The interface of a backend, which is all that others import of it."""

    def check(self, setup: S, arch: ModelArch) -> S:
        """Return a setup without "auto" where that is open. Raises ValueError if it cannot be."""

    def footprint(self, arch: ModelArch, setup: Setup) -> Footprint:
        """Return how much memory a setup takes."""

    def packed_bytes(self, checkpoint: Checkpoint, setup: Setup) -> Mapping[str, int]:
        """Return the bytes of the weights as it would hold them, by part; none is read."""

    def budget_bytes(self, checkpoint: Checkpoint, setup: Setup) -> int | None:
        """Return what a model may take of a device's memory; None where it takes the machine's.

        Raises ValueError, which says what would fit, if the weights alone are larger.
        """

    def new_runner(
        self, checkpoint: Checkpoint, setup: Setup, context: BackendContext
    ) -> BackendRunner:
        """Load a model."""

    def step_knots(self) -> tuple[int, ...]:
        """Return the numbers of tokens at which the time of a step may bend, rising."""

    def least_prompt_tokens(self, arch: ModelArch, setup: Setup) -> int:
        """Return how many tokens of prompts a step may always have beside those that decode.

        With that many, arithmetic takes about twice as long as reading the weights.
        """

    def looks_ahead(self, arch: ModelArch, setup: Setup) -> bool:
        """Whether it starts the next step before it is asked for.

        Then sequences should have room for one token more than they need.
        """

    def describe(self) -> str:
        """Return in a few words which instructions or library it computes with."""
