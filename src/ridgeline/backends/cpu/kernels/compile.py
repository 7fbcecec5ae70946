"""Compile all kernels of a model's shape into one object file, once, and load it.

The object is kept on disk under a key of everything it depends on: the source of these modules, the
versions of LLVM and llvmlite, the processor's name and features, and the shape. A cache directory
that cannot be written costs a compilation each time, nothing else; files appear by renaming, so two
processes may compile at once.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

from ridgeline.backends.cpu.kernels.argmax import emit_head
from ridgeline.backends.cpu.kernels.attention import emit_attention
from ridgeline.backends.cpu.kernels.draw import emit_draw
from ridgeline.backends.cpu.kernels.experts import emit_experts
from ridgeline.backends.cpu.kernels.gemm import emit_linear
from ridgeline.backends.cpu.kernels.inputs import emit_inputs
from ridgeline.backends.cpu.kernels.isa import Processor, arm_features, describe, emit_half_floats
from ridgeline.backends.cpu.kernels.lora import emit_lora
from ridgeline.backends.cpu.kernels.recurrent import emit_recurrent
from ridgeline.backends.cpu.kernels.rows import emit_rows
from ridgeline.backends.cpu.kernels.step import emit_step
from ridgeline.backends.cpu.kernels.threads import emit_threads
from ridgeline.backends.cpu.layout.shapes import KernelConfig
from ridgeline.system.machine import give_back, memory_in_use, tiles_refusal, write_whole

_DIGEST_BYTES = 32
_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}  # of the system call, on Linux


@dataclass(frozen=True, slots=True)
class Target:
    """A processor to compile for: LLVM's triple, name and features of it."""

    triple: str
    cpu: str
    features: Mapping[str, bool]

    @property
    def processor(self) -> Processor:
        """What kernels ask of it."""
        return describe(self.features)

    @property
    def machine(self) -> llvm.TargetMachine:
        """LLVM's code generator."""
        flags = ",".join(f"{'+' if on else '-'}{name}" for name, on in self.features.items())
        target = llvm.Target.from_triple(self.triple)
        return target.create_target_machine(cpu=self.cpu, features=flags, opt=3, jit=True)


def host_target() -> Target:
    """Return the processor that this process runs on, with what the system lets it use."""
    _initialise()
    features = dict(llvm.get_host_cpu_features())
    if platform.machine() == "aarch64" and platform.system() == "Linux":
        features |= arm_features(Path("/proc/cpuinfo").read_text())
    if features.get("amx-tile") and tiles_refusal():
        features |= {name: False for name in features if name.startswith("amx")}
    return Target(llvm.get_process_triple(), llvm.get_host_cpu_name(), features)


class Kernels:
    """Compiled code, loaded: functions by name. Keeps the memory that holds it.

    Attributes:
        grown_bytes: by how much the process grew by loading (and compiling) it.
    """

    def __init__(self, code: bytes, target: Target) -> None:
        """Load an object file."""
        self.grown_bytes = 0
        empty = llvm.parse_assembly("")
        empty.triple = target.triple
        self._engine = llvm.create_mcjit_compiler(empty, target.machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def function(self, name: str, num_args: int) -> Callable[..., None]:
        """Return a function of 64-bit integers; calling it releases the GIL."""
        prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * num_args)
        return prototype(self._engine.get_function_address(name))


def load_kernels(
    sizes: KernelConfig,
    kinds: Sequence[str],
    eps: float,
    cache: Path,
    announce: Callable[[], None] = lambda: None,
) -> Kernels:
    """Return the kernels for a model on this machine, from ``cache`` if they are there.

    ``announce`` is called before a compilation, which takes some seconds.
    """
    before = memory_in_use()
    target = host_target()
    path = cache / f"{_key(sizes, kinds, eps, target)}.o"
    code = _read_cached(path)
    if code is None:
        announce()
        code = compile_object(assembly(sizes, kinds, eps, target), target)
        with suppress(OSError):  # a directory that cannot be written is only slower
            write_whole(path, lambda file: file.write(hashlib.sha256(code).digest() + code))
        gc.collect()  # the IR, whose parts know each other
        give_back()
    kernels = Kernels(code, target)
    kernels.grown_bytes = max(0, memory_in_use() - before)
    return kernels


def assembly(sizes: KernelConfig, kinds: Sequence[str], eps: float, target: Target) -> str:
    """Return the LLVM IR of all kernels and of the step that calls them."""
    module = ir.Module("ridgeline")
    module.triple = target.triple
    is_x86 = "x86" in target.triple.split("-")[0]
    futex = _FUTEX_NUMBERS.get(platform.machine()) if platform.system() == "Linux" else None
    if is_x86 and not target.features.get("f16c"):
        emit_half_floats(module)
    emit_linear(module, target.processor, kinds)
    emit_rows(module, sizes, eps, [sizes.activations])
    for number, heads in enumerate(sizes.all_heads):
        emit_attention(module, target.processor.dot, heads, number)
    emit_head(module, sizes.logit_softcap)
    emit_draw(module, sizes.vocab_size)
    emit_experts(module, sizes.all_ffns)
    if sizes.inputs:
        emit_inputs(module, sizes, sizes.inputs, eps)
    if sizes.recurrence:
        emit_recurrent(module, sizes.recurrence, eps)
    if sizes.max_lora_rank:
        emit_lora(module, sizes.adapter_bytes)
    emit_step(module, sizes, kinds)
    emit_threads(module, is_x86, futex)
    return str(module)


def compile_object(source: str, target: Target) -> bytes:
    """Return the object file for some IR, optimised as written: no fast-math, no reassociation."""
    _initialise()
    machine = target.machine
    module = llvm.parse_assembly(source)
    module.verify()
    options = llvm.PipelineTuningOptions(speed_level=3)
    options.loop_unrolling = False  # kernels are unrolled as far as registers go
    options.slp_vectorization = False
    options.loop_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    code: bytes = machine.emit_object(module)
    return code


def _initialise() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def kernel_sources() -> list[Path]:
    """Return the files that say what kernels compute, those of a model's facts among them."""
    backend = Path(__file__).parents[1]
    folders = (backend / "kernels", backend / "layout", backend.parents[1] / "model" / "shape")
    files = [file for folder in folders for file in sorted(folder.glob("*.py"))]
    return [*files, backend.parent / "arrays.py", backend.parent / "sampler" / "rule.py"]


def _key(sizes: KernelConfig, kinds: Sequence[str], eps: float, target: Target) -> str:
    digest = hashlib.sha256()
    for source in kernel_sources():
        digest.update(source.read_bytes())
    flags = sorted(name for name, on in target.features.items() if on)
    versions = (llvmlite.__version__, llvm.llvm_version_info)
    facts = (sizes, tuple(kinds), eps, target.triple, target.cpu, flags, versions)
    digest.update(repr(facts).encode())
    return digest.hexdigest()[:32]


def _read_cached(path: Path) -> bytes | None:
    """Return the object file that is kept at ``path``, behind its digest, if it is undamaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    code = content[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == content[:_DIGEST_BYTES] else None
