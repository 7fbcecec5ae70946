"""Records of what happened, added up for Prometheus; names and buckets are vLLM's where it has one.

Counters and histograms come from records alone, so they agree with ``--trace``. Gauges are read
when metrics are scraped. Any thread may call; nothing that a client sends becomes a label, and of a
key only the label that its owner gave it is shown.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric

from ridgeline.core.records import Record, RequestRecord
from ridgeline.foresight.counts import COUNTERS, HISTOGRAMS, STEP_S, Counts, Spread
from ridgeline.foresight.deadline import PromiseMargin
from ridgeline.foresight.step_time.fit import ERROR_BOUNDS, PredictionMonitor
from ridgeline.version import __version__

_Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]

_OF_KEY = {  # these add up to what is counted of all requests
    "key_requests": "Prompts that ended, by key.",
    "key_prompt_tokens": "Prompt tokens of requests that got an answer, by key.",
    "key_cached_tokens": "Prompt tokens found in the prefix cache, by key.",
    "key_generation_tokens": "Tokens generated, by key.",
}


class _Collected:
    """Metrics that were collected before."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


class CountSources(NamedTuple):
    """What others count, asked for when metrics are read.

    Attributes:
        gauges: how things stand now.
        num_lost: how many records the trace has lost.
        adapters: how many requests have each adapter.
        kv_disk: what became of blocks that files keep.
        num_unnoted: how many requests could not be noted; None where nothing notes them.
    """

    gauges: Callable[[], Mapping[str, float]]
    num_lost: Callable[[], int]
    adapters: Callable[[], Mapping[str, int]]
    kv_disk: Callable[[], Mapping[str, int]]
    num_unnoted: Callable[[], int | None]


class Metrics:
    """Counters, histograms and gauges; a collector for a Prometheus registry."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(
        self,
        model_name: str,
        sources: CountSources,
        monitor: PredictionMonitor,
        margin: PromiseMargin,
        keys: Iterable[str],
    ) -> None:
        """Label everything with ``model_name``; ``keys`` are labels known from the start.

        ``monitor`` says what was predicted, and ``margin`` by how much that must be sooner than a
        deadline.
        """
        self._model, self.monitor, self.margin = model_name, monitor, margin
        self._gauges, self._num_lost, self._adapters, self._kv_disk, self._num_unnoted = sources
        self._lock = threading.Lock()
        self._counted, self._grammars = Counts(), Spread(STEP_S)
        self._promises: Counter[str] = Counter(kept=0, broken=0, in_time=0, late=0, refused=0)
        self._refused: Counter[str] = Counter(invalid=0, too_long=0, too_slow=0)  # grammars
        self._hits: Counter[tuple[str, str, str]] | None = None  # of a server with rules
        self._usage = {key: Counter[str]() for key in keys}
        self._http: Counter[tuple[str, str, str]] = Counter()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    def on_record(self, record: Record) -> None:
        """Add a record."""
        with self._lock:
            self._counted.on_record(record)

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
            self._grammars.observe(seconds)

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
        yield self._by("what", counter, "kv_disk_blocks", text, self._kv_disk())
        for name, value in self._counted.counters().items():
            yield self._one(counter, name, COUNTERS[name], value)
        text = "Records that --trace could not write."
        yield self._one(counter, "trace_records_lost", text, self._num_lost())
        text = "Draft tokens that were right, by place."
        accepted = {str(place): count for place, count in sorted(self._counted.accepted.items())}
        name = "spec_decode_num_accepted_tokens_per_pos"
        yield self._by("position", counter, name, text, accepted)
        for label, name, text, counts in (
            ("reason", "num_grammar_refused", "Grammars that cannot be used.", self._refused),
            ("outcome", "promises", "Requests with a deadline.", self._promises),
            ("finished_reason", "request_success", "Answers that ended.", self._counted.finished),
        ):
            yield self._by(label, counter, name, text, counts)
        yield from self._used(self._usage)
        for name, (_, text) in HISTOGRAMS.items():
            yield self._spread(name, text, self._counted.histograms[name])
        text = "To get a grammar ready, kept ones included."
        yield self._spread("grammar_compilation_time_seconds", text, self._grammars)
        http = counter("http_requests", "HTTP requests.", labels=["handler", "method", "status"])
        for key, count in self._http.items():
            http.add_metric(list(key), count)
        yield http
        if (num := self._num_unnoted()) is not None:
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
        for name, text in _OF_KEY.items():
            by_key = {label: used[name] for label, used in usage.items()}
            yield self._by("key", CounterMetricFamily, name, text, by_key)

    def _foreseen(self) -> Iterator[Metric]:
        """Yield what was predicted of steps and requests, and how well."""
        monitor, gauge, counter = self.monitor, GaugeMetricFamily, CounterMetricFamily
        for name, value, text in (
            ("predicted_step_seconds", monitor.predicted_s, "Predicted for steps, one by one."),
            ("compared_step_seconds", monitor.actual_s, "What these steps took, without commit."),
            ("num_time_model_fits", monitor.num_fits, "Times that the model of time was fitted."),
            ("foreseen_requests", monitor.num_requests, "Requests foreseen when they came."),
        ):
            yield self._one(counter, name, text, value)
        for name, value, text in (
            ("speed_ratio", monitor.speed, "Speed now, over that of the model of time."),
            ("time_model_calibrated", float(monitor.is_calibrated), "1 if it was measured."),
            ("promise_margin_ratio", self.margin.factor, "Forecasts times this must be in time."),
            ("promises_made", float(self.margin.are_promises_made), "0 if too many were broken."),
        ):
            yield self._one(gauge, name, text, value)
        text = "Mean relative error of late, of steps and of requests' times."
        errors = dict(sorted(monitor.errors.items()))
        yield self._by("of", gauge, "prediction_mean_abs_error_ratio", text, errors)
        step_errors = Spread(ERROR_BOUNDS)
        step_errors.counts, step_errors.total = list(monitor.error_counts), monitor.error_sum
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

    def _spread(self, name: str, text: str, histogram: Spread) -> Metric:
        """Return a metric of many measurements: how many lie within which bounds."""
        family = HistogramMetricFamily(f"ridgeline:{name}", text, labels=["model_name"])
        family.add_metric([self._model], histogram.buckets(), histogram.total)
        return family
