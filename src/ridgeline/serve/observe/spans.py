"""A request in the engine as OpenTelemetry spans: ``queue``, ``prefill`` and ``decode`` below one.

They are made from the request's record when it has ended, with the times in it, so a step pays
nothing for them. Without an SDK in the process the API makes none. Attributes are those of the
semantic conventions for generative AI; where these have no name, vLLM's. It knows nothing of
routes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from opentelemetry import propagate, trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace import Span, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from ridgeline.core.records import RequestRecord
from ridgeline.version import __version__

_SAME_NAME = [
    *("frequency_penalty", "max_tokens", "presence_penalty", "seed", "temperature"),
    *("top_k", "top_p"),
]


def parent_of(headers: Mapping[str, str]) -> Context:
    """Return what a request's spans belong to: the HTTP request's own, or else its caller's."""
    here = get_current()
    if trace.get_current_span(here).get_span_context().is_valid:
        return here
    return propagate.extract(headers, here)


def emit(record: RequestRecord, parent: Context, operation: str, model: str) -> None:
    """Make the spans of a request that has ended.

    Args:
        record: what happened.
        parent: from ``parent_of``.
        operation: its name in the conventions, as ``chat``.
        model: its name in the API.
    """
    tracer = trace.get_tracer("ridgeline", __version__)
    epoch_ns = time.time_ns() - time.monotonic_ns()  # the clock of records is the monotonic one
    span = tracer.start_span(
        f"{operation} {model}", parent, start_time=epoch_ns + _ns(record.arrival_s)
    )
    if not span.is_recording():  # no SDK, or this trace is not sampled
        return
    span.set_attributes(dict(_attributes(record, operation, model)))
    if record.error:
        span.set_attribute("error.type", "engine_error")
        span.set_status(StatusCode.ERROR, record.error)
    _add_phases(tracer, span, record, epoch_ns)
    span.end(epoch_ns + _ns(record.finish_s))


def _add_phases(tracer: Tracer, whole: Span, record: RequestRecord, epoch_ns: int) -> None:
    """Add what the request went through; one that ended early has no later phase."""
    inside = trace.set_span_in_context(whole)
    begins = {
        "queue": record.arrival_s,
        "prefill": record.scheduled_s,
        "decode": record.first_token_s,
    }
    reached = [(name, begin_s) for name, begin_s in begins.items() if begin_s is not None]
    ends = [*(begin_s for _, begin_s in reached[1:]), record.finish_s]
    for (name, begin_s), end_s in zip(reached, ends, strict=True):
        span = tracer.start_span(name, inside, start_time=epoch_ns + _ns(begin_s))
        span.end(epoch_ns + _ns(end_s))


def _attributes(
    record: RequestRecord, operation: str, model: str
) -> Iterator[tuple[str, AttributeValue]]:
    yield "gen_ai.operation.name", operation
    yield "gen_ai.provider.name", "ridgeline"
    yield "gen_ai.request.model", model
    yield "gen_ai.response.model", model
    yield "gen_ai.request.id", record.name
    yield "gen_ai.request.choice.count", record.params.get("n", 1)
    for name in _SAME_NAME:
        if record.params.get(name) is not None:
            yield f"gen_ai.request.{name}", record.params[name]
    yield "gen_ai.response.finish_reasons", record.finish_reasons
    yield "gen_ai.usage.input_tokens", len(record.prompt_token_ids)
    yield "gen_ai.usage.cache_read.input_tokens", record.num_cached_tokens
    yield "gen_ai.usage.output_tokens", sum(record.num_generated)
    yield "gen_ai.usage.num_sequences", len(record.num_generated)
    yield "gen_ai.latency.e2e", record.finish_s - record.arrival_s
    if record.scheduled_s is not None:
        yield "gen_ai.latency.time_in_queue", record.scheduled_s - record.arrival_s
        yield "gen_ai.latency.time_in_model_inference", record.finish_s - record.scheduled_s
    if record.scheduled_s is not None and record.first_token_s is not None:
        yield "gen_ai.latency.time_to_first_token", record.first_token_s - record.arrival_s
        yield "gen_ai.latency.time_in_model_prefill", record.first_token_s - record.scheduled_s
        yield "gen_ai.latency.time_in_model_decode", record.finish_s - record.first_token_s
    yield "ridgeline.num_preemptions", record.num_preemptions
    yield "ridgeline.num_draft_tokens", record.num_draft_tokens
    yield "ridgeline.num_accepted_tokens", record.num_accepted_tokens


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
