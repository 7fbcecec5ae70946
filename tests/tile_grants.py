"""Processes that are refused the use of matrix tiles, in the ways that systems refuse it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

_BY_FILTER = """
import ctypes, struct
# A seccomp filter: arch_prctl (158) with ARCH_REQ_XCOMP_PERM (0x1023) answers EPERM.
words = (0x20, 0, 0, 0), (0x15, 0, 3, 158), (0x20, 0, 0, 16), (0x15, 0, 1, 0x1023)
words += (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *word) for word in words))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 6, ctypes.addressof(code)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
"""
_BY_STACK = """
import ctypes, struct
stack = ctypes.create_string_buffer(8192)
asked = struct.pack("PixxxxN", ctypes.addressof(stack), 0, 8192)
assert ctypes.CDLL(None).sigaltstack(asked, None) == 0
"""
REFUSALS = {  # how, and a word of what is said then
    "a filter of system calls": (_BY_FILTER, "sandbox"),
    "a small signal stack": (_BY_STACK, "signal stack"),
}


def output_of(body: str, *, before: str = "") -> str:
    """Return what a process of its own prints that runs ``body``, ``before`` anything else."""
    program = textwrap.dedent(before) + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
