"""Programs that nobody here wrote, against a real server: ``python -m tests.clients [NAME ...]``.

Each client has an environment of its own, which uv makes, with the versions below. Its checks are
``check_NAME.py``, or ``check_NAME.mjs`` for Node. Status 1 if any check fails.
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

HERE = Path(__file__).parent
PYTEST = "pytest==9.0.1"
MODEL = "smollm2"
PACKAGES = {  # what each client's environment has
    "openai": ["openai==3.54.0"],
    "anthropic": ["anthropic==2.12.0"],
    "ollama": ["ollama==0.6.3"],
    "litellm": ["litellm==1.106.2", "mcp"],
    "langchain": ["langchain-openai==1.7.3"],
    "llama_index": [
        "llama-index-llms-openai-like==0.8.1",
        "llama-index-embeddings-openai-like==0.4.0",
    ],
    "instructor": ["instructor==1.17.0", "openai"],
    "pydantic_ai": ["pydantic-ai-slim[openai]==2.68.0"],
    "openai_agents": ["openai-agents==0.24.0"],
    "llm": ["llm==0.36"],
    "shell_gpt": ["shell-gpt==1.5.1", "click"],
    "aider": ["aider-chat==0.86.2"],
    "lm_eval": ["lm-eval[api]==0.4.13", "transformers"],
    "guidellm": ["guidellm==0.8.1"],
}
NODE = ["openai@latest", "ai@latest", "@ai-sdk/openai-compatible@latest", "zod@latest"]


@contextmanager
def serving() -> Iterator[str]:
    """Run a server for as long as the block lasts; yield its address."""
    command = [sys.executable, "-m", "ridgeline", "serve", MODEL, "--port", "0", "--seed", "1"]
    command += ["--cors-origin", "*"]  # a page of check_node.mjs calls it
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
        "RIDGELINE_MODEL": MODEL,
        "RIDGELINE_USER_HOME": str(Path.home()),
        "RIDGELINE": str(Path(sys.executable).with_name("ridgeline")),
    }
    with tempfile.TemporaryDirectory() as folder:
        if name == "node":
            for command in (
                ["npm", "install", "--silent", "--no-fund", *NODE],
                ["node", "check.mjs"],
            ):
                shutil.copy(HERE / "check_node.mjs", Path(folder) / "check.mjs")
                done = subprocess.run(command, cwd=folder, env=environment, check=False)
                if done.returncode:
                    return done.returncode
            return 0
        packages = [word for one in (PYTEST, *PACKAGES[name]) for word in ("--with", one)]
        return subprocess.run(
            [os.environ.get("UV", "uv"), "run", "--quiet", "--no-project", "--isolated", *packages,
             "python", "-m", "pytest", "-q", "--tb=short", "-W", "ignore", "-p", "no:cacheprovider",
             "-c", HERE / "pytest.ini", "--rootdir", folder, HERE / f"check_{name}.py"],
            cwd=folder, env=environment | {"HOME": folder}, check=False,
        ).returncode  # fmt: skip


def main(names: list[str]) -> int:
    """Run the checks of all clients, or of those that are named."""
    known = [*PACKAGES, *(["node"] if shutil.which("npm") else [])]
    results = {}
    with serving() as url:
        for name in names or known:
            print(f"==> {name}", flush=True)
            begin_s = time.monotonic()
            results[name] = checks_of(name, url), time.monotonic() - begin_s
    for name, (status, took_s) in results.items():
        print(f"{'ok' if status == 0 else 'FAILED':8}{name:16}{took_s:6.1f} s")
    if "node" not in known:
        print("skipped node: npm is not here")
    return int(any(status for status, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
