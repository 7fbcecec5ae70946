"""The program that tokenises where nothing bounds it otherwise: ``tokenizers.cost_check`` runs it.

A tokenizer.json is code from a model file: its normalizer may double a text forty times, a pattern
of its pre-tokenizer may take hours. Reads lines of JSON, writes one for each.
"""

from __future__ import annotations

import json
import os
from typing import Any

from ridgeline.text import process_limits as limits
from ridgeline.text.tokenizers.library import first_line, ids_of, new_library

# Of memory, beyond what the process has before: what real ones take (docs/adr/0028), and a quarter.
_SPARE_BYTES = 64 << 20
_BUILDING_TIMES, _TEXT_TIMES = 24, 750  # for each byte of the tokenizer, and of a text
_MOST_TEXT_BYTES = 1 << 30
_MAX_BUILDING_CPU_S, _MAX_TEXT_CPU_S = 10.0, 6.0


def main() -> None:
    """Take a tokenizer's parts, say that they are there, and answer each text with its ids."""
    limits.begin()
    limits.bound_cpu(_MAX_BUILDING_CPU_S)
    lines = limits.lines()
    line = next(lines)
    limits.bound_growth(_SPARE_BYTES + _BUILDING_TIMES * len(line))
    parts, library = json.loads(line), None
    del line
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where the library writes of its panics
    limits.answer({})
    for line in lines:
        answer: dict[str, Any]
        try:
            if library is None:
                library = new_library(*parts)
                parts = None
            else:
                limits.bound_cpu(_MAX_TEXT_CPU_S)
            limits.bound_growth(min(_SPARE_BYTES + _TEXT_TIMES * len(line), _MOST_TEXT_BYTES))
            answer = {"ids": ids_of(library, json.loads(line))}
        except Exception as error:
            answer = {"error": first_line(error)}
        limits.answer(answer)


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each thread's stack would count as memory
    main()
