"""Records of what happened, added up for Prometheus; names and buckets are vLLM's where it has one.

Counters and histograms come from records alone, so they agree with ``--trace``. Gauges are read
when metrics are scraped. Any thread may call; nothing that a client sends becomes a label, and of a
key only the label that its owner gave it is shown.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric

from ridgeline import __version__
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record, RequestRecord, StepRecord
from ridgeline.core.step import SeqId
from ridgeline.foresight.promise_margin import PromiseMargin
from ridgeline.foresight.step_time.monitor import ERROR_BOUNDS, PredictionMonitor

_Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


_LONG = "10 20 40 80 160 640 2560"
_TTFT_S = _bounds(f"0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 {_LONG}")
_ITL_S = _bounds("0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80")
_REQUEST_S = _bounds("0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
_STEP_S = _bounds("0.001 0.0025 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 5 10 60")
_ANSWERS = _bounds("1 2 5 10 20")
_TOKENS = _bounds("1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384")

_DEFAULTS = SamplingParams()  # records name only what differs
_HISTOGRAMS = {
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
    "step_duration_seconds": (_STEP_S, "Duration of a step."),
    "grammar_compilation_time_seconds": (_STEP_S, "To get a grammar ready, kept ones included."),
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of requests that got an answer.",
    "generation_tokens": "Tokens generated.",
    "num_preemptions": "Sequences whose blocks were taken.",
    "prefix_cache_queries": "Prompt tokens looked for in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found there.",
    "spec_decode_num_drafts": "Times that drafts of a sequence were verified.",
    "spec_decode_num_draft_tokens": "Draft tokens verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were right.",
    "trace_records_lost": "Records that --trace could not write.",
}
_OF_KEY = {  # these add up to what is counted of all requests
    "key_requests": "Prompts that ended, by key.",
    "key_prompt_tokens": "Prompt tokens of requests that got an answer, by key.",
    "key_cached_tokens": "Prompt tokens found in the prefix cache, by key.",
    "key_generation_tokens": "Tokens generated, by key.",
}


class _Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        cumulative, running = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            cumulative.append(("+Inf" if bound == float("inf") else str(bound), float(running)))
        return cumulative


class _Collected:
    """Metrics that were collected before."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


