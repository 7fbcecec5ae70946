"""Processors to compile for, tiny modules of a few kernels, and a way to call them.

What this machine is, and every lesser one that it can pretend to be, runs here; ARM runs under
qemu-user where that and a cross compiler are installed (Debian: qemu-user gcc-aarch64-linux-gnu
libc6-dev-arm64-cross), and is skipped elsewhere.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir
from numpy.typing import NDArray

from ridgeline.backends.arrays import address, aligned
from ridgeline.backends.cpu.kernels.compile import Kernels, Target, host_target
from ridgeline.backends.cpu.kernels.isa import emit_half_floats
from tests.kept_kernels import compiled

Emit = Callable[[ir.Module], None]
Array = NDArray[Any]
HOST = host_target()
_COMPILER, _EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
MISSING = [tool for tool in (_COMPILER, _EMULATOR) if shutil.which(tool) is None]


def _targets() -> dict[str, Target]:
    """Return processors by name: this one, lesser ones of its kind, and three of ARM."""
    found = {"host": HOST}
    if HOST.triple.startswith("x86_64"):
        older = {"no-avx512": "avx512", "no-vnni": "avxvnni"}
        features, lacks = dict(HOST.features), []
        for name, prefix in older.items():
            lacks.append(prefix)
            features |= {flag: False for flag in features if flag.startswith(tuple(lacks))}
            found[name] = Target(HOST.triple, "haswell", dict(features))
        found["baseline"] = Target(HOST.triple, "x86-64", {})
        found = {
            name: target
            for name, target in found.items()
            if name in ("host", "baseline") or HOST.features["avx2"]
        }
    arm: dict[str, bool] = {"neon": True}
    for name, extra in (("arm", None), ("arm-dotprod", "dotprod"), ("arm-i8mm", "i8mm")):
        arm |= {extra: True} if extra else {}
        found[name] = Target("aarch64-unknown-linux-gnu", "generic", dict(arm))
    return found


TARGETS = _targets()
LOCAL = [name for name, target in TARGETS.items() if target.triple == HOST.triple]


class Machine:
    """Kernels on one of ``TARGETS``."""

    def __init__(self, emit: Emit, name: str) -> None:
        self.target = target = TARGETS[name]
        self.is_local = name in LOCAL
        if MISSING and not self.is_local:
            pytest.skip(f"ARM kernels need {' and '.join(MISSING)} to run here")
        module = _module(emit, target)
        initialize_all()
        code = compiled(str(module), target)
        if self.is_local:
            self._kernels = Kernels(code, target)
            return
        defined = [fn.name for fn in module.functions if not fn.is_declaration]
        folder = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, folder)
        self._program = _program(code, defined, folder)

    def run(self, name: str, *args: int | Array) -> None:
        """Call a kernel with numbers and arrays; of an array it gets the address."""
        if self.is_local:
            numbers = [arg if isinstance(arg, int) else address(arg) for arg in args]
            self._kernels.function(name, len(numbers))(*numbers)
            return
        arrays = [arg for arg in args if not isinstance(arg, int)]
        offsets, memory = _placed(arrays)
        places = iter(offsets)
        words = [f"n{arg}" if isinstance(arg, int) else f"p{next(places)}" for arg in args]
        command = [_EMULATOR, "-cpu", "max", self._program, name, *words]
        done = subprocess.run(command, input=memory, capture_output=True, check=True)
        for array, offset in zip(arrays, offsets, strict=False):
            if array.flags.writeable:
                part = np.frombuffer(done.stdout, np.uint8, array.nbytes, offset)
                array[...] = part.view(array.dtype).reshape(array.shape)


def _placed(arrays: list[Array]) -> tuple[list[int], bytearray]:
    """Return where each array lies in a copy of all of them; what overlaps does so there, too."""
    memory, offsets = bytearray(), dict[int, int]()
    low = high = at = 0  # of what overlaps, and where that begins in the copy
    for i in sorted(range(len(arrays)), key=lambda i: address(arrays[i])):
        begin, size = address(arrays[i]), arrays[i].nbytes
        if begin >= high:
            memory += bytes(-len(memory) % 64)
            low, high, at = begin, begin, len(memory)
        offsets[i] = at + begin - low
        memory[offsets[i] :] = bytes(max(high, begin + size) - begin)
        high = max(high, begin + size)
    for i, array in enumerate(arrays):
        memory[offsets[i] : offsets[i] + array.nbytes] = array.tobytes()
    return [offsets[i] for i in range(len(arrays))], memory


def source(emit: Emit, target: Target = HOST) -> str:
    """Return the IR of what ``emit`` puts into a module."""
    return str(_module(emit, target))


_RECORD = """
define void @"record"(ptr %line) {{
  %log = inttoptr i64 {log} to ptr
  %count = load i64, ptr %log
  %next = add i64 %count, 1
  store i64 %next, ptr %log
  %slot = getelementptr i64, ptr %log, i64 %next
  store ptr %line, ptr %slot
  ret void
}}
"""


def prefetched(emit: Emit, name: str, *words: int) -> list[int]:
    """Return the cache lines that a kernel prefetches on this machine, in order, by number."""
    log = at(np.zeros(1 << 16, np.int64))
    text = re.sub(r'declare void @"llvm.prefetch.*', _RECORD.format(log=address(log)), source(emit))
    text = re.sub(r'@"llvm.prefetch.p0"\((.*), i32 0, i32 ., i32 1\)', r'@"record"(\1)', text)
    kernels = Kernels(compiled(text, HOST), HOST)
    kernels.function(name, len(words))(*words)
    return [int(line) for line in log[1 : 1 + log[0]] // 64]


def _module(emit: Emit, target: Target) -> ir.Module:
    module = ir.Module("test")
    module.triple = target.triple
    if "x86" in target.triple and not target.features.get("f16c"):
        emit_half_floats(module)
    emit(module)
    return module


def build(emit: Emit, name: str = "host") -> Machine:
    """Compile and load what ``emit`` puts into a module."""
    return Machine(emit, name)


def initialize_all() -> None:
    """Let LLVM compile for ARM, wherever this is."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


