"""What the audit log of a server says of each request, and what is refused without its line."""

from __future__ import annotations

import hashlib
import http.client
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM
from ridgeline.serve.http.keys import Keys
from ridgeline.serve.http.options import ServeOptions
from ridgeline.trust.audit.check import check
from ridgeline.trust.audit.log import audit_log
from ridgeline.trust.audit.record_format import HEAD_FILE, files_of, read_key
from tests.serve.batches.test_batches import begun, ended, requests
from tests.serve.serving import JSON, Served, composed, hold, serving
from tests.trust.guards.models import write_guard
from tests.trust.rules.test_routes import ROUTES
from tests.waiting import PATIENCE_S, connected, eventually

RULES = """
version = "7"
[keys.default]
audit = "text"
input = ["pii", "secret"]
[keys.silent]
[keys.hashed]
audit = "hash"
[keys.poor]
limits = { requests_per_minute = 1 }
[rules]
pii = { kinds = ["email"], action = "redact" }
secret = { patterns = ["project heron"], action = "block" }
"""
LABELS = ("told", "silent", "hashed", "poor")
ASK = {"prompt": "one two", "max_tokens": 4, "ignore_eos": True}


# Each route once, as a stream where it can be one; and the whole answers of each kind of message.
WHOLE = ("chat", "a call", "beams", "the best of three", "responses")
ASKED = [
    pytest.param(name, stream, marks=() if stream != (name in WHOLE) else pytest.mark.full)
    for name in ROUTES
    for stream in (False, True)
]


