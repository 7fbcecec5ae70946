"""Which models can judge: guards of a known family, and encoders for topics."""

from __future__ import annotations

from pathlib import Path

from ridgeline.engine.text_processor import TextProcessor
from ridgeline.serve.engine.interface import EngineClient
from ridgeline.serve.http.turns import Turns
from ridgeline.trust.guards.families import FAMILIES, family_of
from ridgeline.trust.guards.guard import Guard
from ridgeline.trust.guards.topics import TopicEncoder

Judge = Guard | TopicEncoder
_WILDGUARD = Path(__file__).with_name("wildguard.jinja")


def judge_of(name: str, text: TextProcessor, engine: EngineClient, turns: Turns) -> Judge | None:
    """Return a model as what judges, None if it is none. Raises ValueError as ``Guard`` does."""
    if family := family_of(text.chat_template.source):
        return Guard(name, text, engine, turns, family)
    is_encoder = not text.has_head and not text.has_scores
    return TopicEncoder(name, text, engine, turns) if is_encoder else None


def known_judge(name: str, text: TextProcessor, engine: EngineClient, turns: Turns) -> Judge:
    """Return a model as what it must be. Raises ValueError if it cannot judge.

    WildGuard is known by its name, as its files have no template; the prompts are then ours.
    """
    if "wildguard" in name.lower() and family_of(text.chat_template.source) is None:
        text.use_chat_template(_WILDGUARD)
    judge = judge_of(name, text, engine, turns)
    if judge is None:
        known = ", ".join(family.name for family in FAMILIES)
        raise ValueError(
            f"--guard {name} is neither an encoder nor a known guard model, by its chat template: "
            f"use one of {known}"
        )
    return judge