_MAIN = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
%(declarations)s
int main(int count, char **words) {
    static char memory[1 << 26] __attribute__((aligned(4096)));
    long a[11] = {0};
    size_t size = fread(memory, 1, sizeof memory, stdin);
    for (int i = 2; i < count; i++)
        a[i - 2] = atol(words[i] + 1) + (words[i][0] == 'p' ? (long)memory : 0);
%(calls)s
    return fwrite(memory, 1, size, stdout) != size;
}
"""


def _program(code: bytes, names: list[str], folder: Path) -> Path:
    """Link an object with a main program: memory from stdin, one call, memory to stdout."""
    longs, values = ", ".join(["long"] * 11), ", ".join(f"a[{i}]" for i in range(11))
    declarations = "\n".join(f'void kernel_{name}({longs}) __asm__("{name}");' for name in names)
    calls = "\n".join(f'    if (!strcmp(words[1], "{n}")) kernel_{n}({values});' for n in names)
    (folder / "main.c").write_text(_MAIN % {"declarations": declarations, "calls": calls})
    (folder / "kernels.o").write_bytes(code)
    program = folder / "program"
    command = [_COMPILER, "-static", "-O1", "-o", program, folder / "main.c", folder / "kernels.o"]
    subprocess.run([*command, "-lm"], check=True)
    return program


def at(array: Array) -> Array:
    """Return a copy where kernels may expect it: at a multiple of 64 bytes."""
    out: Array = aligned(array.nbytes, np.uint8).view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def same_bits(a: Array, b: Array) -> bool:
    """Return whether two arrays agree in every bit, not only in value."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def halves(values: Array, join: Callable[[Any, Any], Any] = np.add) -> Array:
    """Join the last axis as ``Value.reduce`` does: halves, quarters, ..."""
    while values.shape[-1] > 1:
        middle = values.shape[-1] // 2
        values = join(values[..., :middle], values[..., middle:])
    result: Array = values[..., 0]
    return result
