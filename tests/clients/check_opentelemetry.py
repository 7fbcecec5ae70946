"""opentelemetry-instrument: the server starts under it, and sends its spans in OTLP."""

import gzip
import http.server
import json
import os
import re
import subprocess
import threading
import urllib.request

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes what an exporter posts, and keeps the spans."""

    spans = []  # noqa: RUF012

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/v1/traces":
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for of_scope in of_resource.scope_spans:
                    self.spans += of_scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_spans_of_a_chat(tmp_path):
    collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    known = os.environ | {
        "HOME": os.environ["RIDGELINE_USER_HOME"],
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
    }
    model = os.environ["RIDGELINE_MODEL"]
    command = ["opentelemetry-instrument", "ridgeline", "serve", model, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=known) as server:
        try:
            url = re.search(r"ready at (http://\S+)", server.stdout.readline())[1]
            body = {
                "model": model,
                "messages": [{"role": "user", "content": "Hi"}],
                "max_tokens": 4,
            }
            head = {"Content-Type": "application/json", "traceparent": f"00-{TRACE}-{SPAN}-01"}
            asked = urllib.request.Request(
                f"{url}/v1/chat/completions", json.dumps(body).encode(), head
            )
            usage = json.load(urllib.request.urlopen(asked))["usage"]
        finally:
            server.terminate()  # what is still to be sent is sent at the end
    assert server.returncode == 0
    ours = {span.name: span for span in Collector.spans if span.trace_id.hex() == TRACE}
    chat = ours[f"chat {model}"]
    phases = [span.name for span in ours.values() if span.parent_span_id == chat.span_id]
    assert sorted(phases) == ["decode", "prefill", "queue"]
    assert SPAN in {span.parent_span_id.hex() for span in ours.values()}  # the caller's
    told = {one.key: one.value for one in chat.attributes}
    assert told["gen_ai.usage.input_tokens"].int_value == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"].int_value == usage["completion_tokens"]
