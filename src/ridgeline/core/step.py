"""The vocabulary between the core, which decides, and a backend, which computes.

All values here are plain and frozen: they can be logged, pickled, broadcast and replayed. A token
id is an int, a block id an index into the backend's paged cache, a sequence id the pair (request,
index among the request's answers).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, Protocol

from ridgeline.core.params import SamplingParams

SeqId = tuple[int, int]
Candidates = tuple[tuple[int, float], ...]  # (token, log-probability): likeliest first, then by id


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Wait(StrEnum):
    """Why a live sequence is not in a step."""

    TOKEN_BUDGET = "token budget"
    BLOCKS = "blocks"
    MAX_NUM_SEQS = "max_num_seqs"
    POLICY = "policy"
    PAUSED = "paused"
    BEAMS = "other beams"


class TokenRules(NamedTuple):
    """What the parameters say of tokens, in a model's own ids (``text.token_rules``).

    A set of ids is bytes: a bit for each id, lowest first.
    """

    allowed: bytes = b""  # ids that may be chosen; none allows all
    banned: tuple[int, ...] = ()  # bad words of one token
    bad: Mapping[int, tuple[tuple[int, ...], ...]] = {}  # longer ones, by their last token but one
    breakers: bytes = b""  # ids that end what DRY takes for repeated
    break_runs: Mapping[int, tuple[tuple[int, ...], ...]] = {}  # so do these, by their last token
    texts: tuple[bytes, ...] = ()  # of all ids, if the text behind is known (``sampler.rule``)
    ends: tuple[int, ...] = ()  # then: ids that end a text


NO_RULES = TokenRules()
# What an item fails with if its logits are sound and its own request allows none of the tokens.
TOO_FEW = "n asks for more answers than there are of the form that the request asks for"
RULED_OUT = "every token is ruled out by what the request asks for, taken together"
MASKED_OUT = "the grammar allows no token here: it asks for too much, or for what cannot be"


class Sampling(NamedTuple):
    """What the sampler must know about a sequence; one object for the sequence's whole life."""

    params: SamplingParams
    prompt_len: int
    suppressed: tuple[int, ...]  # ids that cannot be chosen before min_tokens are there
    tokens: TokenRules = NO_RULES


class Work(NamedTuple):
    """Compute these tokens of this sequence; if it has seeds, sample what comes after them.

    The last ``drafts`` tokens are guesses. Then there is one seed, and a draw behind the token
    before them and behind each of them: at its own position, with the history up to there. Draws
    behind the first that is not its draft mean nothing. With states the last of ``save`` keeps the
    one before the drafts.
    """

    seq_id: SeqId
    start: int  # position of the first token; K/V of all before it are in the cache
    tokens: tuple[int, ...]
    table: tuple[int, ...]  # position p is in block table[p // block_size]; -1 where it is not read
    seeds: tuple[int, ...]  # one token is sampled for each seed; none in the middle of a prompt
    sampling: Sampling
    history: tuple[int, ...]  # all tokens so far, if sampling needs them
    targets: tuple[int, ...]  # prompt tokens that follow ``tokens``, if prompt_logprobs rank them
    drafts: int = 0
    masks: tuple[bytes, ...] = ()  # for each draw, a bit for each id that may be chosen
    top: int = 0  # rank this many tokens behind the last one, likeliest first, and draw nothing
    similar: bool = False  # keep the tokens' final states; with ``top``, compare the last one's
    adapter: int = 0  # whose weights are added, 0 for none
    state: int = -1  # slot of the recurrent layers' state, before and after; zeros at position 0
    save: tuple[tuple[int, int], ...] = ()  # (n, slot): after n of ``tokens``, copy it to the slot
    pool: str = ""  # return a vector of the text (``SamplingParams.pool``), and draw nothing
    others: tuple[tuple[int, ...], ...] = ()  # block tables of the second and further groups


def sampled_from(work: Work) -> int:
    """Return the index of an item's first token behind which something is drawn or asked."""
    has_output = work.seeds or work.top or work.pool
    return len(work.tokens) - 1 - work.drafts if has_output else len(work.tokens)


class Step(NamedTuple):
    """One round of the engine.

    ``copies`` are (from, to) block pairs to be copied before anything is computed: all sources are
    read before any target is written. ``waits`` names every live sequence that is not in ``work``.
    """

    work: tuple[Work, ...]
    copies: tuple[tuple[int, int], ...]
    admitted: tuple[tuple[SeqId, int], ...]  # with the length of the cached prefix it adopted
    preempted: tuple[SeqId, ...]
    waits: tuple[tuple[SeqId, Wait], ...]
    state_copies: tuple[tuple[int, int], ...] = ()  # the same between slots of states


class TokenLogprobs(NamedTuple):
    """Log-probability of one token, and of the likeliest ones in its place (natural log)."""

    token: int
    logprob: float
    rank: int  # 1 is the likeliest
    top: tuple[tuple[int, float], ...]


class StepOutput(NamedTuple):
    """The results of a step. Mappings are keyed by index into ``Step.work`` and mostly empty."""

    tokens: tuple[tuple[int, ...], ...]  # per work item, one for each seed; or 1 to drafts + 1
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = {}  # one for each sampled token
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = {}  # of tokens start+1 .. end
    errors: Mapping[int, str] = {}  # why this item failed; its tokens mean nothing
    top: Mapping[int, Candidates] = {}  # of items with ``top``
    similarity: Mapping[int, float] = {}  # of those that are also ``similar``: backends.states
    vectors: Mapping[int, tuple[float, ...]] = {}  # of items with ``pool``


class Event(NamedTuple):
    """What happened to one sequence in a step."""

    seq_id: SeqId
    token: int | None  # None when it ended without one (abort, error)
    text: str  # what became final with this token
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None  # the stop string or stop token id that ended it
    error: str | None
    vector: tuple[float, ...] | None = None  # of a request with ``pool``


class Runner(Protocol):
    """A backend: keeps weights and K/V blocks, and nothing about requests."""

    def execute(self, step: Step) -> StepOutput:
        """Copy, compute, sample. May be called again with a step that failed and copies nothing."""
