"""Requests and their sequences: all state that outlives a step.

A request is a prompt with parameters; a sequence is one of its answers in the making. This module
decides nothing: the scheduler and the cache change these objects.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import Enum, auto
from math import inf
from typing import Protocol

from ridgeline.core.params import SamplingParams
from ridgeline.core.step import (
    NO_RULES,
    Candidates,
    FinishReason,
    Sampling,
    SeqId,
    TokenLogprobs,
    TokenRules,
)

_SEED_STRIDE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: keeps the seeds of n answers apart


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()  # waits again, its blocks gone; what it generated is kept
    PAUSED = auto()  # the same, and is not to run
    FINISHED = auto()


class Text(Protocol):
    """Turns a sequence's tokens into text and watches for stop strings (``core.decoding.text``)."""

    def feed(self, token: int, may_stop: bool) -> str | None:
        """Take one more token; return the stop string that it completed."""

    def take(self) -> str:
        """Return the text that became final since the last call."""

    def finish(self) -> None:
        """No token will follow: what was held back is final."""


class Constraint(Protocol):
    """What may follow in one answer (``grammars``). It advances with the answer's tokens."""

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete and nothing may follow."""

    def masks(self, drafts: tuple[int, ...]) -> tuple[bytes, ...]:
        """Return a mask (``Work.masks``) for the next token, and behind each draft."""

    def forced(self, most: int) -> tuple[int, ...]:
        """Return at most ``most`` tokens that must follow, if they can be known."""

    def num_valid(self, drafts: tuple[int, ...]) -> int:
        """Return how many of these tokens may follow, one after the other."""

    def accept(self, token: int) -> None:
        """Take the next token of the answer."""

    def fork(self) -> Constraint:
        """Return another that has come as far, for an answer with the same beginning."""


class Search(Protocol):
    """Which continuations of a prompt are followed (``core.decoding.search``).

    ``settled`` is the beginning of the only answer, as far as it is known before the end.
    """

    settled: list[TokenLogprobs]

    @property
    def num_candidates(self) -> int:
        """How many likeliest tokens behind each beam are needed."""

    def advance(
        self, ranked: Listing[Candidates], similarities: Listing[float]
    ) -> Listing[tuple[int, int]]:
        """Return the next beams: which one each continues, with which token. None: it is over.

        If a token is settled, it is the last of the beam that all of them continue.
        """

    def answers(self) -> Listing[Listing[TokenLogprobs]]:
        """Return the answers of a search that is over, best first."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Content:
    """What a published block holds: these tokens, after the content of the parent block.

    A first block has its request's root for a parent (``Request.cache_root``). Content is known
    while anybody holds it, as a child does: a window may leave a block without its parent's.
    """

    key: bytes
    parent: Content | bytes
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """What is added to the weights for a request (LoRA). Its digest keeps cached prefixes apart."""

    number: int  # by which the backend knows it; 0 is none
    digest: bytes


NO_ADAPTER = Adapter(0, b"")


