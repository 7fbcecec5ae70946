"""The model of time: how long a step takes, from a dozen numbers that were fitted elsewhere.

A step is described by five counts. Its time is a table over the first of them, piecewise linear,
and a rate for each of the others. All rates are at least 0 and the table never falls, so more work
never takes less time. It knows nothing of clocks and machines.

For steps that are larger than those it was fitted to it is a guess: a rate that few sequences show
may be another with many. Positions and pairs are left out of this: they grow with the other counts,
and each request has the same ones under any settings.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from ridgeline.core.records import Record, RequestRecord, StepRecord
from ridgeline.core.step import Step, sampled_from
from ridgeline.model.cost.costs import Features, visible_pairs
from ridgeline.model.shape.model import ModelArch

Windows = tuple[tuple[int, float], ...]  # a window, and the share of layers that have it
SHORTEST_S = 1e-9  # of a step
# A step counts for the nearest knot, so up to half way to the next power of two: 1.5 times. What is
# foreseen may go half as far beyond what was measured.
_TOLERANCE = 1.25


def windows_of(arch: ModelArch) -> Windows:
    """Return the windows of a model's layers; layers without one are not named."""
    windows = [mixer.window for mixer in arch.attentions]
    sizes = [size for size in windows if size is not None]
    return tuple((size, sizes.count(size) / arch.num_layers) for size in sorted(set(sizes)))


def of_step(step: Step, windows: Windows = ()) -> Features:
    """Return the features of a step that is to be computed."""
    return of_items(
        [
            # An answer's next token needs one row; that is nearly all of the work.
            (work.start, 1, 1)
            if len(work.tokens) == 1 and work.seeds
            else (work.start, len(work.tokens), len(work.tokens) - sampled_from(work))
            for work in step.work
        ],
        windows,
    )


def of_record(record: StepRecord, windows: Windows = ()) -> Features:
    """Return the features of a step that was computed; items that failed count as without rows."""
    rows = [1 if tokens else 0 for tokens in record.sampled]
    if record.drafts or record.ranked:
        rows_by_seq = {seq_id: 1 + len(drafts) for seq_id, drafts in record.drafts}
        rows_by_seq |= dict.fromkeys((seq_id for seq_id, _ in record.ranked), 1)
        work = zip(record.work, rows, strict=True)
        rows = [rows_by_seq.get(seq_id, count) for (seq_id, _, _), count in work]
    items = zip(record.work, rows, strict=True)
    return of_items([(start, count, of_item) for (_, start, count), of_item in items], windows)


def of_items(items: Sequence[tuple[int, int, int]], windows: Windows = ()) -> Features:
    """Return the features of a step of such items: first position, tokens, rows of the head.

    So ``[(0, n, 1)]`` reads a prompt of n tokens, and ``[(n - 1, 1, 1)]`` goes on behind it.
    """
    tokens = seqs = rows = positions = pairs = 0
    for start, count, of_item in items:
        tokens += count
        seqs += 1
        rows += of_item
        positions += start + count
        pairs += count * start + count * (count + 1) // 2
    if not windows:
        return Features(tokens, seqs, rows, positions, pairs)
    share = 1 - sum(part for _, part in windows)
    visible, looked = share * positions, share * pairs
    for window, part in windows:
        for start, count, _ in items:
            visible += part * (min(start, window - 1) + count)
            looked += part * visible_pairs(start, count, window)
    return Features(tokens, seqs, rows, visible, looked)


