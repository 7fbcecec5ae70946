"""Coding agents at their default settings: three turns, with a call of a tool and its result.

The programs are real, and so are the server and its model. The model is small: its answers are kept
short on the way, and where it calls no tool by itself, the first request of a second session asks
for the call (``tool_choice``). All else is the program's own.
"""

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from tests.clients.agents import AGENTS, MODEL, NODE, install, start
from tests.clients.recorder import recording

URL = os.environ["RIDGELINE_URL"]
PROGRAMS = Path(os.environ["RIDGELINE_AGENTS"])
SECRET = "heron"


@pytest.fixture
def home(tmp_path):
    """A home folder with a repository in it; what still runs there in the end is ended."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "word.txt").write_text(f"The secret word is {SECRET}.\n")
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*name, "commit", "-qm", "First"]):
        subprocess.run(["git", *words], cwd=work, check=True)
    yield tmp_path
    for told in Path("/proc").glob("[0-9]*/cmdline"):  # Cline leaves a daemon
        with suppress(OSError):
            if str(work).encode() in told.read_bytes():
                os.kill(int(told.parent.name), signal.SIGTERM)


@pytest.mark.parametrize("name", AGENTS)
def test_a_session_of_three_turns(name, home, capsys):
    agent = AGENTS[name]
    for package in (NODE, agent.package):
        if why_not := install(package, PROGRAMS):
            pytest.skip(why_not)
    by_itself = True
    question = f"Read the file word.txt with the tool {agent.tool}, once. Then say the secret word."
    with recording(URL) as recorder:
        begin_s = time.monotonic()
        done = start(agent, agent.first, question, recorder.url, home, PROGRAMS)
        check_answers(recorder, done)
        if not any(one.results for one in recorder.exchanges):
            by_itself, recorder.requires_call = False, True
            recorder.exchanges.clear()
            done = start(agent, agent.first, question, recorder.url, home, PROGRAMS)
            check_answers(recorder, done)
        took_s = time.monotonic() - begin_s
        assert any(one.results for one in recorder.exchanges), "no call was run"
        num_before, was_kept = len(recorder.exchanges), done.returncode == 0
        if agent.next:
            done = start(agent, agent.next, "Thank you. Say goodbye.", recorder.url, home, PROGRAMS)
            check_answers(recorder, done)
    asked = [one for one in recorder.exchanges if one.has_tools]
    last = [one for one in asked if not agent.next or one in recorder.exchanges[num_before:]]
    assert last[-1].results or not was_kept, "the session did not go on"
    assert max(one.num_cached for one in asked[1:]) > asked[0].num_prompt // 2
    with capsys.disabled():
        print(f"\n{name}: {asked[0].num_prompt} tokens at first; the model called a tool "
              f"{'by itself' if by_itself else 'when asked'}; the first question took "
              f"{took_s:.0f} s; of {last[-1].num_prompt} tokens of the last turn "
              f"{last[-1].num_cached} were known")  # fmt: skip


def check_answers(recorder, done):
    refused = [(one.path, one.status, one.answer[:300]) for one in recorder.exchanges
               if one.asked and one.status != 200]  # fmt: skip
    assert not refused
    # Programs end with 1 too where the model goes on to a call that nobody is there to allow.
    is_over = done.returncode == 0 or any(one.results for one in recorder.exchanges)
    assert is_over, done.stderr[-1000:]


def post(path, body):
    request = urllib.request.Request(
        URL + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return [json.loads(line.removeprefix("data: "))
                for line in answer.read().decode().splitlines()
                if line.removeprefix("data: ").startswith("{")]  # fmt: skip


TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "description": "The path of the file"}},
            "required": ["path"],
        },
    },
}
HISTORY = [
    {"role": "system", "content": "You are a coding agent. Use the tools."},
    {"role": "user", "content": [{"type": "text", "text": "Read the file word.txt."}]},
]
OPENAI = {
    "cline": {"temperature": 0, "stream_options": {"include_usage": True}},
    "zed": {"temperature": 0, "max_completion_tokens": 8192, "parallel_tool_calls": False,
            "stop": [], "prediction": None, "tool_choice": "auto"},
}  # fmt: skip


@pytest.mark.parametrize("name", OPENAI)
def test_the_shapes_of_cline_and_zed(name):
    messages = list(HISTORY)
    body = {"model": MODEL, "stream": True, "tools": [TOOL]} | OPENAI[name]
    first = post("/v1/chat/completions", body | {"messages": messages})
    deltas = [one["choices"][0]["delta"] for one in first if one["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "read_file"
    arguments = "".join(call["function"].get("arguments", "") for call in calls)
    assert json.loads(arguments)["path"].endswith("word.txt")
    call = calls[0] | {"function": {"name": "read_file", "arguments": arguments}}
    messages += [{"role": "assistant", "content": None, "tool_calls": [call]},
                 {"role": "tool", "tool_call_id": call["id"], "content": SECRET}]  # fmt: skip
    for question in ("", "Thank you."):
        messages += [{"role": "user", "content": question}] if question else []
        later = post("/v1/chat/completions", body | {"messages": messages})
        said = [one["choices"][0] for one in later if one["choices"]]
        assert said[-1]["finish_reason"] in ("stop", "tool_calls")
        content = "".join(one["delta"].get("content") or "" for one in said)
        messages.append({"role": "assistant", "content": content})


def test_the_shape_of_copilots_provider_for_ollama():
    with urllib.request.urlopen(URL + "/api/version") as answer:
        assert [int(part) for part in json.load(answer)["version"].split(".")] >= [0, 6, 4]
    [shown] = post("/api/show", {"model": MODEL})
    assert "tools" in shown["capabilities"]
    messages = [one | {"content": one["content"] if isinstance(one["content"], str) else
                       one["content"][0]["text"]} for one in HISTORY]  # fmt: skip
    body = {"model": MODEL, "stream": True, "tools": [TOOL], "options": {"temperature": 0.0}}
    first = post("/api/chat", body | {"messages": messages})
    [call] = [call for one in first for call in one["message"].get("tool_calls") or ()]
    assert call["function"]["name"] == "read_file"
    messages += [{"role": "assistant", "content": "", "tool_calls": [call]},
                 {"role": "tool", "tool_name": "read_file", "content": SECRET}]  # fmt: skip
    for question in ("", "Thank you."):
        messages += [{"role": "user", "content": question}] if question else []
        later = post("/api/chat", body | {"messages": messages})
        assert (later[-1]["done"], later[-1]["done_reason"]) == (True, "stop")
        content = "".join(one["message"]["content"] for one in later)
        messages.append({"role": "assistant", "content": content})


def test_programs_are_here():
    """What this file needs of the machine: else each program would be skipped in silence."""
    assert shutil.which("npm")
    assert shutil.which("git")
