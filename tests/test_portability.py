"""What needs no model must start on systems that Linux's own modules and functions are missing on.

No such system runs these tests. Their part is played by a process from which all of that is taken
away, after other people's packages are loaded: those have wheels of their own there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline import LLM, SamplingParams
from tests.engine.test_llm import model  # noqa: F401  (a fixture)

_PROGRAM = """
import importlib, json, mmap, os, pkgutil, platform, signal, socket, sys

system, machine, missing, commands = json.loads(sys.argv[1])
import ridgeline

names = [found.name for found in pkgutil.walk_packages(ridgeline.__path__, "ridgeline.")]
names = [name for name in names if not name.startswith("ridgeline.backends.cuda.")]  # need torch
for name in names:  # and with each all that it needs of others
    importlib.import_module(name)
for name in [name for name in sys.modules if name.partition(".")[0] == "ridgeline"]:
    del sys.modules[name]
for name in missing:
    module, _, attribute = name.partition(".")
    if attribute:
        vars(sys.modules[module]).pop(attribute, None)
    else:
        sys.modules[module] = None
sys.platform = system
platform.system = lambda: {"darwin": "Darwin", "win32": "Windows"}.get(system, "Linux")
platform.machine = lambda: machine
for name in names:
    importlib.import_module(name)

from ridgeline.cli.main import main

for words in commands:
    sys.argv = ["ridgeline", *words]
    try:
        main()
        status = 0
    except SystemExit as end:
        status = end.code or 0
    print(f"status {status} of {' '.join(words)}", flush=True)
"""

_MAC = [
    *("os.sched_getaffinity", "os.memfd_create", "os.posix_fadvise", "os.process_cpu_count"),
    *("mmap.MADV_HUGEPAGE", "mmap.MAP_POPULATE", "socket.SO_PEERCRED"),
]
_WINDOWS = [
    *_MAC,
    *("fcntl", "grp", "pty", "pwd", "readline", "resource", "termios", "tty"),
    *("os.fork", "os.geteuid", "os.getloadavg", "os.getuid", "os.killpg", "os.setsid"),
    *("os.sysconf", "os.uname", "signal.SIGHUP", "signal.SIGKILL", "signal.SIGUSR1"),
    *("mmap.MADV_WILLNEED", "mmap.MAP_ANONYMOUS", "mmap.MAP_PRIVATE", "mmap.PROT_READ"),
    *("socket.AF_UNIX", "socket.SO_REUSEPORT"),
]
SYSTEMS = {
    "macOS on ARM": ("darwin", "arm64", _MAC),
    "Windows": ("win32", "AMD64", _WINDOWS),
    "Linux on ARM": ("linux", "aarch64", []),
}


@pytest.mark.parametrize(
    "name",
    [name if name == "Windows" else pytest.param(name, marks=pytest.mark.full) for name in SYSTEMS],
)
def test_what_needs_no_model_starts(name: str, model: Path, tmp_path: Path) -> None:  # noqa: F811
    trace = tmp_path / "trace.jsonl"
    with LLM(model, kv_cache_memory="1MiB", threads=1, trace=trace) as llm:
        llm.generate([[40, 41, 42], [40, 41]], SamplingParams(max_tokens=8, ignore_eos=True))
    commands = [
        ["--help"],
        ["models"],
        ["config", "serve"],
        ["bench", "serve", "--help"],
        ["replay", str(trace)],
        ["plan", str(model)],
        ["doctor"],
    ]
    told = json.dumps([*SYSTEMS[name], commands])
    seen = subprocess.run(
        [sys.executable, "-c", _PROGRAM, told], capture_output=True, text=True, check=False
    )
    assert seen.returncode == 0, seen.stderr
    for words in commands:
        status = int(words == ["doctor"] and name == "Windows")  # whose memory nobody asks for
        assert f"status {status} of {' '.join(words)}" in seen.stdout, seen.stdout + seen.stderr
    assert ("models run on Linux only" in seen.stderr) == (name == "Windows")