@dataclass(eq=False, repr=False)
class Request:
    """A prompt, how to continue it, and the sequences that do.

    There is one sequence; the others fork from it when the prompt is computed. ``name`` is what its
    client knows it by. Only requests of the same ``cache_root``, of at most 48 bytes, and
    ``adapter`` share cached prefixes. ``prediction`` is what the answer may be like; it changes
    only how soon it comes, as earlier answers to the same ``owner`` may. Slots are shared out
    between owners. ``new_constraint`` makes what each answer must comply with, and ``token_rules``
    says what ``params`` mean in token ids. ``new_search`` returns the search that the parameters
    ask for. ``due_s`` is when it must run at the latest, inf if nothing was promised; the earliest
    goes first. Times are seconds of the engine's clock.
    Raises ValueError if the prompt is empty or leaves no room for an answer.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    _: KW_ONLY
    eos_ids: tuple[int, ...] = ()
    max_model_len: int
    default_seed: int = 0
    token_rules: TokenRules = NO_RULES
    new_search: Callable[[Request], Search | None] = lambda request: None
    new_text: Callable[[], Text] | None = None
    name: str = ""
    cache_root: bytes = b""
    adapter: Adapter = NO_ADAPTER
    prediction: tuple[int, ...] = ()
    owner: str = ""
    new_constraint: Callable[[], Constraint] | None = None
    due_s: float = inf
    answers: tuple[tuple[int, ...], ...] = ()  # tokens that each has from elsewhere
    is_background: bool = False  # as its record has it
    pushed: tuple[int, int] | None = None  # too
    arrival_s: float = 0.0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    error: str | None = None  # the first
    num_cached_tokens: int = 0  # prompt tokens that the first admission found computed
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0  # of its sequences
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position

    def __post_init__(self) -> None:
        prompt, params, max_model_len = self.prompt, self.params, self.max_model_len
        if not prompt:
            raise ValueError("the prompt is empty: give at least one token")
        if len(prompt) > max_model_len - (not params.pool):
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, but prompt and answer together may have "
                f"{max_model_len} (--max-model-len; in Python max_model_len)"
            )
        longest = 0 if params.pool else max_model_len - len(prompt)
        max_tokens = longest if params.max_tokens is None else min(params.max_tokens, longest)
        eos = () if params.ignore_eos else self.eos_ids
        seed = (self.default_seed if params.seed is None else params.seed) % (1 << 64)
        self.order = self.due_s, self.id  # of two requests, the lower one goes first
        self.cache_root += self.adapter.digest
        self.max_len = len(prompt) + max_tokens
        self.stop_ids = frozenset((*eos, *params.stop_token_ids))
        suppressed = tuple(sorted(self.stop_ids)) if params.min_tokens else ()
        self.sampling = Sampling(params, len(prompt), suppressed, self.token_rules)
        self.needs_context = params.needs_history or params.prompt_logprobs is not None
        self.search = self.new_search(self)  # until it is over; beams draw nothing and have no text
        assert self.search or not params.searches, "an engine without a search"
        num_seeds = 0 if self.search or params.pool else params.num_seqs
        seeds = tuple((seed + i * _SEED_STRIDE) % (1 << 64) for i in range(num_seeds))
        num_slots = params.num_seqs if self.search else 1
        self.sequences = [Sequence(self, 0, list(prompt), seeds, num_slots=num_slots)]

    @property
    def is_finished(self) -> bool:
        """Whether every sequence has ended."""
        return all(seq.status is Status.FINISHED for seq in self.sequences)


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer: its tokens, and where their K/V are.

    ``tokens[:num_computed]`` have their K/V in the blocks of ``table``, and of ``others``, the
    tables of further groups of layers; ``num_pending`` tokens are to be computed. ``capacity``
    tokens may be written before the cache must be asked. The first blocks went into the prefix
    index, with the contents of ``chain``; ``publish_at`` is when to offer the next.
    In a step the last ``num_draft_blocks`` blocks of each table are for drafts alone.
    """

    request: Request
    index: InitVar[int]
    tokens: list[int]
    seeds: tuple[int, ...]  # its own, and before the fork those of the other answers
    id: SeqId = field(init=False)
    text: Text | None = field(init=False)
    constraint: Constraint | None = field(init=False)
    num_pending: int = field(init=False)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    table: tuple[int, ...] = ()
    others: tuple[tuple[int, ...], ...] = ()
    keys: list[bytes] = field(default_factory=list)  # of its full blocks, as far as was asked
    num_computed: int = 0
    capacity: int = 0
    chain: list[Content] = field(default_factory=list)
    publish_at: int = 0
    num_draft_blocks: tuple[int, ...] = ()
    state: int = -1  # its slot in ``states``
    num_slots: int = 1  # that it takes while it runs: the first beam has those of the others too
    num_before: int = 0  # of the tokens of the answer, those from elsewhere
    is_over_share: bool = False  # beyond its owner's share of the slots
    candidates: Candidates = ()  # of a beam that waits until the others have theirs
    similarity: float = 0.0  # of such a beam's last token

    def __post_init__(self, index: int) -> None:
        self.id = (self.request.id, index)
        is_beam = self.request.search and self.request.params.use_beam_search
        new_text = None if is_beam else self.request.new_text
        self.text = new_text() if new_text else None
        new_constraint = self.request.new_constraint
        self.constraint = new_constraint() if new_constraint else None
        self.num_pending = len(self.tokens)

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.prompt)
