"""Coding agents from npm: which versions, how each is told of a server, and how it is started."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

NODE = "node@22.23.3"  # some of them want a newer one than the machine may have
MODEL = "qwen2.5-coder:0.5b"


class Agent(NamedTuple):
    """A program.

    Attributes:
        package: its name and version on npm.
        tool: that reads a file, or runs a command.
        first: arguments that ask something, without the question.
        next: arguments that go on with the last session; none if only a terminal can.
        files: below the home folder, by the server's address.
        variables: of its environment, by the server's address.
    """

    package: str
    tool: str
    first: list[str]
    next: list[str]
    files: Callable[[str], dict[str, str]] = lambda _url: {}
    variables: Callable[[str], dict[str, str]] = lambda _url: {}


def _codex(url: str) -> dict[str, str]:
    text = f'''model = "{MODEL}"
model_provider = "ridgeline"
[model_providers.ridgeline]
name = "Ridgeline"
base_url = "{url}/v1"
wire_api = "responses"
'''
    return {".codex/config.toml": text}


def _opencode(url: str) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Ridgeline",
        "options": {"baseURL": f"{url}/v1"},
        "models": {MODEL: {}},
    }
    return {".config/opencode/opencode.json": json.dumps({"provider": {"ridgeline": provider}})}


def _pi(url: str) -> dict[str, str]:
    provider = {
        "baseUrl": f"{url}/v1",
        "api": "openai-completions",
        "apiKey": "none",
        "models": [{"id": MODEL}],
    }
    return {".pi/agent/models.json": json.dumps({"providers": {"ridgeline": provider}})}


def _continue(url: str) -> dict[str, str]:
    text = f"""name: local
version: 1.0.0
schema: v1
models:
  - name: coder
    provider: openai
    model: {MODEL}
    apiBase: {url}/v1
    apiKey: none
    roles: [chat]
"""
    return {".continue/config.yaml": text}


def _cline(url: str) -> dict[str, str]:
    settings = {
        "provider": "openai-compatible",
        "apiKey": "none",
        "model": MODEL,
        "baseUrl": f"{url}/v1",
    }
    known = {"settings": settings, "updatedAt": "2026-11-30T00:00:00.000Z"}
    text = {"version": 1, "lastUsedProvider": "openai-compatible", "modes": {}}
    text["providers"] = {"openai-compatible": known | {"tokenSource": "manual"}}
    return {".cline/data/settings/providers.json": json.dumps(text)}


AGENTS = {
    "codex": Agent(
        "@openai/codex@0.171.0", "exec_command",
        ["codex", "exec"], ["codex", "exec", "resume", "--last"], files=_codex,
    ),
    "claude": Agent(
        "@anthropic-ai/claude-code@2.1.332", "Read", ["claude", "-p"], ["claude", "-c", "-p"],
        variables=lambda url: {
            "ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    "opencode": Agent(
        "opencode-ai@1.18.33", "read", ["opencode", "run", "-m", f"ridgeline/{MODEL}"],
        ["opencode", "run", "-c", "-m", f"ridgeline/{MODEL}"], files=_opencode,
    ),
    "qwen-code": Agent(
        "@qwen-code/qwen-code@0.24.4", "read_file",
        ["qwen", "--auth-type", "openai", "-p"], ["qwen", "--auth-type", "openai", "-c", "-p"],
        variables=lambda url: {
            "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL,
        },
    ),
    "pi": Agent(
        "@mariozechner/pi-coding-agent@0.73.1", "read",
        ["pi", "--provider", "ridgeline", "--model", MODEL, "-p"],
        ["pi", "--provider", "ridgeline", "--model", MODEL, "-c", "-p"], files=_pi,
        variables=lambda _url: {"PI_OFFLINE": "1"},
    ),
    "continue": Agent(
        "@continuedev/cli@1.5.47", "Read",
        ["cn", "--config", ".continue/config.yaml", "-p"],
        ["cn", "--config", ".continue/config.yaml", "--resume", "-p"], files=_continue,
    ),
    "cline": Agent("cline@3.0.65", "read_files", ["cline"], [], files=_cline),
}  # fmt: skip


def install(package: str, folder: Path) -> str:
    """Put a package below ``folder``, if it is not there; return why not, "" if it is there."""
    name, _, version = package.rpartition("@")
    found = folder / "node_modules" / name / "package.json"
    if found.exists() and json.loads(found.read_text())["version"] == version:
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["npm", "install", "--no-fund", "--no-audit", "--loglevel=error"]
    done = subprocess.run(
        [*command, "--prefix", folder, package], capture_output=True, text=True, check=False
    )
    lines = done.stderr.strip().splitlines() or ["npm failed"]
    return f"{package} cannot be installed: {lines[0]}" if done.returncode else ""


def start(
    agent: Agent, command: list[str], question: str, url: str, home: Path, programs: Path
) -> subprocess.CompletedProcess[str]:
    """Ask in the folder ``home/work``; return what the program did, within ten minutes."""
    for name, text in agent.files(url).items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    words = [str(home / word) if word.startswith(".continue") else word for word in command]
    environment = {
        "HOME": str(home),
        "PATH": f"{programs / 'node_modules' / '.bin'}:{os.environ['PATH']}",
        "TERM": "dumb",
        "NO_COLOR": "1",
    }
    return subprocess.run(
        [*words, question], cwd=home / "work", env=environment | agent.variables(url),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