class Metrics:
    """Counters, histograms and gauges; a collector for a Prometheus registry."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(
        self,
        model_name: str,
        gauges: Callable[[], Mapping[str, float]],
        num_lost: Callable[[], int],
        score: PredictionMonitor,
        margin: PromiseMargin,
        keys: Iterable[str],
        adapters: Callable[[], Mapping[str, int]] = dict,
        kept: Callable[[], Mapping[str, int]] = dict,
        num_unaudited: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Label everything with ``model_name``; ``gauges`` says how things stand now.

        ``num_lost`` says how many records the trace has lost, ``score`` what was predicted, and
        ``margin`` by how much that must be sooner than a deadline;
        ``keys`` are the labels of keys that are known from the start; ``adapters`` says how many
        requests have each adapter, ``kept`` what became of blocks that files keep, and
        ``num_unaudited`` how many lines an audit log could not take, if there is one.
        """
        self._model = model_name
        self._gauges, self._num_lost, self.score, self.margin = gauges, num_lost, score, margin
        self._adapters, self._kept, self._num_unaudited = adapters, kept, num_unaudited
        self._lock = threading.Lock()
        self._histograms = {name: _Histogram(bounds) for name, (bounds, _) in _HISTOGRAMS.items()}
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter(stop=0, length=0, abort=0, error=0)
        self._accepted: Counter[int] = Counter()  # by place among the drafts of a step
        self._promises: Counter[str] = Counter(kept=0, broken=0, in_time=0, late=0, refused=0)
        self._refused: Counter[str] = Counter(invalid=0, too_long=0, too_slow=0)  # grammars
        self._hits: Counter[tuple[str, str, str]] | None = None  # of a server with rules
        self._usage = {key: Counter[str]() for key in keys}
        self._http: Counter[tuple[str, str, str]] = Counter()
        self._live: dict[SeqId, tuple[int, float]] = {}  # tokens so far, and when the last came
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    def on_record(self, record: Record) -> None:
        """Add a record."""
        with self._lock:
            if isinstance(record, StepRecord):
                self._add_step(record)
            elif isinstance(record, RequestRecord):
                self._add_request(record)

    def count_http(self, handler: str, method: str, status: int) -> None:
        """Add an HTTP request; the caller ensures that there are few handlers and methods."""
        with self._lock:
            self._http[handler, method, str(status)] += 1

    def count_usage(self, key: str, request: RequestRecord) -> None:
        """Add what a request of the key with this label used."""
        usage = Counter(key_requests=1, key_cached_tokens=request.num_cached_tokens)
        usage["key_generation_tokens"] = sum(request.num_generated)
        if request.first_token_s is not None:
            usage["key_prompt_tokens"] = len(request.prompt_token_ids)
        with self._lock:
            self._usage.setdefault(key, Counter()).update(usage)

    def note_grammar(self, seconds: float) -> None:
        """Add the time that a grammar took until it could be used."""
        with self._lock:
            self._histograms["grammar_compilation_time_seconds"].observe(seconds)

    def count_refused_grammar(self, reason: str) -> None:
        """Add a grammar that cannot be used."""
        with self._lock:
            self._refused[reason] += 1

    def count_rule(self, rule: str, where: str, action: str) -> None:
        """Add a match of a rule: in which kind of text, and what was done."""
        with self._lock:
            self._hits = Counter() if self._hits is None else self._hits
            self._hits[rule, where, action] += 1

    def count_promise(self, outcome: str) -> None:
        """Add a request with a deadline: how it ended, with a promise or without."""
        with self._lock:
            self._promises[outcome] += 1

    def text(self, key: str | None = None) -> bytes:
        """Return metrics in Prometheus' text format 0.0.4: all, or what one key has used."""
        if key is None:
            return generate_latest(self._registry)
        with self._lock:
            used = [*self._used({key: self._usage.get(key, Counter())})]
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected(used))
        return generate_latest(registry)

    # --- adding --------------------------------------------------------------------------------

    def _add_step(self, step: StepRecord) -> None:
        see = self._histograms
        end_s = step.start_s + step.schedule_s + step.execute_s
        see["step_duration_seconds"].observe(step.duration_s)
        see["iteration_tokens_total"].observe(sum(count for _, _, count in step.work))
        self._counts["num_preemptions"] += len(step.preempted)
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
                known = self._live.get(key)
                if known is not None:
                    gaps[end_s - known[1]] += 1
                self._live[key] = (known[0] + 1 if known else 1), end_s
        for gap_s, times in gaps.items():
            see["inter_token_latency_seconds"].observe(gap_s, times)

    def _add_drafts(self, num_drafts: int, num_accepted: int) -> None:
        self._counts["spec_decode_num_drafts"] += 1
        self._counts["spec_decode_num_draft_tokens"] += num_drafts
        if num_accepted > 0:  # an item that failed has no token
            self._counts["spec_decode_num_accepted_tokens"] += num_accepted
            self._accepted.update(range(num_accepted))

    def _add_request(self, request: RequestRecord) -> None:
        for index in range(len(request.num_generated)):
            self._live.pop((request.request_id, index), None)
        self._finished.update(request.finish_reasons)
        see = self._histograms
        see["e2e_request_latency_seconds"].observe(request.finish_s - request.arrival_s)
        self._counts["generation_tokens"] += sum(request.num_generated)
        if request.scheduled_s is None:
            return
        self._counts["prefix_cache_queries"] += len(request.prompt_token_ids)
        self._counts["prefix_cache_hits"] += request.num_cached_tokens
        see["request_queue_time_seconds"].observe(request.scheduled_s - request.arrival_s)
        first_s = request.first_token_s
        if first_s is None:
            return
        self._counts["prompt_tokens"] += len(request.prompt_token_ids)
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

    # --- showing -------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """Yield everything, for ``prometheus_client``."""
        with self._lock:
            return iter([*self._families()])

    def _families(self) -> Iterator[Metric]:
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        yield self._by("version", gauge, "build_info", "What runs.", {__version__: 1})
        for name, value in self._gauges().items():
            yield self._one(gauge, name, name, value)
        text = "Requests that have an adapter."
        yield self._by("lora_name", gauge, "lora_requests", text, self._adapters())
        text = "Blocks and states of the cache that files keep: what became of them."
        yield self._by("what", counter, "kv_disk_blocks", text, self._kept())
        live = sum(count for count, _ in self._live.values())
        elsewhere = {"generation_tokens": live, "trace_records_lost": self._num_lost()}
        for name, text in _COUNTERS.items():
            yield self._one(counter, name, text, self._counts[name] + elsewhere.get(name, 0))
        text = "Draft tokens that were right, by place."
        accepted = {str(place): count for place, count in sorted(self._accepted.items())}
        name = "spec_decode_num_accepted_tokens_per_pos"
        yield self._by("position", counter, name, text, accepted)
        for label, name, text, counts in (
            ("reason", "num_grammar_refused", "Grammars that cannot be used.", self._refused),
            ("outcome", "promises", "Requests with a deadline.", self._promises),
            ("finished_reason", "request_success", "Answers that ended.", self._finished),
        ):
            yield self._by(label, counter, name, text, counts)
        yield from self._used(self._usage)
        for name, (_, text) in _HISTOGRAMS.items():
            yield self._spread(name, text, self._histograms[name])
        http = counter("http_requests", "HTTP requests.", labels=["handler", "method", "status"])
        for key, count in self._http.items():
            http.add_metric(list(key), count)
        yield http
        if (num := self._num_unaudited()) is not None:
            text = "Lines that the audit log could not take."
            yield self._one(counter, "audit_lines_lost", text, num)
        if self._hits is not None:
            labels = ["model_name", "rule", "where", "action"]
            hits = counter("ridgeline:rule_hits", "Matches of rules.", labels=labels)
            for of, count in self._hits.items():
                hits.add_metric([self._model, *of], count)
            yield hits
        yield from self._foreseen()

    def _used(self, usage: Mapping[str, Mapping[str, int]]) -> Iterator[Metric]:
        """Yield what keys have used."""
        for name, text in _OF_KEY.items():
            by_key = {label: used[name] for label, used in usage.items()}
            yield self._by("key", CounterMetricFamily, name, text, by_key)

    def _foreseen(self) -> Iterator[Metric]:
        """Yield what was predicted of steps and requests, and how well."""
        score, gauge, counter = self.score, GaugeMetricFamily, CounterMetricFamily
        for name, value, text in (
            ("predicted_step_seconds", score.predicted_s, "Predicted for steps, one by one."),
            ("compared_step_seconds", score.actual_s, "What these steps took, without commit."),
            ("num_time_model_fits", score.num_fits, "Times that the model of time was fitted."),
            ("foreseen_requests", score.num_requests, "Requests foreseen when they came."),
        ):
            yield self._one(counter, name, text, value)
        for name, value, text in (
            ("speed_ratio", score.speed, "Speed now, over that of the model of time."),
            ("time_model_calibrated", float(score.is_calibrated), "1 if it was measured."),
            ("promise_margin_ratio", self.margin.factor, "Forecasts times this must be in time."),
            ("promises_made", float(self.margin.are_promises_made), "0 if too many were broken."),
        ):
            yield self._one(gauge, name, text, value)
        text = "Mean relative error of late, of steps and of requests' times."
        errors = dict(sorted(score.errors.items()))
        yield self._by("of", gauge, "prediction_mean_abs_error_ratio", text, errors)
        step_errors = _Histogram(ERROR_BOUNDS)
        step_errors.counts, step_errors.total = list(score.error_counts), score.error_sum
        yield self._spread("step_prediction_error_ratio", "Relative error of a step.", step_errors)

    def _one(self, kind: _Kind, name: str, text: str, value: float) -> Metric:
        """Return a metric that is one number of this model."""
        family = kind(f"ridgeline:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _by(
        self, label: str, kind: _Kind, name: str, text: str, values: Mapping[str, float]
    ) -> Metric:
        """Return a metric that has a number for each of a label's values."""
        family = kind(f"ridgeline:{name}", text, labels=["model_name", label])
        for of, value in values.items():
            family.add_metric([self._model, of], value)
        return family

    def _spread(self, name: str, text: str, histogram: _Histogram) -> Metric:
        """Return a metric of many measurements: how many lie within which bounds."""
        family = HistogramMetricFamily(f"ridgeline:{name}", text, labels=["model_name"])
        family.add_metric([self._model], histogram.buckets(), histogram.total)
        return family
