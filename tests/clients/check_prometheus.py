"""Prometheus: promtool reads the metrics, a server scrapes them, the dashboard has data."""

import json
import os
import re
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

URL = os.environ["RIDGELINE_URL"]
DASHBOARD = Path(__file__).parents[2] / "contrib" / "grafana" / "ridgeline.json"
# Names are vLLM's: a colon stands for a recording rule elsewhere, and one histogram is a "total".
VLLM_HABITS = re.compile(
    r"\S+ metric names should not contain ':'"
    r'|ridgeline:iteration_tokens_total non-counter metrics should not have "_total" suffix'
)


def test_promtool_finds_only_what_vllm_does_too():
    text = urllib.request.urlopen(f"{URL}/metrics").read()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    said = done.stderr.decode().splitlines()
    assert [line for line in said if not VLLM_HABITS.fullmatch(line)] == []
    assert done.returncode in (0, 3), said  # 1: it cannot be read; 3: remarks on names


def expressions():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    for panel in panels:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$__rate_interval", "10s")
            yield expression.replace("$model", os.environ["RIDGELINE_MODEL"])


@pytest.fixture(scope="module")
def query(tmp_path_factory):
    """Ask a Prometheus that scrapes the server; it has seen some requests."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        "scrape_configs: [{job_name: ridgeline, static_configs: "
        f"[{{targets: ['{urllib.parse.urlsplit(URL).netloc}']}}]}}]\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", "--config.file=prometheus.yml", f"--web.listen-address={address}"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL) as server:

        def query(expression):
            asked = urllib.parse.urlencode({"query": expression})
            with urllib.request.urlopen(f"http://{address}/api/v1/query?{asked}") as answer:
                return json.load(answer)["data"]["result"]

        try:
            end_s = time.monotonic() + 60
            while time.monotonic() < end_s:
                ask()
                try:
                    if len(query("count_over_time(up[8s]) > 5")):
                        break
                except OSError:  # it does not listen yet
                    pass
                time.sleep(1)
            yield query
        finally:
            server.terminate()


def ask():
    body = {"model": os.environ["RIDGELINE_MODEL"], "prompt": "2+2=", "max_tokens": 4}
    head = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{URL}/v1/completions", json.dumps(body).encode(), head)
    urllib.request.urlopen(asked).read()


def test_it_scrapes(query):
    assert [one["value"][1] for one in query("up")] == ["1"]


@pytest.mark.parametrize("expression", expressions())
def test_each_panel_has_data(query, expression):
    assert query(expression)
