"""The page shows where the time of a request went that has ended."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from tests.serve.http.test_listening import openssl
from tests.serve.page.browser import (
    DESK,
    PHONE,
    ask,
    browsing,
    find,
    keep,
    says,
    sees,
    set_size,
    texts,
)
from tests.serve.serving import Served, hold


def test_a_request_that_has_ended_can_be_explained(page: Chrome, slow: Served) -> None:
    go_on = hold(slow, 20, 0.04)
    ask(page, "why does it take so long")
    sees(lambda: page.find_elements(By.CSS_SELECTOR, "#sequences .running"))
    go_on.set()
    sees(lambda: page.find_elements(By.CSS_SELECTOR, "#ended button"))
    request = slow.llm.engine._next_id - 1
    assert texts(page, "#ended button") == [str(request)]
    find(page, "#ended button").click()
    title = "return document.querySelector('.explanation svg text')?.textContent"
    sees(lambda: page.execute_script(title))
    assert page.execute_script(title).startswith(f"Request {request} took")
    told = texts(page, ".explanation p")[0]
    assert told.startswith(f"Request {request} took")
    assert "Computing its answer of 60 tokens took" in told
    assert find(page, ".explanation .timeline").text == "Save a timeline"
    saved = "return new Promise((done) => { const before = URL.createObjectURL; "
    saved += "URL.createObjectURL = (file) => { file.text().then(done); return before(file); }; "
    saved += "document.querySelector('.explanation .timeline').click(); })"
    events = json.loads(page.execute_script(saved))["traceEvents"]
    assert {"execute", "answer"} <= {event.get("cat") for event in events}
    bar = page.find_elements(By.CSS_SELECTOR, ".explanation rect")
    assert len(bar) > 4
    assert all(rect.is_displayed() for rect in bar[1:2])
    _keep_picture(page, "desk")
    set_size(page, PHONE)
    _keep_picture(page, "phone")
    width = "return document.querySelector('.explanation').scrollWidth <= innerWidth"
    assert page.execute_script(width)
    set_size(page, DESK)
    find(page, ".explanation form button").click()
    sees(lambda: not find(page, ".explanation").is_displayed())


VIEWER = """<!doctype html><title>viewer</title><script>
  const ready = Date.now() + 300; // it hears nothing before
  onmessage = ({ data, source, origin }) => {
    if (Date.now() < ready) return;
    if (data === 'PING') source.postMessage('PONG', origin);
    else window.given = { ...data.perfetto, text: new TextDecoder().decode(data.perfetto.buffer) };
  };
</script>"""


class Viewer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(VIEWER.encode())

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def viewer(tmp_path: Path) -> Iterator[int]:
    """A server in the place of ui.perfetto.dev, which this test cannot reach; its port."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed: it makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", 2, "-subj",
            "/CN=ui.perfetto.dev", "-keyout", key, "-out", certificate)  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with ThreadingHTTPServer(("127.0.0.1", 0), Viewer) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_a_timeline_is_handed_to_the_viewer(slow: Served, viewer: int, tmp_path: Path) -> None:
    to_viewer = f"--host-resolver-rules=MAP ui.perfetto.dev:443 127.0.0.1:{viewer}"
    flags = (to_viewer, "--ignore-certificate-errors")
    with browsing(tmp_path / "profile", flags=flags) as page:
        page.get(slow.url)
        keep(page)
        ask(page, "show me")
        sees(lambda: page.find_elements(By.CSS_SELECTOR, "#ended button"))
        request = find(page, "#ended button").text
        find(page, "#ended button").click()
        sees(lambda: texts(page, ".explanation .timeline"))
        page.find_elements(By.CSS_SELECTOR, ".explanation .timeline")[1].click()
        sees(lambda: len(page.window_handles) == 2)
        page.switch_to.window(page.window_handles[1])
        sees(lambda: page.execute_script("return window.given?.title"))
        assert page.current_url == "https://ui.perfetto.dev/"
        given = page.execute_script("return [given.title, given.fileName, given.text]")
        assert given[:2] == [f"Request {request}", f"timeline-{request}.json"]
        assert json.loads(given[2])["traceEvents"]
        page.close()
        page.switch_to.window(page.window_handles[0])
        assert texts(page, ".explanation .problem") == []
    slow.assert_idle()


def test_what_is_forgotten_is_said(page: Chrome, slow: Served) -> None:
    ask(page, "soon forgotten")
    sees(lambda: page.find_elements(By.CSS_SELECTOR, "#ended button"))
    trace_buffer = slow.running.model_server.trace_buffer
    with trace_buffer._lock:
        trace_buffer._lines.clear()
    find(page, "#ended button").click()
    sees(lambda: says(page, ".explanation .problem", "none has ended yet"))
    find(page, ".explanation form button").click()


def _keep_picture(page: Chrome, name: str) -> None:
    """Write a screenshot where one is asked for."""
    if folder := os.environ.get("RIDGELINE_SCREENSHOTS"):
        page.save_screenshot(Path(folder) / f"explain-{name}.png")
