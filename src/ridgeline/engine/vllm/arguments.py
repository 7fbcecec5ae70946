"""vLLM's command line for programs: a parser, and flags for the options of ``LLM``.

Apart from ``vllm.options``, which each engine reads: a start waits for no argparse.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_type_hints

from ridgeline.engine.setup.options import Options
from ridgeline.engine.vllm.options import vllm_options


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that takes ``--max_model_len`` for ``--max-model-len``."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse with dashes in the names of flags."""
        if args is None:
            args = sys.argv[1:]
        return super().parse_known_args([_with_dashes(one) for one in args], namespace)


class EngineArgs:
    """The options of ``LLM`` as flags."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add ``--model`` and a flag for each option; of those, only what is given is set.

        ``LLM(**vars(parser.parse_args()))`` is how they are used.
        """
        parser.add_argument("--model", default="smollm2")
        hints = get_type_hints(Options)
        for field in fields(Options):
            _add(parser, field.name, hints[field.name], field.metadata["help"])
        for name in vllm_options():
            _add(parser, name, None, argparse.SUPPRESS)
        return parser


def _add(parser: argparse.ArgumentParser, name: str, kind: Any, help: str) -> None:
    more: dict[str, Any] = {}
    if kind is bool:
        more["action"] = argparse.BooleanOptionalAction
    elif kind in (int, int | None):
        more["type"] = int
    elif kind is None:
        more |= {"nargs": "?", "const": True}
    flag = f"--{name.replace('_', '-')}"
    parser.add_argument(flag, dest=name, default=argparse.SUPPRESS, help=help, **more)


def _with_dashes(word: str) -> str:
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else word
