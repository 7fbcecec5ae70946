"""Where tests keep the kernels that they compile, which is what most of their time would go into.

A folder for each version of what emits kernels, beside those of the program: every worker and every
run finds what another has compiled, for names say all else that a kernel depends on.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

from ridgeline.backends.cpu.kernels.compile import (
    Target,
    _read_cached,
    compile_object,
    kernel_sources,
)
from ridgeline.engine.setup.home import default_home
from ridgeline.system.machine import write_whole

_WEEK_S = 7 * 86_400


def _folder() -> Path:
    """Return this version's folder; those that nobody has used for a week are removed."""
    version = hashlib.sha256(b"".join(source.read_bytes() for source in kernel_sources()))
    folder = default_home() / "kernels-of-tests" / version.hexdigest()[:16]
    with suppress(OSError):  # where nothing can be kept, all is compiled
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        for other in folder.parent.iterdir():
            if time.time() - other.stat().st_mtime > _WEEK_S:
                shutil.rmtree(other)
    return folder


KERNELS = _folder()


def compiled(source: str, target: Target) -> bytes:
    """Return the object file for some IR, which may be there from before."""
    flags = sorted(name for name, on in target.features.items() if on)
    facts = (target.triple, target.cpu, flags, llvmlite.__version__, llvm.llvm_version_info)
    name = hashlib.sha256(f"{facts} {source}".encode()).hexdigest()[:32]
    path = KERNELS / f"{name}.o"
    code = _read_cached(path)
    if code is None:
        code = compile_object(source, target)
        whole = hashlib.sha256(code).digest() + code
        with suppress(OSError):
            write_whole(path, lambda file: file.write(whole))
    return code
