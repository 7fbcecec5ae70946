"""Rules by a model that judges: what is asked of it, and what is done with its verdict."""

from __future__ import annotations

from typing import Literal, NamedTuple

JudgeAction = Literal["block", "note"]  # a verdict is on a whole text, so nothing can be replaced


class JudgeRule(NamedTuple):
    """What is done with texts that a model judges.

    Attributes:
        name: of the rule, for who counts.
        model: that judges.
        action: end the answer, or refuse the request; or only count it.
        at: from which score on, from 0 to 1.
        categories: of the model that count; none means all.
        every: after how many tokens of an answer it judges again.
        says: what an answer says that it ends.
        examples: of topics, for an encoder: the name of each, and its texts.
    """

    name: str
    model: str
    action: JudgeAction
    at: float
    categories: tuple[str, ...]
    every: int
    says: str
    examples: tuple[tuple[str, tuple[str, ...]], ...] = ()