class Log:
    """The audit log of a server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.flags: dict[str, Any] = {"audit": folder, "audit_key": folder.parent / "audit.key"}

    def lines(self) -> list[dict[str, Any]]:
        whole = b"".join(file.read_bytes() for file in files_of(self.folder))
        return [json.loads(line) for line in whole[: whole.rfind(b"\n") + 1].splitlines()]

    def of(self, request_id: str) -> dict[str, Any]:
        """Return the one line about a request, once it is there."""
        eventually(lambda: [one for one in self.lines() if one.get("id") == request_id])
        (line,) = [one for one in self.lines() if one.get("id") == request_id]
        return line

    def check(self) -> None:
        key = read_key(self.flags["audit_key"])
        found = check(self.folder, files_of(self.folder), key)
        assert found.faults == []


class Asked:
    """A server with an audit log, and who asks it."""

    def __init__(self, served: Served, log: Log) -> None:
        self.served, self.log, self._num = served, log, 0

    def line(self, path: str, body: Any, label: str = "told", **headers: str) -> dict[str, Any]:
        """Send one request; return the line about it, and its answer in ``sent``."""
        self._num += 1
        request_id = f"request-{self._num}"
        headers = {"authorization": f"Bearer {label}-key", **headers}
        status, sent, _ = self.served.call(path, body, x_request_id=request_id, **headers)
        line = self.log.of(request_id)
        assert line["status"] == status, (line, sent)
        return line | {"sent": sent}


@pytest.fixture(scope="module")
def asked(roomy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder = tmp_path_factory.mktemp("audit")
    (folder / "rules.toml").write_text(RULES)
    (folder / "keys").write_text("".join(f"{label} {label}-key\n" for label in LABELS))
    log = Log(folder / "log")
    flags = {"rules": folder / "rules.toml", "api_key_file": folder / "keys", "max_body": "64KiB"}
    with serving(roomy, **flags, **log.flags) as served:
        served.stop_clock_of_limits()
        yield Asked(served, log)
    log.check()


def test_a_line_says_what_was_asked_and_what_came_of_it(asked: Asked) -> None:
    line = asked.line("/v1/completions", ASK, traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
    assert line["event"] == "request"
    assert (line["key"], line["rules"], line["status"]) == ("told", "7/default", 200)
    assert (line["model"], line["path"]) == ("tiny", "/v1/completions")
    assert line["fingerprint"] == line["sent"]["system_fingerprint"]
    assert line["prompt_tokens"] == line["sent"]["usage"]["prompt_tokens"]
    assert (line["completion_tokens"], line["finish"]) == (4, "length")
    assert line["trace_id"] == "a" * 32
    assert line["asked"] == {"prompt": "one two"}
    (answer,) = line["answers"]
    assert answer["content"] == line["sent"]["choices"][0]["text"]
    assert asked.line("/v1/completions", ASK)["params"] == line["params"]
    assert asked.line("/v1/completions", ASK | {"top_k": 3})["params"] != line["params"]


REFUSED: dict[str, tuple[str, Any, dict[str, str], dict[str, Any]]] = {
    # The path, the body, headers, and what the line says.
    "no JSON": ("/v1/completions", b'{"prom', {}, {"status": 400, "code": "invalid_json"}),
    "a wrong key": (
        "/v1/completions",
        ASK,
        {"authorization": "Bearer none"},
        {"status": 401, "code": "invalid_api_key"},
    ),
    "a wrong value": (
        "/v1/chat/completions",
        {"messages": 3},
        {},
        {"status": 400, "code": "invalid_value"},
    ),
    "a foreign page": (
        "/v1/completions",
        ASK,
        {"origin": "https://evil.example"},
        {"status": 403, "code": "origin"},
    ),
    "no such route": ("/v1/none", ASK, {}, {"status": 404}),
    "no such model": (
        "/v1/completions",
        ASK | {"model": "none"},
        {},
        {"status": 404, "code": "model_not_found"},
    ),
    "too long": (
        "/v1/completions",
        ASK | {"prompt": "a" * 99_999},
        {},
        {"status": 413},
    ),
    "blocked by a rule": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "on project heron"}]},
        {},
        {"status": 400, "code": "content_filter", "hits": ["secret:input:block"]},
    ),
    "a deadline": (
        "/v1/completions",
        ASK | {"deadline": {"total_ms": 1}},
        {},
        {"status": 503, "promise": "refused"},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_has_a_line(asked: Asked, name: str) -> None:
    path, body, headers, says = REFUSED[name]
    line = asked.line(path, body, **headers)
    assert {name: line.get(name) for name in says} == says
    assert "heron" not in json.dumps({**line, "sent": None})


def test_a_key_over_its_limit_has_a_line(asked: Asked) -> None:
    assert asked.line("/v1/completions", ASK, "poor")["status"] == 200
    line = asked.line("/v1/completions", ASK, "poor")
    assert (line["status"], line["code"], line["key"]) == (429, "rate_limit_exceeded", "poor")


def test_what_is_no_request_of_http_has_a_line(asked: Asked) -> None:
    before = len(asked.log.lines())
    with socket.create_connection(("127.0.0.1", asked.served.port)) as client:
        client.sendall(b"GET /v1/models HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 400")
    eventually(lambda: len(asked.log.lines()) > before)
    assert {"path": "/v1/models", "status": 400}.items() <= asked.log.lines()[before].items()


def test_probes_and_pages_that_need_no_key_have_none(asked: Asked) -> None:
    for path in ("/health", "/ready", "/"):
        asked.served.call(path)
    line = asked.line("/v1/models", None)
    assert line["method"] == "GET"
    assert not {"/health", "/ready", "/"} & {one.get("path") for one in asked.log.lines()}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_has_a_line(asked: Asked, *, stream: bool) -> None:
    served, name = asked.served, f"lost-{stream}"
    go_on = hold(served, after=3)
    headers = JSON | {"authorization": "Bearer told-key", "x-request-id": name}
    body = ASK | {"max_tokens": 64, "stream": stream}
    with connected(served.port) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        if stream:
            connection.getresponse().read(6)
        eventually(lambda: served.running.async_engine.num_streams)
    go_on.set()
    line = asked.log.of(name)
    assert (line["status"], line["finish"]) == (200 if stream else 499, "abort")
    assert line["asked"] == {"prompt": "one two"}
    served.assert_idle()


@pytest.mark.parametrize(("name", "stream"), ASKED)
def test_each_route_keeps_what_its_key_says(asked: Asked, name: str, *, stream: bool) -> None:
    path, body = ROUTES[name]
    is_whole = "use_beam_search" in body or "best_of" in body
    body = body | {"stream": stream and not is_whole, "seed": 1}
    told = asked.line(path, body)
    texts = json.dumps(told["answers"]).replace("\\", "").replace("u0040", "@")
    assert "bob@ex" in texts
    assert any(word in json.dumps(told["asked"]) for word in ('"x"', "[[87]]"))
    assert told["finish"]
    silent = asked.line(path, body, "silent")
    assert {"asked", "answers", "error"}.isdisjoint(silent)
    assert (silent["params"], silent["model"]) == (told["params"], "tiny")
    hashed, again = asked.line(path, body, "hashed"), asked.line(path, body, "hashed")
    assert hashed["asked"] == again["asked"]
    if "structured_outputs" in body:  # others are not bound to one text
        assert hashed["answers"] == again["answers"] != []
    shown = json.dumps([hashed["asked"], hashed["answers"]])
    assert "bob" not in shown
    assert '"x"' not in shown
    assert all(one["role"] == "assistant" for one in hashed["answers"])


def test_a_prompt_is_kept_as_the_model_has_read_it(asked: Asked) -> None:
    body = {"messages": [{"role": "user", "content": "I am bob@example.com"}], "max_tokens": 2}
    line = asked.line("/v1/chat/completions", body | {"user": "carl@example.com"})
    assert line["hits"] == ["pii:input:redact"]
    assert line["asked"]["messages"] == [{"role": "user", "content": "I am [EMAIL]"}]
    assert line["asked"]["user"] == "[EMAIL]"


def test_a_hash_is_of_the_text_under_the_key_of_the_day(asked: Asked) -> None:
    line = asked.line("/v1/completions", ASK, "hashed")
    key = asked.log.folder / f"{line['time'][:10]}.key"
    digest = hashlib.blake2b(b"one two", key=key.read_bytes(), digest_size=32).hexdigest()
    assert line["asked"] == {"prompt": digest}
    ids = asked.line("/v1/completions", ASK | {"prompt": [5, 6, 7]}, "hashed")["asked"]["prompt"]
    assert isinstance(ids, str)  # ids are a text too


def test_token_routes_and_vectors_have_lines_without_texts(asked: Asked) -> None:
    line = asked.line("/tokenize", {"prompt": "one two"})
    assert (line["status"], line["key"]) == (200, "told")
    assert "asked" not in line


def test_texts_that_a_guard_judges_are_kept(tmp_path: Path) -> None:
    log, file = Log(tmp_path / "log"), tmp_path / "rules.toml"
    file.write_text('version = "1"\n[keys.default]\naudit = "text"\n')
    guard = write_guard(tmp_path / "guard", "Llama Guard 3 8B")
    with serving(guard, {"kv_cache_memory": "4MiB"}, rules=file, **log.flags) as served:
        asked = {"input": ["The cat", "sat"]}
        assert served.call("/v1/moderations", asked, x_request_id="judged")[0] == 200
        line = log.of("judged")
        assert (line["status"], line["model"], line["asked"]) == (200, "tiny", asked)
        assert line["prompt_tokens"] > 0


def test_many_requests_at_once_have_a_line_each(asked: Asked) -> None:
    def ask(i: int) -> int:
        body = ASK | {"stream": i % 2 == 0}
        headers = {"authorization": "Bearer told-key", "x-request-id": f"many-{i}"}
        return asked.served.call("/v1/completions", body, **headers)[0]

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(ask, range(64))) == {200}
    assert [asked.log.of(f"many-{i}")["status"] for i in range(64)] == [200] * 64


def test_operators_see_where_the_log_ends(model: Path, tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    with serving(model, api_key=["a"], admin_api_key=["b"], **log.flags) as served:
        path = "/v1/audit/head"
        assert served.call(path, authorization="Bearer a")[0] == 403
        eventually(lambda: served.call(path, authorization="Bearer b")[1]["seq"] > 0)
        head = served.call(path, authorization="Bearer b")[1]
        assert (head["lost"], "trouble" in head) == (0, False)
    assert check(log.folder, files_of(log.folder), None, head["head"]).faults == []


def test_a_server_that_starts_again_goes_on(model: Path, tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    for i in range(3):
        with serving(model, **log.flags) as served:
            served.call("/v1/completions", ASK, x_request_id=f"r{i}")
    events = [line["event"] for line in log.lines()]
    assert events == ["start", "request", "stop"] * 3
    log.check()


def test_requests_of_a_batch_have_lines(model: Path, tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    with serving(model, {"max_num_seqs": 4}, home=tmp_path, **log.flags) as served:
        client = served.client()
        assert ended(client, begun(client, requests(6))).status == "completed"
        eventually(lambda: sum("batch" in line for line in log.lines()) == 6)
    lines = [line for line in log.lines() if "batch" in line]
    assert {(one["path"], one["status"], one["finish"]) for one in lines} <= {
        ("/v1/completions", 200, "length"),
        ("/v1/completions", 200, "stop"),
    }
    assert len({line["id"] for line in lines}) == 6
    log.check()


# --- a log that cannot be written -----------------------------------------------------------------


def spoil(log: Log) -> None:
    """Let no line be written, as if the disk had gone: a file stands in the folder's place."""
    shutil.rmtree(log.folder)
    log.folder.touch()


