"""Records of steps and requests, added up: counters and histograms by vLLM's names.

They come from records alone, so they agree with a trace. Labels, Prometheus' form and locks are
their reader's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record, RequestRecord, StepRecord
from ridgeline.core.step import SeqId


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


_LONG = "10 20 40 80 160 640 2560"
_TTFT_S = _bounds(f"0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 {_LONG}")
_ITL_S = _bounds("0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80")
_REQUEST_S = _bounds("0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
STEP_S = _bounds("0.001 0.0025 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 5 10 60")
_ANSWERS = _bounds("1 2 5 10 20")
_TOKENS = _bounds("1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384")

_DEFAULTS = SamplingParams()  # records name only what differs
HISTOGRAMS = {
    "time_to_first_token_seconds": (_TTFT_S, "From arrival to the first token."),
    "inter_token_latency_seconds": (_ITL_S, "Between two tokens of an answer."),
    "e2e_request_latency_seconds": (_REQUEST_S, "From arrival to the end."),
    "request_queue_time_seconds": (_REQUEST_S, "From arrival to the first step."),
    "request_prefill_time_seconds": (_REQUEST_S, "From the first step to the first token."),
    "request_decode_time_seconds": (_REQUEST_S, "From the first token to the last."),
    "request_prompt_tokens": (_TOKENS, "Prompt tokens of a request."),
    "request_inference_time_seconds": (_REQUEST_S, "From the first step to the end."),
    "request_time_per_output_token_seconds": (_ITL_S, "Mean between two tokens of a request."),
    "request_generation_tokens": (_TOKENS, "Tokens generated for an answer."),
    "request_max_num_generation_tokens": (_TOKENS, "Tokens of a request's longest answer."),
    "request_params_max_tokens": (_TOKENS, "The most tokens that a request wants, if it says."),
    "request_params_n": (_ANSWERS, "Answers that a request wants."),
    "iteration_tokens_total": (_TOKENS, "Tokens computed in a step."),
    "step_duration_seconds": (STEP_S, "Duration of a step."),
}
COUNTERS = {
    "prompt_tokens": "Prompt tokens of requests that got an answer.",
    "generation_tokens": "Tokens generated.",
    "num_preemptions": "Sequences whose blocks were taken.",
    "prefix_cache_queries": "Prompt tokens looked for in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found there.",
    "spec_decode_num_drafts": "Times that drafts of a sequence were verified.",
    "spec_decode_num_draft_tokens": "Draft tokens verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were right.",
}


class Spread:
    """How many measurements lie within which bounds, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add a measurement, which was made ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return upper bounds, the last one "+Inf", each with how many lie below it."""
        cumulative, running = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            cumulative.append(("+Inf" if bound == float("inf") else str(bound), float(running)))
        return cumulative


class Counts:
    """What records add up to.

    Attributes:
        histograms: by the names of ``HISTOGRAMS``.
        counts: by the names of ``COUNTERS``, of requests that have ended.
        finished: answers by how they ended.
        accepted: drafts that were right, by their place among those of a step.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self.histograms = {name: Spread(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        self.counts: Counter[str] = Counter()
        self.finished: Counter[str] = Counter(stop=0, length=0, abort=0, error=0)
        self.accepted: Counter[int] = Counter()
        self._live: dict[SeqId, tuple[int, float]] = {}  # tokens so far, and when the last came

    def on_record(self, record: Record) -> None:
        """Add a record."""
        if isinstance(record, StepRecord):
            self._add_step(record)
        elif isinstance(record, RequestRecord):
            self._add_request(record)

    def counters(self) -> dict[str, int]:
        """Return counts by the names of ``COUNTERS``, with tokens of answers under way."""
        live = sum(count for count, _ in [*self._live.values()])
        return {name: self.counts[name] for name in COUNTERS} | {
            "generation_tokens": self.counts["generation_tokens"] + live
        }

    def _add_step(self, step: StepRecord) -> None:
        see = self.histograms
        end_s = step.start_s + step.schedule_s + step.execute_s
        see["step_duration_seconds"].observe(step.duration_s)
        see["iteration_tokens_total"].observe(sum(count for _, _, count in step.work))
        self.counts["num_preemptions"] += len(step.preempted)
        gaps: Counter[float] = Counter()  # of sequences that run side by side, mostly equal
        guessing = dict(step.drafts)
        for (seq_id, _, _), tokens in zip(step.work, step.sampled, strict=False):
            if seq_id in guessing:
                self._add_drafts(len(guessing[seq_id]), len(tokens) - 1)
                count, last_s = self._live.get(seq_id, (0, end_s))
                # A mean of what a reader sees: tokens of one step come together.
                gaps[(end_s - last_s) / max(len(tokens), 1)] += len(tokens)
                self._live[seq_id] = count + len(tokens), end_s
                continue
            for index in range(seq_id[1], seq_id[1] + len(tokens)):
                key = seq_id[0], index
                before = self._live.get(key)
                if before is not None:
                    gaps[end_s - before[1]] += 1
                self._live[key] = (before[0] + 1 if before else 1), end_s
        for gap_s, times in gaps.items():
            see["inter_token_latency_seconds"].observe(gap_s, times)

    def _add_drafts(self, num_drafts: int, num_accepted: int) -> None:
        self.counts["spec_decode_num_drafts"] += 1
        self.counts["spec_decode_num_draft_tokens"] += num_drafts
        if num_accepted > 0:  # an item that failed has no token
            self.counts["spec_decode_num_accepted_tokens"] += num_accepted
            self.accepted.update(range(num_accepted))

    def _add_request(self, request: RequestRecord) -> None:
        for index in range(len(request.num_generated)):
            self._live.pop((request.request_id, index), None)
        self.finished.update(request.finish_reasons)
        see = self.histograms
        see["e2e_request_latency_seconds"].observe(request.finish_s - request.arrival_s)
        self.counts["generation_tokens"] += sum(request.num_generated)
        if request.scheduled_s is None:
            return
        self.counts["prefix_cache_queries"] += len(request.prompt_token_ids)
        self.counts["prefix_cache_hits"] += request.num_cached_tokens
        see["request_queue_time_seconds"].observe(request.scheduled_s - request.arrival_s)
        first_s = request.first_token_s
        if first_s is None:
            return
        self.counts["prompt_tokens"] += len(request.prompt_token_ids)
        see["request_prompt_tokens"].observe(len(request.prompt_token_ids))
        for count in request.num_generated:
            see["request_generation_tokens"].observe(count)
        longest = max(request.num_generated)
        see["request_max_num_generation_tokens"].observe(longest)
        see["request_params_n"].observe(request.params.get("n", _DEFAULTS.n))
        max_tokens = request.params.get("max_tokens", _DEFAULTS.max_tokens)
        if max_tokens is not None:
            see["request_params_max_tokens"].observe(max_tokens)
        see["time_to_first_token_seconds"].observe(first_s - request.arrival_s)
        see["request_prefill_time_seconds"].observe(first_s - request.scheduled_s)
        see["request_decode_time_seconds"].observe(request.finish_s - first_s)
        see["request_inference_time_seconds"].observe(request.finish_s - request.scheduled_s)
        if longest > 1:
            mean_s = (request.finish_s - first_s) / (longest - 1)
            see["request_time_per_output_token_seconds"].observe(mean_s)