def in_the_mean(parts: Sequence[tuple[float, Features]]) -> Features:
    """Return the features of a mean step: of each part as many as its number, whole or not, says.

    What is counted in whole numbers is rounded, and is at least 1.
    """
    tokens, seqs, rows, positions, pairs = (
        sum(number * part[i] for number, part in parts) for i in range(len(Features._fields))
    )
    tokens, seqs, rows = (max(1, round(count)) for count in (tokens, seqs, rows))
    return Features(tokens, seqs, rows, positions, pairs)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, and from its end to the next one.

    Attributes:
        knots: numbers of tokens, rising, between which the table is linear.
        table_s: seconds at each knot; they never fall. Below the first knot they stay the same.
        per_token_s: seconds for each token beyond the last knot.
        per_seq_s, per_row_s, per_position_s, per_pair_s: seconds for one more of each feature.
        after_s: seconds from the end of a step to the begin of the next: results are folded back,
            texts grow, streams are told.
        after_per_row_s: more of it for each row of the head.
        after_per_end_s: more of it for each request that ended.
        windows: of the model's layers; for ``of_step`` and ``of_record``.
    """

    knots: tuple[int, ...]
    table_s: tuple[float, ...]
    per_token_s: float
    per_seq_s: float
    per_row_s: float
    per_position_s: float
    per_pair_s: float
    after_s: float = 0.0
    after_per_row_s: float = 0.0
    after_per_end_s: float = 0.0
    windows: Windows = ()

    def __post_init__(self) -> None:
        """Raise ValueError if more work could take less time, or a step none."""
        if self.table_s and self.table_s[0] < SHORTEST_S:
            raise ValueError(f"table_s.0 is {self.table_s[0]}: a step takes time")
        rises = all(less <= more for less, more in pairwise((0.0, *self.table_s)))
        rates = (
            *(self.per_token_s, self.per_seq_s, self.per_row_s, self.per_position_s),
            *(self.per_pair_s, self.after_s, self.after_per_row_s, self.after_per_end_s),
        )
        if (
            not self.knots
            or len(self.knots) != len(self.table_s)
            or list(self.knots) != sorted(set(self.knots))
            or not rises
            or not all(rate >= 0 for rate in rates)
        ):
            raise ValueError("a model of time has a table that rises, and rates of at least 0")
        shares = [share for _, share in self.windows]
        if any(size < 1 for size, _ in self.windows) or not all(0 <= one <= 1 for one in shares):
            raise ValueError("a window has at least one position, and a share of the layers")

    def seconds(self, features: Features) -> float:
        """Return the seconds from the begin of scheduling to the end of executing."""
        tokens, seqs, rows, positions, pairs = features
        return (
            self._table(tokens)
            + self.per_seq_s * seqs
            + self.per_row_s * rows
            + self.per_position_s * positions
            + self.per_pair_s * pairs
        )

    def _table(self, num_tokens: int) -> float:
        knots, table = self.knots, self.table_s
        i = bisect_left(knots, num_tokens)
        if i == 0:
            return table[0]
        if i == len(knots):
            return table[-1] + self.per_token_s * (num_tokens - knots[-1])
        share = (num_tokens - knots[i - 1]) / (knots[i] - knots[i - 1])
        return table[i - 1] + share * (table[i] - table[i - 1])

    def after(self, num_rows: int, num_ended: int) -> float:
        """Return the seconds from the end of executing to the begin of the next step."""
        return self.after_s + self.after_per_row_s * num_rows + self.after_per_end_s * num_ended

    def scaled(self, factor: float) -> StepTime:
        """Return the model of a machine on which all takes ``factor`` times as long."""
        numbers = {
            name: value if name in ("knots", "windows") else _times(factor, value)
            for name, value in asdict(self).items()
        }
        return StepTime(**numbers)


def _times(factor: float, value: Any) -> Any:
    return tuple(factor * one for one in value) if isinstance(value, tuple) else factor * value


class Reach(NamedTuple):
    """The most tokens, sequences and rows of the head of any of some steps."""

    num_tokens: int
    num_seqs: int
    num_rows: int

    def exceeds(self, fitted: Reach) -> dict[str, tuple[int, int]]:
        """Return the counts for which these steps are too large for a model of time.

        Args:
            fitted: the reach of the steps that it was fitted to.

        Returns:
            The most of these steps and the most of those, by the names of the counts.
        """
        pairs = zip(self._fields, self, fitted, strict=True)
        return {name: (most, limit) for name, most, limit in pairs if most > _TOLERANCE * limit}


def reach_of(features: Iterable[Features]) -> Reach | None:
    """Return the reach of steps with these features; None without any."""
    counts = [one[: len(Reach._fields)] for one in features]
    return Reach(*map(max, zip(*counts, strict=True))) if counts else None


def reach_of_run(records: Iterable[Record]) -> Reach | None:
    """Return the reach of the steps of a run; None if it has none."""
    return reach_of(of_record(record) for record in records if isinstance(record, StepRecord))


def as_text(excess: dict[str, tuple[int, int]]) -> str:
    """Return what ``Reach.exceeds`` found: "up to 8 sequences (measured: 4)"."""
    nouns = {"num_tokens": "tokens", "num_seqs": "sequences", "num_rows": "rows of logits"}
    parts = [
        f"{most:,} {nouns[name]} (measured: {limit:,})" for name, (most, limit) in excess.items()
    ]
    return f"up to {', '.join(parts)}"


_PER_BIN = 64
_NUM_SIZES = 12  # powers of two of tokens: 1, 2 to 3, ... 2048 and more
_LONG = 512  # positions of a sequence, from which a context is long
_NUM_AFTER = 256


class Measured(NamedTuple):
    """A step: its features, and the seconds that scheduling and executing it took."""

    features: Features
    seconds: float


class After(NamedTuple):
    """Between two steps: rows of the first, requests that ended in it, seconds to the second."""

    num_rows: int
    num_ended: int
    seconds: float


class Samples:
    """A reservoir of steps, and of what followed them."""

    def __init__(
        self,
        steps: Iterable[Measured] = (),
        after: Iterable[After] = (),
        *,
        per_bin: int = _PER_BIN,
    ) -> None:
        """Begin with samples of before."""
        self._bins: list[deque[Measured]] = [deque(maxlen=per_bin) for _ in range(2 * _NUM_SIZES)]
        self._after: tuple[deque[After], deque[After]] = (
            deque(maxlen=_NUM_AFTER),  # no request ended
            deque(maxlen=_NUM_AFTER),
        )
        for step in steps:
            self.add(step)
        for sample in after:
            self.add_after(sample)

    def add(self, sample: Measured) -> None:
        """Keep a step; the oldest of its bin goes."""
        tokens, seqs, _, positions, _ = sample.features
        size = min(tokens.bit_length(), _NUM_SIZES) - 1
        self._bins[2 * size + (positions >= _LONG * seqs)].append(sample)

    def add_after(self, sample: After) -> None:
        """Keep what followed a step."""
        self._after[sample.num_ended > 0].append(sample)

    def steps(self) -> list[Measured]:
        """Return all steps that are kept."""
        return [sample for one in self._bins for sample in one]

    def thinned(self) -> list[Measured]:
        """Return at most 64 steps of each bin, evenly over all that it keeps."""
        return [
            one[i * len(one) // num]
            for one in self._bins
            for num in (min(len(one), _PER_BIN),)
            for i in range(num)
        ]

    def after(self) -> list[After]:
        """Return what followed steps."""
        return [sample for one in self._after for sample in one]


class Watcher:
    """Makes samples of the records of an engine, in the order in which they come."""

    def __init__(self, samples: Samples, windows: Windows) -> None:
        """Keep them in ``samples``; ``windows`` are those of the model's layers."""
        self.samples = samples
        self._windows = windows
        self._num_rows = self._num_ended = 0
        self._executed_s: float | None = None  # when the step before was executed

    def take(self, record: Record) -> Measured | None:
        """Take a record; return the sample that it is, if it is a step that says something.

        A step in which an item or the backend failed says nothing of time.
        """
        if isinstance(record, RequestRecord):
            self._num_ended += 1
        if not isinstance(record, StepRecord):
            return None
        if self._executed_s is not None and _follows(record):
            gap_s = record.start_s - self._executed_s
            self.samples.add_after(After(self._num_rows, self._num_ended, gap_s))
        self._executed_s, self._num_ended = None, 0
        if record.errors or not record.sampled:
            return None
        seconds = record.schedule_s + record.execute_s
        sample = Measured(of_record(record, self._windows), seconds)
        self._num_rows = sample.features.num_rows
        self._executed_s = record.start_s + seconds
        self.samples.add(sample)
        return sample


def _follows(step: StepRecord) -> bool:
    """Whether a step came at once behind the one before: some request of it was there already.

    Requests are numbered as they come, and the oldest that runs is in every step.
    """
    if step.resumed or step.aborted:
        return False
    return not step.arrived or min(work[0][0] for work in step.work) < step.arrived[0]
