"""Flags that comparisons of an engine with itself have in common."""

from __future__ import annotations

import argparse

from ridgeline.system.machine import usable_cpus


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add who takes part, on which model, how often, and on what kind of machine."""
    parser.add_argument("--without", action="append", default=[], metavar="PEER")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="smollm2", help="a short name or a .gguf file")
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--quick", action="store_true", help="few tokens: does everything run?")
    parser.add_argument("--anyway", action="store_true", help="measure on a busy machine too")