def mend(log: Log) -> None:
    log.folder.unlink()


def test_lines_that_cannot_be_written_are_counted_and_told(model: Path, tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    with serving(model, **log.flags) as served:
        assert served.call("/v1/completions", ASK)[0] == 200
        spoil(log)
        eventually(lambda: served.call("/v1/models") and "audit" in served.call("/health")[1])
        assert served.call("/v1/completions", ASK)[0] == 200  # it is served all the same
        eventually(lambda: served.metrics()["ridgeline:audit_lines_lost_total"] > 0)
        status, said, _ = served.call("/health")
        assert (status, said["status"]) == (200, "ok")
        assert "lines were lost; it cannot be written now: " in said["audit"]
        assert sum("audit log cannot be written" in line for line in served.lines) <= 1
        mend(log)
        eventually(
            lambda: served.call("/v1/models") and "again" in served.call("/health")[1]["audit"]
        )
    assert {"lost", "missing"} <= {line["event"] for line in log.lines()}


def test_a_strict_log_has_a_line_before_its_answer_ends(model: Path, tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    with serving(model, audit_strict=True, **log.flags) as served:
        for i, stream in enumerate((False, True, False, True)):
            body = ASK | {"stream": stream}
            assert served.call("/v1/completions", body, x_request_id=f"r{i}")[0] == 200
            (line,) = [one for one in log.lines() if one.get("id") == f"r{i}"]  # and no later
            assert json.loads((log.folder / HEAD_FILE).read_bytes())["seq"] >= line["seq"]
        assert served.call("/v1/completions", b"{", x_request_id="bad")[0] == 400
        assert "bad" in {one.get("id") for one in log.lines()}
    log.check()


def is_cut(served: Served, body: dict[str, Any]) -> bool:
    """Whether an answer ends before it is whole."""
    with connected(served.port) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), JSON)
        try:
            connection.getresponse().read()
        except (http.client.IncompleteRead, ConnectionError):
            return True
    return False


