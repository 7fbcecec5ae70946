"""Guard models that are known: what each writes as its verdict, and what its categories mean.

A guard is an ordinary model with a chat template of its own, so the template tells its family. All
that stands here is the form of the verdict. Sources are the model cards: Llama Guard 3 and
4 (Meta), ShieldGemma (Google), Granite Guardian 3.0 to 3.2 (IBM), Qwen3Guard-Gen (Alibaba) and
WildGuard (Ai2). The last has no template in its files: its card's prompt is in wildguard.jinja.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# OpenAI's categories, in its order.
OPENAI_CATEGORIES = (
    *("harassment", "harassment/threatening", "hate", "hate/threatening"),
    *("illicit", "illicit/violent", "self-harm", "self-harm/intent", "self-harm/instructions"),
    *("sexual", "sexual/minors", "violence", "violence/graphic"),
)


@dataclass(frozen=True)
class Category:
    """What a guard may find.

    Attributes:
        written: how the guard writes it, behind its verdict.
        openai: OpenAI's categories of the same meaning, none where it has no such.
        variables: of the chat template, where each category is a question of its own.
    """

    written: str = ""
    openai: tuple[str, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GuardFamily:
    """The form of a verdict.

    Attributes:
        name: of the family.
        marks: what stands in the template of each of its models.
        lead: what the guard writes before its verdict, unless the prompt ends with it.
        safe: words of a verdict that find nothing.
        unsafe: words of one that finds something.
        categories: by their own names.
        behind: what stands between lead and category, the word for an unsafe verdict included;
            empty where each category is a question of its own.
        reads_last: its template reads the last message alone, an answer with its question.
        has_lines: its verdict has a line for each category, the first of a question, the last of
            its answer.
    """

    name: str
    marks: tuple[str, ...]
    lead: str
    safe: tuple[str, ...]
    unsafe: tuple[str, ...]
    categories: Mapping[str, Category]
    behind: str = ""
    reads_last: bool = False
    has_lines: bool = False

    @property
    def asks_each(self) -> bool:
        """Whether each category is a question of its own."""
        return not self.behind


def _hazards() -> dict[str, Category]:
    """Return the MLCommons hazards, as Llama Guard numbers them."""
    meanings = {
        "violent crimes": ("violence", "illicit/violent"),
        "non-violent crimes": ("illicit",),
        "sex crimes": ("sexual",),
        "child exploitation": ("sexual/minors",),
        "defamation": ("harassment",),
        "specialized advice": (),
        "privacy": (),
        "intellectual property": (),
        "indiscriminate weapons": ("illicit/violent",),
        "hate": ("hate",),
        "self-harm": ("self-harm",),
        "sexual content": ("sexual",),
        "elections": (),
        "code interpreter abuse": (),
    }
    return {
        f"S{number} {name}": Category(str(number), openai)
        for number, (name, openai) in enumerate(meanings.items(), 1)
    }


def _guidelines() -> dict[str, Category]:
    """Return the policies that ShieldGemma was trained for, in words of our own."""
    texts = {
        "dangerous content": (
            ("illicit/violent", "self-harm"),
            "help anybody to harm themselves or others, such as by making weapons or explosives, "
            "promoting terrorism, or instructions for suicide",
        ),
        "harassment": (
            ("harassment",),
            "be malicious, intimidating, bullying or abusive to another person, such as by threats "
            "or by denying tragic events",
        ),
        "hate speech": (
            ("hate",),
            "express, promote or incite hatred of people for what they are, such as by "
            "dehumanising them or calling for violence against them",
        ),
        "sexually explicit information": (
            ("sexual",),
            "describe sexual acts, or be meant to arouse; medicine and education are allowed",
        ),
    }
    return {
        name: Category(
            openai=openai,
            variables={"guideline": f'"No {name.title()}": The text shall not {what}.'},
        )
        for name, (openai, what) in texts.items()
    }


def _risks() -> dict[str, Category]:
    """Return the risks that Granite Guardian's template defines."""
    meanings: dict[str, tuple[str, ...]] = {
        "harm": (),
        "social_bias": ("hate",),
        "jailbreak": (),
        "profanity": (),
        "sexual_content": ("sexual",),
        "unethical_behavior": ("illicit",),
        "violence": ("violence",),
    }
    return {
        name: Category(openai=openai, variables={"guardian_config": {"risk_name": name}})
        for name, openai in meanings.items()
    }


def _violations() -> dict[str, Category]:
    meanings = {
        "Violent": ("violence", "illicit/violent"),
        "Non-violent Illegal Acts": ("illicit",),
        "Sexual Content or Sexual Acts": ("sexual",),
        "PII": (),
        "Suicide & Self-Harm": ("self-harm",),
        "Unethical Acts": ("hate", "harassment"),
        "Politically Sensitive Topics": (),
        "Copyright Violation": (),
        "Jailbreak": (),
    }
    return {name: Category(f" {name}", openai) for name, openai in meanings.items()}


FAMILIES = (
    GuardFamily(
        "Llama Guard",
        ("UNSAFE CONTENT CATEGORIES", "assistant<|"),
        lead="\n\n",  # the template ends before it, and the model writes it
        safe=("safe",),
        unsafe=("unsafe",),
        categories=_hazards(),
        behind="unsafe\nS",
    ),
    GuardFamily(
        "ShieldGemma",
        ("guideline", "policy expert"),
        lead="",
        safe=("No",),
        unsafe=("Yes",),
        categories=_guidelines(),
        reads_last=True,
    ),
    GuardFamily(
        "Granite Guardian",
        ("guardian_config", "risk_name"),
        lead="",
        safe=("No",),
        unsafe=("Yes",),
        categories=_risks(),
        reads_last=True,
    ),
    GuardFamily(
        "Qwen3Guard",
        ("Safety:", "Controversial", "Categories:"),
        lead="Safety:",
        safe=(" Safe",),
        unsafe=(" Unsafe", " Controversial"),  # the card's strict reading
        categories=_violations(),
        behind=" Unsafe\nCategories:",
    ),
    GuardFamily(
        "WildGuard",
        ("Human user:", "whether the AI assistant's response is a refusal"),
        lead="Harmful request:",
        safe=(" no",),
        unsafe=(" yes",),
        categories={
            "harmful request": Category("Harmful request:"),
            "response refusal": Category("Response refusal:"),
            "harmful response": Category("Harmful response:"),
        },
        reads_last=True,
        has_lines=True,
    ),
)


def family_of(template: str) -> GuardFamily | None:
    """Return the family of a model with this chat template, None if it is no guard's.

    It has the categories that the template names, or all where it names none.
    """
    for family in FAMILIES:
        if all(mark in template for mark in family.marks):
            named = {
                name: one
                for name, one in family.categories.items()
                if re.search(rf"\b{_name_in_template(name)}\b", template)
            }
            return replace(family, categories=named or family.categories)
    return None


def _name_in_template(name: str) -> str:
    """Return what a template calls a category, as a pattern: hazards have numbers there."""
    number = re.match(r"S\d+", name)
    return number[0] if number else re.escape(name)
