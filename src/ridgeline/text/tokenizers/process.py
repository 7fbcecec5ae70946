"""The program that tokenises where nothing bounds it otherwise: ``text.bounded`` runs it.

A tokenizer.json is code from a model file: its normalizer may double a text forty times, a pattern
of its pre-tokenizer may take hours. Reads lines of JSON, writes one for each.
"""

from __future__ import annotations

import json
import os
from typing import Any

from ridgeline.text import limited
from ridgeline.text.tokenizers.library import first_line, ids_of, new_library

_MAX_BYTES, _MAX_TIMES = 1 << 30, 4  # of memory: the library, and for each byte of the tokenizer
_MAX_CPU_S = 6


def main() -> None:
    """Take a tokenizer's parts, say that they are there, and answer each text with its ids."""
    lines = limited.lines()
    line = next(lines)
    limited.begin(_MAX_BYTES + _MAX_TIMES * len(line))
    parts, library = json.loads(line), None
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where the library writes of its panics
    limited.answer({})
    for line in lines:
        limited.bound_cpu(_MAX_CPU_S)
        answer: dict[str, Any]
        try:
            library = library or new_library(*parts)
            parts = None
            answer = {"ids": ids_of(library, json.loads(line))}
        except Exception as error:
            answer = {"error": first_line(error)}
        limited.answer(answer)


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each thread's stack would count as memory
    main()