def test_a_strict_log_refuses_what_it_has_no_line_of(model: Path, tmp_path: Path) -> None:
    """The first to meet the trouble was answered already: its end is refused, or cut."""
    log = Log(tmp_path / "log")
    with serving(model, audit_strict=True, **log.flags) as served:
        for stream in (False, True):
            assert served.call("/v1/completions", ASK)[0] == 200
            spoil(log)
            if stream:
                assert is_cut(served, ASK | {"stream": True})
            else:
                status, error = served.refused("/v1/completions", ASK)
                assert (status, error["code"]) == (503, "audit_failed")
            steps = served.valve.num_steps
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings"):
                status, error = served.refused(path, ASK)  # now before any work
                assert (status, error["code"]) == (503, "audit_failed")
                assert "the audit log cannot be written" in error["message"]
            assert served.valve.num_steps == steps
            assert served.call("/health")[1]["audit"]
            mend(log)
            eventually(lambda: served.call("/v1/completions", ASK)[0] == 200)
        served.assert_idle()


def test_a_strict_log_stops_a_batch_that_it_has_no_lines_of(model: Path, tmp_path: Path) -> None:
    """It goes on at the next start."""
    log = Log(tmp_path / "log")
    flags: dict[str, Any] = {"audit_strict": True, **log.flags}
    with serving(model, {"max_num_seqs": 4}, home=tmp_path, **flags) as served:
        client = served.client()
        go_on = hold(served, after=2)
        batch = begun(client, requests(3))
        eventually(lambda: served.running.async_engine.num_streams)
        spoil(log)
        go_on.set()
        eventually(lambda: not served.running.async_engine.num_streams)
        mend(log)
        eventually(lambda: served.call("/v1/models")[0] == 200)
        found = client.batches.retrieve(batch.id)
        assert found.status == "in_progress"
        assert found.request_counts
        assert found.request_counts.completed == 0
    with serving(model, {"max_num_seqs": 4}, home=tmp_path, **flags) as served:
        assert ended(served.client(), batch).status == "completed"
        assert sum("batch" in line for line in log.lines()) >= 3


