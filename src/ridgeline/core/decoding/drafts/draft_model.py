"""A draft model: a smaller model with the same vocabulary guesses what the larger one will draw.

Speculative decoding (Leviathan et al., 2023) with one rule for any drafter: a guess is right when
it equals the draw. The small model draws with the answer's own seed at the same position, so where
the two distributions agree, the draws do too (Daliri et al., 2024). Which keys and values it has is
kept here; it runs behind a ``Runner`` like any model.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listing
from functools import partial
from itertools import takewhile

from ridgeline.core.cache.kvcache import KVCache
from ridgeline.core.decoding.drafts.pace import Pace
from ridgeline.core.params import SamplingParams
from ridgeline.core.request import Request, Sequence
from ridgeline.core.scheduling.speculate import Guess
from ridgeline.core.step import Runner, SeqId, Step, Work

_PLAIN = SamplingParams()
_NOTHING = Guess((), 0)


class DraftModel:
    """The drafter: a second model, with a cache of its own.

    For each answer that wants drafts it has a shadow, a sequence of the small model that follows
    the answer. What the answer did not take of a guess is taken back before the next one.
    """

    def __init__(
        self,
        runner: Runner,
        kv: KVCache,
        *,
        max_model_len: int,
        max_num_batched_tokens: int,
        pace: Pace | None = None,
    ) -> None:
        """Draft with ``runner``, whose cache is ``kv``.

        Answers longer than ``max_model_len`` get no drafts. Of what shadows have to catch up with,
        at most ``max_num_batched_tokens`` are computed before a step. ``pace`` says how many
        tokens to guess; without one there are as many as may be.
        """
        self.kv = kv
        self.shadows: dict[SeqId, Sequence] = {}
        self._runner = runner
        self._max_model_len = max_model_len
        self._max_num_batched_tokens = max_num_batched_tokens
        self._pace = pace

    def draft(self, wanted: Listing[tuple[Sequence, int]]) -> list[Guess]:
        """Return a guess for each sequence, of at most the number of tokens beside it."""
        most = max(most for _, most in wanted)
        depth = min(most, self._pace.begin(len(wanted))) if self._pace else most
        if not depth:
            return [_NOTHING] * len(wanted)
        names = [seq.id for seq, _ in wanted]
        active: list[tuple[Sequence, Sequence]] = []
        for seq, _ in wanted:
            if shadow := self._follow(seq, depth, names):
                active.append((seq, shadow))
        if self._pace and not active:
            self._pace.note_none()
        guesses: dict[SeqId, list[int]] = {name: [] for name in names}
        limits = dict(zip(names, (most for _, most in wanted), strict=True))
        for _ in range(depth):
            active = self._round(active, guesses)
            active = [pair for pair in active if len(guesses[pair[0].id]) < limits[pair[0].id]]
        return [Guess(tuple(guesses[name]), 0) for name in names]

    def _follow(self, seq: Sequence, depth: int, wanted: list[SeqId]) -> Sequence | None:
        """Return a sequence's shadow, with its tokens and room for ``depth`` more, if there is."""
        upto = len(seq.tokens) + depth
        if upto > self._max_model_len:
            self._drop(seq.id)
            return None
        shadow = self.shadows.get(seq.id)
        if self._pace and not self._pays(seq, shadow):
            return None
        if shadow is None:
            shadow = self._new_shadow(seq)
            if not self._makes_room(partial(self.kv.admit, shadow, upto), wanted):
                return None
            self.shadows[seq.id] = shadow
            return shadow
        same = len(shadow.chain) * self.kv.block_size
        end = min(shadow.num_computed, len(seq.tokens) - 1)  # the logits of the last are wanted
        while same < end and shadow.tokens[same] == seq.tokens[same]:
            same += 1
        shadow.tokens[same:] = seq.tokens[same:]
        shadow.num_computed, shadow.num_pending = same, len(shadow.tokens) - same
        if same >= shadow.publish_at:
            self.kv.publish(shadow)
        return shadow if self._makes_room(partial(self.kv.reserve, shadow, upto), wanted) else None

    def _pays(self, seq: Sequence, shadow: Sequence | None) -> bool:
        """Return whether a shadow that is far behind may catch up."""
        num_behind = len(seq.tokens) - (shadow.num_computed if shadow else 0)
        num_left = seq.request.max_len - len(seq.tokens)
        assert self._pace is not None
        return self._pace.may_catch_up(num_behind, seq.num_generated, num_left)

    def _new_shadow(self, seq: Sequence) -> Sequence:
        request = Request(
            seq.request.id,
            tuple(seq.tokens),
            _PLAIN,
            max_model_len=self._max_model_len,
            cache_root=seq.request.cache_root,
        )
        return request.sequences[0]

    def _makes_room(self, take: Callable[[], bool], wanted: list[SeqId]) -> bool:
        """Take blocks, if need be those of shadows whose sequences want nothing now."""
        if take():
            return True
        for name in [name for name in self.shadows if name not in wanted]:
            self._drop(name)
        return take()

    def _round(
        self, active: list[tuple[Sequence, Sequence]], guesses: dict[SeqId, list[int]]
    ) -> list[tuple[Sequence, Sequence]]:
        """Guess one token more of each sequence; return those that go on."""
        left, work, worked = self._max_num_batched_tokens, list[Work](), []
        for seq, shadow in active:
            if count := min(shadow.num_pending, left):
                work.append(_work(seq, shadow, count))
                worked.append((seq, shadow))
                left -= count
        if not work:
            return []
        if self._pace:
            self._pace.note_catch_up(sum(len(item.tokens) - 1 for item in work))
        output = self._runner.execute(Step(tuple(work), (), (), (), ()))
        going: list[tuple[Sequence, Sequence]] = []
        for i, (seq, shadow) in enumerate(worked):
            if i in output.errors:
                self._drop(seq.id)
                continue
            shadow.num_computed += len(work[i].tokens)
            shadow.num_pending -= len(work[i].tokens)
            if work[i].seeds:
                (token,) = output.tokens[i]
                guesses[seq.id].append(token)
                shadow.tokens.append(token)
                shadow.num_pending += 1
                if token not in seq.request.stop_ids:
                    going.append((seq, shadow))
        return going

    def note_draws(self, work: Work, draws: tuple[int, ...]) -> None:
        """Take how many of a sequence's drafts were right."""
        if self._pace:
            drafts = work.tokens[len(work.tokens) - work.drafts :]
            pairs = zip(drafts, draws, strict=False)
            num_right = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            self._pace.note_drafts(num_right, len(drafts))

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that has ended."""
        for seq in request.sequences:
            self._drop(seq.id)

    def _drop(self, name: SeqId) -> None:
        if shadow := self.shadows.pop(name, None):
            self.kv.release(shadow)


def _work(seq: Sequence, shadow: Sequence, count: int) -> Work:
    """Return the next ``count`` tokens of a shadow as work, drawn as the sequence would draw."""
    start, request = shadow.num_computed, seq.request
    is_last = count == shadow.num_pending
    history = tuple(shadow.tokens) if is_last and request.params.needs_history else ()
    return Work(
        seq.id,
        start,
        tuple(shadow.tokens[start : start + count]),
        shadow.table,
        seq.seeds if is_last else (),
        request.sampling,
        history,
        (),
    )
