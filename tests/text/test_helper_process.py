"""A helper process that cannot be started any more: the machine's fault, and no request's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ridgeline.system import process as child
from ridgeline.text.template.chat import Renderer
from tests.engine.test_llm import HELLO, write_model
from tests.serve.serving import serving
from tests.waiting import eventually, started

CHAT = "/v1/chat/completions"
NOW = datetime(2026, 11, 28)


def ends_at_once(program: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", ""]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def kill(children: child.Children) -> None:
    for one in children._all:
        if one._process is not None:
            one._process.kill()
            one._process.wait()


def test_a_template_that_never_started_is_at_fault_and_one_that_did_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, renderer = Renderer("{{ text }}"), Renderer("{{ text }}")
    assert started.render({"text": "yes"}, NOW) == "yes"
    with monkeypatch.context() as patch:
        patch.setattr(child, "_started", ends_at_once)
        kill(started._children)
        with pytest.raises(ChildProcessError, match=r"^chats cannot be written now: its process"):
            started.render({"text": "yes"}, NOW)
        with pytest.raises(ValueError, match="the chat template fails: its process"):
            renderer.render({"text": "yes"}, NOW)
    assert started.render({"text": "again"}, NOW) == "again"
    for one in (started, renderer):
        one.close()


SLOW = """
import json, sys, time
from pathlib import Path
for line in sys.stdin:
    if path := json.loads(line):
        Path(path).touch()
        for _ in range(20):
            time.sleep(0.02)
    print("1", flush=True)
"""
ASKS = """
import sys
from pathlib import Path
from ridgeline.system.process import Child
child = Child(Path(sys.argv[1]), str)
print(child.ask(sys.argv[2], 4.0))
child.close()
"""


def test_time_in_which_all_stands_still_does_not_count(tmp_path: Path) -> None:
    """As where a machine is suspended for longer than an answer may take."""
    program, asked = tmp_path / "slow.py", tmp_path / "asked"
    program.write_text(SLOW)
    command = [sys.executable, "-c", ASKS, str(program), str(asked)]
    with started(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        eventually(asked.exists)
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(5)
        os.killpg(process.pid, signal.SIGCONT)
        assert process.communicate()[0] == "1\n"


def test_a_server_that_cannot_start_one_says_so_and_loosens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503, which a router asks another server for; a tool's schema is not left out for it."""
    path = write_model(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    ask: dict[str, Any] = {"messages": HELLO, "max_tokens": 4}
    with serving(path, {"kv_cache_memory": "8MiB"}) as served:
        assert served.call(CHAT, ask)[0] == 200  # so what writes chats runs
        for fields in ({"response_format": form}, {"tools": [tool], "tool_choice": "required"}):
            with monkeypatch.context() as patch:
                patch.setattr(child, "_started", ends_at_once)
                if grammars := served.llm.text._grammars:
                    kill(grammars._children)
                status, error = served.refused(CHAT, ask | fields)
                assert (status, error["code"]) == (503, "no_process"), error
                assert error["message"].startswith("grammars cannot be compiled now")
            grammars = served.llm.text._grammars
            process = grammars._children._idle[-1]._process if grammars else None
            with monkeypatch.context() as patch:  # it starts, and then gets nothing of the machine
                if grammars and process:
                    os.kill(process.pid, signal.SIGSTOP)
                    patch.setattr(grammars, "_timeout_s", 0.02)
                    status, answer, headers = served.call(CHAT, ask | fields)
                    assert (status, answer["error"]["code"]) == (503, "no_process"), answer
                    assert int(headers["retry-after"]) > 0
            status, _, headers = served.call(CHAT, ask | fields)
            assert status == 200
            assert "x-ridgeline-ignored" not in headers
