"""Spans of requests in the engine, as a real OpenTelemetry SDK records them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ridgeline.serve.observe.spans import parent_of
from tests.engine.test_llm import POISON
from tests.serve.engine.test_async_engine import post
from tests.serve.serving import Served, hold
from tests.waiting import eventually

CALLER_TRACE, CALLER_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CALLER = f"00-{CALLER_TRACE}-{CALLER_SPAN}-01"
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"


class Recorded:
    """What the SDK was given, once a request is over."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def ended(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def whole(self, name: str) -> ReadableSpan:
        """The span of the only request."""
        eventually(lambda: self.ended(name))
        (span,) = self.ended(name)
        return span

    def phases(self, whole: ReadableSpan) -> list[ReadableSpan]:
        """The spans below it, in the order of time."""
        found = self.exporter.get_finished_spans()
        below = [span for span in found if span.parent and span.parent == whole.context]
        return sorted(below, key=lambda span: span.start_time or 0)

    def top(self, span: ReadableSpan) -> str:
        """The id of the first span above that was not recorded here."""
        by_id = {one.context.span_id: one for one in self.exporter.get_finished_spans()}
        while span.parent and span.parent.span_id in by_id:
            span = by_id[span.parent.span_id]
        return f"{span.parent.span_id:016x}" if span.parent else ""


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    found = Recorded()
    # A process may set its provider only once; other tests shall have none.
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", found.provider)
    yield found
    found.provider.shutdown()


def test_a_request_is_a_span_of_its_caller_with_three_phases(
    served: Served, recorded: Recorded
) -> None:
    before_s = time.time()
    body = {"prompt": list(range(40, 80)), "n": 2, "max_tokens": 6, "ignore_eos": True}
    body |= {"temperature": 0.5, "seed": 3}
    for _ in range(2):  # the second finds the prompt in the cache
        recorded.exporter.clear()
        status, answer, headers = served.call(COMPLETE, body, traceparent=CALLER)
        assert status == 200
        whole = recorded.whole("text_completion tiny")
    after_s = time.time()
    assert f"{whole.context.trace_id:032x}" == CALLER_TRACE
    eventually(lambda: recorded.top(whole) == CALLER_SPAN)
    phases = recorded.phases(whole)
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    borders = [phases[0].start_time, *(span.end_time for span in phases)]
    assert [span.start_time for span in phases] == borders[:-1]
    assert (whole.start_time, whole.end_time) == (borders[0], borders[-1])
    assert before_s - 0.1 < (whole.start_time or 0) / 1e9 < (whole.end_time or 0) / 1e9
    assert (whole.end_time or 0) / 1e9 < after_s + 0.1
    told = dict(whole.attributes or {})
    usage = answer["usage"]
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "tiny"
    assert told["gen_ai.request.id"] == headers["x-request-id"]
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"] == 40
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 12
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert told["gen_ai.usage.cache_read.input_tokens"] == cached > 0
    assert told["gen_ai.response.finish_reasons"] == ("length", "length")
    assert told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.request.seed"] == 3
    assert told["gen_ai.request.choice.count"] == 2
    parts = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    total_s = sum(float(str(told[f"gen_ai.latency.{part}"])) for part in parts)
    assert total_s == pytest.approx(told["gen_ai.latency.e2e"])


def test_a_chat_without_a_caller_has_a_trace_of_its_own(served: Served, recorded: Recorded) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert served.call(CHAT, body)[0] == 200
    whole = recorded.whole("chat tiny")
    eventually(lambda: recorded.top(whole) == "")


def test_a_prompt_each_has_a_span(served: Served, recorded: Recorded) -> None:
    served.call(COMPLETE, {"prompt": [[40], [41, 42]], "max_tokens": 2, "ignore_eos": True})
    eventually(lambda: len(recorded.ended("text_completion tiny")) == 2)
    counts = [
        (s.attributes or {})["gen_ai.usage.input_tokens"]
        for s in recorded.ended("text_completion tiny")
    ]
    assert sorted(map(int, map(str, counts))) == [1, 2]


def test_a_request_that_its_client_leaves_ends_too(served: Served, recorded: Recorded) -> None:
    body = {"prompt": [40] * 9, "max_tokens": 100, "ignore_eos": True}
    go_on = hold(served, after=5)
    with post(served.port, body | {"stream": True}) as connection:
        connection.recv(1000)
    eventually(lambda: not served.running.async_engine.num_streams)
    go_on.set()
    whole = recorded.whole("text_completion tiny")
    assert (whole.attributes or {})["gen_ai.response.finish_reasons"] == ("abort",)
    assert [span.name for span in recorded.phases(whole)] == ["queue", "prefill", "decode"]


def test_a_request_that_fails_says_so(served: Served, recorded: Recorded) -> None:
    assert served.call(COMPLETE, {"prompt": [41, POISON], "max_tokens": 2})[0] == 500
    whole = recorded.whole("text_completion tiny")
    assert not whole.status.is_ok
    assert "not finite" in str(whole.status.description)
    assert [span.name for span in recorded.phases(whole)] == ["queue", "prefill"]


def test_a_trace_that_is_not_sampled_has_no_spans(served: Served, recorded: Recorded) -> None:
    served.call(COMPLETE, {"prompt": [40], "max_tokens": 2}, traceparent=CALLER[:-1] + "0")
    served.call(COMPLETE, {"prompt": [41], "max_tokens": 2}, traceparent=CALLER)
    recorded.whole("text_completion tiny")
    assert len(recorded.ended("queue")) == 1


def test_without_a_span_of_the_http_request_the_caller_is_the_parent() -> None:
    found = trace.get_current_span(parent_of({"traceparent": CALLER})).get_span_context()
    assert (f"{found.trace_id:032x}", f"{found.span_id:016x}") == (CALLER_TRACE, CALLER_SPAN)
    assert not trace.get_current_span(parent_of({})).get_span_context().is_valid
