"""Damaged files of every kind that is read are answered, or refused in one line: T35, T45 to T47.

Files are used in a process of their own with a limit on its memory: a crash or a hang names the
number of its file, and the next process goes on behind it.
``python -m tests.faults.files KIND SEED FIRST COUNT FOLDER`` is one.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import queue
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from random import Random
from typing import Any

from ridgeline.system import process
from tests.faults import warm
from tests.faults.kinds import FILES, KINDS, Use, load

_ROOT = Path(__file__).parents[2]
# One heap, not one for each thread: a load looks at all of them.
_ENVIRONMENT = os.environ | {"MALLOC_ARENA_MAX": "1"}
_MOST_S, _MOST_BYTES = 60, 4 << 30  # of one file, on a busy machine; and of addresses


def _outcome(use: Use, number: int) -> str:
    """Return what is wrong with how a file is answered; "" if nothing is."""
    said = io.StringIO()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(said):
            use(number)
        line = ""
    except (ValueError, OSError) as error:  # which the command line makes a line of
        line = str(error)
        if (
            isinstance(error, OSError)
            and not isinstance(error, ChildProcessError)
            and not error.filename
        ):
            return f"an error without the file's name: {error!r}"
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "/ridgeline/" in frame.filename] or frames
        place = f"{ours[-1].filename.split('/ridgeline/')[-1]}:{ours[-1].lineno}"
        return f"{error!r:.150} at {place}"
    if len(line) > 2100 or "\n" in line.strip():
        return f"{len(line)} letters, or several lines: {line[:100]!r}"
    return "a traceback is printed" if "Traceback" in said.getvalue() else ""


def _child(kind: str, seed: int, first: int, count: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    os.environ["RIDGELINE_HOME"], os.environ["COLUMNS"] = str(folder / "home"), "100"
    setattr(process, "_started", warm.forks())  # noqa: B010 (before the limit, and for mypy)
    use = KINDS[kind](folder, seed)
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    for number in range(first, first + count):
        print(f"{number} begins", flush=True)
        if problem := _outcome(use, number):
            print(f"{number} {problem}".encode("ascii", "backslashreplace").decode(), flush=True)


def damaged(kind: str, count: int, seed: int, folder: Path) -> dict[str, list[int]]:
    """Use files of a kind; return what went wrong, and with which numbers."""
    problems: dict[str, list[int]] = {}
    first = 0
    while first < count:
        place = folder / f"{kind}-{first}"
        place.mkdir()
        command = [sys.executable, "-m", "tests.faults.files", kind, str(seed), str(first)]
        command += [str(count - first), str(place)]
        words: list[str] = []
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        process = subprocess.Popen(
            command, stdout=-1, stderr=-1, text=True, errors="replace", cwd=_ROOT, env=_ENVIRONMENT
        )
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [
            threading.Thread(target=_read, args=(process.stdout, lines.put)),
            threading.Thread(target=_read, args=(process.stderr, words.append)),
        ]
        for reader in readers:
            reader.start()
        number = first
        while line := _next(lines):
            number = int(line.split()[0])
            if not line.endswith("begins\n"):
                problems.setdefault(line.partition(" ")[2].strip(), []).append(number)
        ended = "it hangs" if line is None else ""
        process.kill()
        status = process.wait()
        for reader, stream in zip(readers, (process.stdout, process.stderr), strict=True):
            reader.join()
            stream.close()
        if ended or status:
            ended = ended or f"the process ends with {status}: {''.join(words)[-300:]}"
            problems.setdefault(ended, []).append(number)
        first = number + 1 if ended else count
        shutil.rmtree(place, ignore_errors=True)
    return problems


def _next(lines: queue.SimpleQueue[str]) -> str | None:
    """Return the next line, None if none comes for too long, "" at the end.

    Time in which this process is stopped does not count: files are tried beside measurements.
    """
    for _ in range(_MOST_S):
        with suppress(queue.Empty):
            return lines.get(timeout=1.0)
    return None


def _read(stream: Any, take: Callable[[str], object]) -> None:
    for line in stream:
        take(line)
    take("")


def used(kinds: tuple[str, ...], count: int, rng: Random) -> str:
    """Use ``count`` files of each kind, two kinds at a time; return that all is as it should be."""
    seed = rng.randrange(1 << 30)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        all_problems = pool.map(lambda kind: damaged(kind, count, seed, Path(folder)), kinds)
        for kind, problems in zip(kinds, all_problems, strict=True):
            assert not problems, (kind, seed, problems)
    return f"{count} of each of {', '.join(kinds)}: each is answered, or refused in a line"


def t35(model: Path, count: int, rng: Random) -> str:
    """Directories that bring code, or lead out of themselves: nothing of it runs or is read."""
    with tempfile.TemporaryDirectory() as name:
        folder, canary = Path(name), Path(name) / "canary"
        outside = folder / "outside.json"
        outside.write_text((model / "config.json").read_text())
        code = f"open({str(canary)!r}, 'w').close()"

        class Pickled:
            def __reduce__(self) -> tuple[Any, ...]:
                return exec, (code,)

        def own_code(path: Path) -> None:
            config = json.loads((path / "config.json").read_text())
            config |= {"auto_map": {"AutoModelForCausalLM": "modeling_x.Model"}}
            (path / "config.json").write_text(json.dumps(config))
            for file in ("modeling_x.py", "conftest.py", "json.py", "tokenizers.py"):
                (path / file).write_text(code)

        def pickles(path: Path) -> None:
            (path / "model.safetensors").unlink()
            (path / "pytorch_model.bin").write_bytes(pickle.dumps(Pickled()))

        def index_outside(path: Path) -> None:
            (path / "model.safetensors").rename(folder / f"{path.name}.safetensors")
            names = (f"../{path.name}.safetensors", str(folder / f"{path.name}.safetensors"))
            index = {"weight_map": {"lm_head.weight": rng.choice(names)}}
            (path / "model.safetensors.index.json").write_text(json.dumps(index))

        def link_outside(path: Path) -> None:
            (path / "config.json").unlink()
            (path / "config.json").symlink_to(outside)

        def huge(path: Path) -> None:
            os.truncate(path / "tokenizer.json", 1 << 40)  # a file with a hole

        def no_file(path: Path) -> None:
            victim = path / rng.choice(("config.json", "tokenizer.json", "model.safetensors"))
            victim.unlink()
            rng.choice((os.mkfifo, os.mkdir))(victim)

        attacks = (own_code, pickles, index_outside, link_outside, huge, no_file)
        for i in range(count):
            path = shutil.copytree(model, folder / f"m{i}")
            attack = attacks[i % len(attacks)]
            attack(path)
            wrong = _outcome(lambda _, path=path: load(path), i)
            assert not wrong, (attack, wrong)
            assert not canary.exists(), attack
            shutil.rmtree(path)
    return f"{count} directories answer or are refused in a line; no code of theirs was run"


def t45(model: Path, count: int, rng: Random) -> str:
    return used(("gguf",), count, rng)


def t46(model: Path, count: int, rng: Random) -> str:
    return used((*FILES, "template", "adapter"), count, rng)


def t47(model: Path, count: int, rng: Random) -> str:
    return used(_KEPT, count, rng)


_KEPT = ("packed", "kernels", "kv_disk", "digest", "calibration", "trace", "stores")
DAMAGED = (t45, t46, t47)

if __name__ == "__main__":
    _child(sys.argv[1], *map(int, sys.argv[2:5]), Path(sys.argv[5]))
