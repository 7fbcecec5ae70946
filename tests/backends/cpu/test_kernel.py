"""Kernels are called by keyword: what is swapped is right, what does not fit is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from llvmlite import ir

from ridgeline.backends.cpu.kernels.clock import TimedFunction
from ridgeline.backends.cpu.kernels.ir import I64, Function
from ridgeline.backends.cpu.kernels.kernel import Kernel, Words
from tests.backends.cpu.machine import at, build

LESS = Kernel("less", ("a", "b", "out"))
CALLER = Kernel("caller", ("a", "b", "out"))


def emit_less(module: ir.Module) -> None:
    """``less``: store a - b."""
    fn = LESS.begin(module)
    a, b, out = fn.args
    fn.store(a - b, out, 8)
    fn.finish()


@pytest.mark.parametrize("is_declared_first", [False, True])
def test_arguments_go_where_their_names_say(is_declared_first: bool) -> None:
    """In whatever order they are written, and whether the kernel is emitted before or after."""

    def emit(module: ir.Module) -> None:
        if not is_declared_first:
            emit_less(module)
        fn = CALLER.begin(module)
        a, b, out = fn.args
        LESS.call(fn, out=out, b=b, a=a)
        LESS.call(fn, a=7, b=fn.var(b), out=out + 8)
        fn.finish()
        if is_declared_first:
            emit_less(module)

    out = at(np.zeros(2, np.int64))
    build(emit).run("caller", 50, 8, out)
    assert out.tolist() == [42, -1]


def caller() -> Function:
    return CALLER.begin(ir.Module("test"))


@pytest.mark.parametrize("missing", LESS.parameters)
def test_a_missing_argument_is_refused_by_name(missing: str) -> None:
    fn = caller()
    given = dict(zip(CALLER.parameters, fn.args, strict=True))
    del given[missing]
    with pytest.raises(TypeError, match=f"^kernel less is called without {missing}$"):
        LESS.call(fn, **given)


def test_an_unknown_argument_is_refused_by_name() -> None:
    """Also if another is missing: a misspelt name is the likelier mistake."""
    fn = caller()
    a, b, out = fn.args
    with pytest.raises(TypeError, match="kernel less has no parameter c; it has: a, b, out"):
        LESS.call(fn, a=a, c=b, out=out)
    with pytest.raises(TypeError, match="kernel less has no parameter size"):
        LESS.call(fn, a=a, b=b, out=out, size=1)
    assert "call void" not in str(fn.raw)  # nothing was emitted


def test_a_doubled_argument_is_refused_by_name() -> None:
    fn = caller()
    given = dict(zip(CALLER.parameters, fn.args, strict=True))
    with pytest.raises(TypeError, match="multiple values for keyword argument 'a'"):
        LESS.call(fn, a=1, **given)
    with pytest.raises(TypeError, match="positional argument"):
        LESS.call(fn, *fn.args)  # type: ignore[misc]


def test_a_doubled_parameter_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="kernel move declares at 2 times"):
        Kernel("move", ("at", "size", "at"))


def test_a_profiled_caller_counts_by_the_kernels_names() -> None:
    """Of the kernels called here one is a row operation and one is of no kind."""
    counted = {}
    for name in ("norm", "less"):
        fn = Kernel("part", ("args", "thread")).begin(ir.Module("test"), TimedFunction)
        before = str(fn.raw).count("readsteadycounter")
        Kernel(name, ("x",)).call(fn, x=0)
        counted[name] = str(fn.raw).count("readsteadycounter") - before
    assert counted == {"norm": 2, "less": 0}


def test_words_are_found_by_name() -> None:
    def emit(module: ir.Module) -> None:
        fn = Function(module, "read", 2)
        words = Words(fn, fn.args[0], ("first", "second"))
        out = fn.args[1]
        fn.store(words["second"], out, 8)
        fn.store(words.double("first").signed(I64), out + 8, 8)
        fn.store(words.address("second") - fn.args[0], out + 16, 8)
        fn.finish()

    table = at(np.array([np.float64(2.5).view(np.int64), 9]))
    out = at(np.zeros(3, np.int64))
    build(emit).run("read", table, out)
    assert out.tolist() == [9, 2, 8]
