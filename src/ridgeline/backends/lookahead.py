"""Running ahead: computing a sequence's next token before it is asked for.

A row's bits do not depend on the step that it is in, so a step that asks for exactly what was
computed gets it, and no answer changes. What was computed in vain is written over: its block
belonged to its sequence, and the next to have the block writes to it before it reads.
"""

from __future__ import annotations

from ridgeline.core.step import Work


def next_item(
    item: Work, tokens: tuple[int, ...], block_size: int, max_model_len: int
) -> Work | None:
    """Return the item of what is drawn behind an item, ``tokens``.

    None if the block for it is not there, or if it would be the last token that there is room for.
    """
    start = item.start + len(item.tokens)
    if start + 1 >= max_model_len:
        return None
    if start // block_size >= min(map(len, (item.table, *item.others))):
        return None
    return item._replace(start=start, tokens=tokens)


def is_where(item: Work, mine: Work, block_size: int) -> bool:
    """Return whether an item's keys and values are written where those of ``mine`` were."""
    block = item.start // block_size
    tables = zip((item.table, *item.others), (mine.table, *mine.others), strict=True)
    return item.start == mine.start and all(theirs[block] == ours[block] for theirs, ours in tables)
