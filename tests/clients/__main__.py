"""Programs that nobody here wrote, against a real server: ``python -m tests.clients [NAME ...]``.

Each client has an environment of its own, which uv makes, with the versions below. Its checks are
``check_NAME.py``, or ``check_NAME.mjs`` for Node. Status 1 if any check fails. What cannot be run
on this machine is skipped, with the reason; docs/clients.md says what each of them covers. The
name ``python`` stands for all of ``PYTHON``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peers.engines import PEERS, LeftOut, install

from tests.clients import agents

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTEST = "pytest==9.0.1"
MODEL = "smollm2"
MODELS = {"agents": agents.MODEL}  # where it is another one
VLLM = next(peer for peer in PEERS if peer.name == "vllm")
PYTHON = {  # frameworks over the clients below, together as CLIENT=python
    "outlines": ["outlines==1.3.3", "openai==3.57.0", "ollama==0.6.3"],
    "guidance": ["guidance==0.3.1", "openai==3.57.0"],
    "langgraph": ["langgraph==1.2.24", "langchain-openai==1.7.4"],
    "smolagents": ["smolagents[openai]==1.26.0"],
    "magentic": ["magentic==0.41.1"],
    "haystack": ["haystack-ai==3.4.1"],
    "dspy": ["dspy==3.4.1"],
    "agno": ["agno==3.1.10", "openai==3.57.0", "ollama==0.6.3", "anthropic==2.14.0"],
    "autogen": ["autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"],
    "semantic_kernel": ["semantic-kernel==1.45.0"],
    "gradio": ["gradio==6.31.0", "openai==3.57.0"],
    "crewai": ["crewai==1.15.30"],
    "mem0": ["mem0ai==2.2.1"],
}
PACKAGES = {  # what each client's environment has
    "openai": ["openai==3.54.0"],
    "anthropic": ["anthropic==2.12.0"],
    "ollama": ["ollama==0.6.3"],
    "litellm": ["litellm==1.106.2", "mcp==2.3.0"],
    "litellm_proxy": ["litellm[proxy]==1.108.7"],
    "home_assistant": ["ollama==0.5.1", "openai==2.15.0"],
    "open_webui": ["open-webui==0.12.4"],
    "langchain": ["langchain-openai==1.7.3"],
    "llama_index": [
        "llama-index-llms-openai-like==0.8.1",
        "llama-index-embeddings-openai-like==0.4.0",
    ],
    "instructor": ["instructor==1.17.0", "openai==3.3.0"],
    "pydantic_ai": ["pydantic-ai-slim[openai]==2.68.0"],
    "openai_agents": ["openai-agents==0.24.0"],
    "llm": ["llm==0.36"],
    "shell_gpt": ["shell-gpt==1.5.1", "click==8.5.1"],
    "aider": ["aider-chat==0.86.2"],
    "lm_eval": ["lm-eval[api]==0.4.13", "transformers==5.24.0"],
    "guidellm": ["guidellm==0.8.1"],
    "aiperf": ["aiperf==0.13.0"],
    "opentelemetry": [
        "opentelemetry-distro==0.66b2",
        "opentelemetry-exporter-otlp-proto-http==1.45.2",
        "opentelemetry-instrumentation-fastapi==0.66b2",
        str(ROOT),
    ],
    "triton": ["tritonclient[grpc,http]==2.73.0", f"{ROOT}[grpc]"],
    "vllm_examples": [str(ROOT)],
    **PYTHON,
    "agents": [],  # npm has them; each is skipped alone if it cannot be installed
    "vllm": [],  # its environment is that of the peers: pip knows where its torch is
    "prometheus": [],
}
LARGE = {"open_webui"}  # 7 GB: only if it is named
PROGRAMS = {"agents": "npm", "node": "npm", "prometheus": "promtool"}  # what must be here already
NODE = [  # what check_node.mjs and check_node_sdks.mjs have
    *("openai@7.57.0", "ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7"),
    *("@ai-sdk/openai@3.0.141", "@ai-sdk/anthropic@3.0.140", "ollama-ai-provider-v2@3.6.0"),
    *("ollama@0.6.4", "@anthropic-ai/sdk@1.14.0"),
    *("@langchain/openai@1.5.8", "@langchain/core@1.4.0"),
]


@contextmanager
def serving(model: str) -> Iterator[str]:
    """Run a server for as long as the block lasts; yield its address."""
    command = [sys.executable, "-m", "ridgeline", "serve", model, "--port", "0", "--seed", "1"]
    command += ["--cors-origin", "*"]  # a page of check_node.mjs calls it
    command += ["--any-model-name"] if model == agents.MODEL else []  # Claude Code has its own
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"ready at (http://\S+)", server.stdout.readline())
            assert found, "the server did not start"
            yield found[1]
        finally:
            server.terminate()


def checks_of(name: str, url: str) -> int:
    """Run the checks of a client; return 0 if all pass."""
    environment = os.environ | {
        "RIDGELINE_URL": url,
        "RIDGELINE_MODEL": MODELS.get(name, MODEL),
        "RIDGELINE_AGENTS": str(ROOT / ".venv-clients" / "agents"),
        "RIDGELINE_USER_HOME": str(Path.home()),
        "RIDGELINE": str(Path(sys.executable).with_name("ridgeline")),
        "RIDGELINE_VLLM": str(VLLM.python.with_name("vllm")),
    }
    with tempfile.TemporaryDirectory() as folder:
        if name == "node":
            checks = [HERE / "check_node.mjs", HERE / "check_node_sdks.mjs"]
            for check in checks:
                shutil.copy(check, folder)
            for command in (  # one of the providers names an older ai, and works with this one
                ["npm", "install", "--silent", "--no-fund", "--legacy-peer-deps", *NODE],
                ["node", "--test", *(check.name for check in checks)],
            ):
                done = subprocess.run(command, cwd=folder, env=environment, check=False)
                if done.returncode:
                    return done.returncode
            return 0
        packages = [word for one in (PYTEST, *PACKAGES[name]) for word in ("--with", one)]
        return subprocess.run(
            [os.environ.get("UV", "uv"), "run", "--quiet", "--no-project", "--isolated", *packages,
             "python", "-m", "pytest", "-q", "--tb=short", "-W", "ignore", "-p", "no:cacheprovider",
             "-rs", "-c", HERE / "pytest.ini", "--rootdir", folder, HERE / f"check_{name}.py"],
            cwd=folder, env=environment | {"HOME": folder}, check=False,
        ).returncode  # fmt: skip


def missing(name: str) -> str:
    """Return why a client cannot be run here, "" if it can."""
    if not shutil.which(program := PROGRAMS.get(name, sys.executable)):
        return f"{program} is not here"
    if name == "vllm":
        try:
            install(VLLM)
        except LeftOut as error:
            return str(error)
    return ""


def main(names: list[str]) -> int:
    """Run the checks of all clients, or of those that are named."""
    results, skipped, known = {}, {}, [*PACKAGES, "node"]
    if names == ["python"]:
        names = [*PYTHON]
    if unknown := [name for name in names if name not in known]:
        print(f"there are no checks of {unknown[0]}: the clients are python, {', '.join(known)}")
        return 2
    for name in names or [one for one in known if one not in LARGE]:
        print(f"==> {name}", flush=True)
        if reason := missing(name):
            skipped[name] = reason
            continue
        begin_s = time.monotonic()
        with serving(MODELS.get(name, MODEL)) as url:
            status = checks_of(name, url)
        results[name] = status, time.monotonic() - begin_s
    for name, (status, took_s) in results.items():
        print(f"{'ok' if status == 0 else 'FAILED':8}{name:16}{took_s:6.1f} s")
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}")
    return int(any(status for status, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