# --- what is not there ----------------------------------------------------------------------------


def test_flags_that_say_nothing_are_refused(model: Path, tmp_path: Path) -> None:
    for flags, words in (
        ({"audit_strict": True}, "--audit-strict needs --audit"),
        ({"audit_key": tmp_path / "k"}, "--audit-key needs --audit"),
        ({"audit": tmp_path, "audit_keep": "0"}, "--audit-keep is 0"),
        ({"audit": tmp_path, "audit_keep": "soon"}, "--audit-keep: 'soon' is not a time"),
        ({"audit": tmp_path, "audit_rotate": "much"}, "--audit-rotate: 'much' is not a size"),
    ):
        with pytest.raises(ValueError, match=words):
            ServeOptions(**flags)
    file = tmp_path / "rules.toml"
    file.write_text(RULES)
    (tmp_path / "keys").write_text("".join(f"{label} {label}-key\n" for label in LABELS))
    with LLM(model, threads=1) as llm, pytest.raises(ValueError, match="needs --audit"):
        composed(llm, ServeOptions(rules=file), Keys((), tmp_path / "keys"))


def test_two_servers_do_not_write_one_log(model: Path, tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    with (
        serving(model, **log.flags),
        pytest.raises(ValueError, match="another server writes there"),
        audit_log(ServeOptions(**log.flags)),
    ):
        pass
    log.check()


def test_without_a_log_nothing_of_it_is_imported(model: Path) -> None:
    program = (
        "import sys, ridgeline.serve.main; from ridgeline import LLM;"
        "from ridgeline.serve.compose import compose;"
        "from ridgeline.serve.http.keys import Keys; import ridgeline.fleet.main;"
        "from ridgeline.serve.http.options import ServeOptions; import ridgeline.cli.main;"
        "from ridgeline.trust.stages import ServerStages;\n"
        "options, keys = ServeOptions(), Keys((), None)\n"
        "with LLM(sys.argv[1], threads=1) as llm:\n"
        "    compose(llm, 'tiny', options, keys, ServerStages(options, keys))\n"
        "print([one for one in sys.modules if one.startswith('ridgeline.trust.audit')])"
    )
    command = [sys.executable, "-c", program, str(model)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.splitlines()[-1] == "[]"


def test_threads_of_a_log_end_with_its_server(model: Path, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with serving(model, **Log(tmp_path / "log").flags):
        (thread,) = [one for one in set(threading.enumerate()) - before if one.name == "audit"]
        assert thread.is_alive()
    assert not thread.is_alive()
