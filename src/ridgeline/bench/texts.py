"""What quality is measured on: prose, code, other scripts, and text that repeats itself.

Nothing is fetched: prose and code come with every CPython, the rest is beside this file. It knows
nothing of models and tokenizers.
"""

from __future__ import annotations

import inspect
import json.decoder
import textwrap
from collections.abc import Mapping
from pathlib import Path

# Pages of the manual that every CPython has within it, about 190,000 characters that do not
# repeat each other. Their wording differs a little from one Python version to the next.
TOPICS = ("objects", "types", "execmodel", "import", "compound", "specialnames", "debugger")


def texts() -> Mapping[str, str]:
    """Return a text of each kind by its name; ValueError where Python comes without its manual."""
    prose = manual()
    code = inspect.getsource(textwrap) + inspect.getsource(json.decoder)
    begin = prose.index("\n\n")
    return {
        "prose": prose,
        "code": code,
        "scripts": Path(__file__).with_name("other_scripts.txt").read_text(encoding="utf-8"),
        "repeats": prose[begin : begin + 700] * 12,
    }


def manual() -> str:
    """Return pages of Python's manual, nothing stripped; ValueError where it is not there."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError("this Python is installed without its manual: give --text FILE") from error
    return "".join(topics[name] for name in TOPICS)
