"""Draw a mechanism, and print its numbers: ``python draw.py slots`` writes ``slots.svg``.

What can come from a real run does: from the recordings beside this file, or from the program's own
scheduler and cache under a virtual clock.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import mechanisms_of_devices
import mechanisms_of_layers
import mechanisms_of_runs

DRAWINGS: dict[str, Callable[[], tuple[list[str], str]]] = {
    "attention": mechanisms_of_layers.attention,
    "beam-tree": mechanisms_of_runs.beam_tree,
    "block-table": mechanisms_of_runs.block_table,
    "cache-grows": mechanisms_of_runs.cache_grows,
    "choices": mechanisms_of_devices.choices,
    "drafts-check": mechanisms_of_runs.drafts_check,
    "experts": mechanisms_of_layers.experts,
    "heads": mechanisms_of_layers.heads,
    "layer-ranks": mechanisms_of_devices.layer_ranks,
    "memory-blocks": mechanisms_of_runs.memory_blocks,
    "phases": mechanisms_of_devices.phases,
    "pipeline": mechanisms_of_devices.pipeline,
    "slots": mechanisms_of_runs.slots,
}


def main(name: str) -> None:
    """Draw one of them."""
    if name not in DRAWINGS:
        sys.exit(f"there is no drawing {name!r}: use one of {', '.join(DRAWINGS)}")
    lines, picture = DRAWINGS[name]()
    print("\n".join(lines))
    Path(f"{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
