"""The file of ``--rules``, read and checked: what each key may ask, and which rules hold."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from ridgeline.trust.rules.kinds import KINDS
from ridgeline.trust.text_rules.answer import Action, TextRule, TextRules
from ridgeline.trust.text_rules.patterns import WORD, TextPattern

DEFAULT = "default"  # the section of keys without one of their own
FEATURES = ("chat", "completions", "stream", "tools", "logprobs", "embeddings", "moderations")
_ON_ERROR = ("refuse", "serve")
_LIMITS = ("requests_per_minute", "max_tokens", "tokens_per_day")
_OF_FILE = ("version", "on_error", "trace", "keys", "rules")
AUDITS = ("none", "hash", "text")  # what is kept of texts
_OF_KEY = ("inherits", "models", "features", "limits", "input", "output", "audit")
_OF_RULE = ("kinds", "patterns", "action", "says", "word", "most")
_OF_JUDGE = ("model", "action", "at", "categories", "every", "says", "examples")
_MOST_RULES = 10_000
_MOST_BYTES = 8 << 20
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


@dataclass(frozen=True)
class KeyRules:
    """What holds for a key.

    Attributes:
        section: of the file.
        models: names, perhaps with ``*``, of models and adapters; None allows all.
        features: what it may use; None allows all.
        limits: by name, those that are set.
        input: rules for what a model reads.
        output: rules for what it writes.
        audit: what the audit log keeps of texts, one of ``AUDITS``.
        input_judges: rules by models for what a model reads.
        output_judges: the same for what it writes.
    """

    section: str
    models: tuple[str, ...] | None
    features: frozenset[str] | None
    limits: Mapping[str, int]
    input: TextRules
    output: TextRules
    audit: str
    input_judges: tuple[JudgeRule, ...] = ()
    output_judges: tuple[JudgeRule, ...] = ()

    def may_use(self, model: str) -> bool:
        """Whether it may use a model or adapter of this name."""
        return self.models is None or any(fnmatchcase(model, one) for one in self.models)


@dataclass(frozen=True)
class RulesFile:
    """A whole file: its version and digest, and what holds for each section of keys."""

    version: str
    digest: bytes
    allows_trace: bool  # which has the tokens of answers, whatever the rules say
    keys: Mapping[str, KeyRules]

    @property
    def audited(self) -> str | None:
        """The name of a section whose texts the audit log keeps, if there is one."""
        sections = (name for name, key in self.keys.items() if key.audit != AUDITS[0])
        return next(sections, None)

    def of(self, label: str) -> KeyRules:
        """Return what holds for the key of a label."""
        return self.keys.get(label) or self.keys[DEFAULT]


def read_rules(file: Path, labels: Collection[str] | None = None) -> RulesFile:
    """Read a file. Raises OSError, or ValueError with the place and what to write there.

    ``labels`` are those of the server's keys, if they are known: other sections are errors.
    """
    data = file.read_bytes()
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{file.name} has {len(data)} bytes: at most {_MOST_BYTES}")
    try:
        document = tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.name} is not UTF-8 (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file.name} is not TOML: {error}") from None
    except RecursionError:
        raise ValueError(f"{file.name} is not TOML of any use: it is nested too deeply") from None
    try:
        return _FileReader(document, hashlib.blake2b(data).digest()).read(labels)
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from None


class _FileReader:
    """Turns the values of a file into rules; each method raises ValueError."""

    def __init__(self, document: dict[str, Any], digest: bytes) -> None:
        self._document, self._digest = document, digest

    def read(self, labels: Collection[str] | None) -> RulesFile:
        document = self._document
        _check_names(document, _OF_FILE, "the file")
        version = document.get("version")
        if not isinstance(version, str) or not 0 < len(version) <= 64:
            raise ValueError('write version = "..." at the top, up to 64 characters')
        self._serves = _one_of(document.get("on_error", "refuse"), _ON_ERROR, "on_error") == "serve"
        tables = _tables(document, "rules")
        self._judges = {
            name: _judge_of(name, one) for name, one in tables.items() if "model" in one
        }
        self._rules = {
            name: _rules_of(name, one) for name, one in tables.items() if name not in self._judges
        }
        if (num_rules := sum(map(len, self._rules.values()))) > _MOST_RULES:
            raise ValueError(f"[rules] has {num_rules} patterns: at most {_MOST_RULES} are allowed")
        self._compiled: dict[tuple[str, ...], TextRules] = {}
        sections = _tables(document, "keys")
        if DEFAULT not in sections:
            raise ValueError(f"write [keys.{DEFAULT}]: it holds for keys without a section")
        for name in sections:
            if labels is not None and name not in (DEFAULT, *labels):
                raise ValueError(f"[keys.{name}] belongs to no API key: {_nearest(name, labels)}")
        trace = document.get("trace", False)
        if type(trace) is not bool:
            raise ValueError(f"trace is {trace!r:.40}: write true or false")
        keys = {name: self._key(name, sections) for name in sections}
        return RulesFile(version, self._digest, trace, keys)

    def _key(self, name: str, sections: dict[str, Any]) -> KeyRules:
        section, where = self._inherited(name, sections), f"[keys.{name}]"
        limits = section.get("limits", {})
        if not isinstance(limits, dict):
            raise ValueError(f"{where} limits must be a table, as {{ max_tokens = 1024 }}")
        _check_names(limits, _LIMITS, f"{where} limits")
        for one, value in limits.items():
            if type(value) is not int or not 0 < value < 1 << 53:
                raise ValueError(f"{where} {one} is {value!r:.40}: write a number above 0")
        features = section.get("features")
        if features is not None:
            for one in _texts(features, f"{where} features"):
                _one_of(one, FEATURES, f"{where} features")
        models = section.get("models")
        return KeyRules(
            name,
            None if models is None else tuple(_texts(models, f"{where} models")),
            None if features is None else frozenset(features),
            limits,
            self._compile(section.get("input", []), f"{where} input"),
            self._compile(section.get("output", []), f"{where} output"),
            _one_of(section.get("audit", AUDITS[0]), AUDITS, f"{where} audit"),
            self._judging(section.get("input", [])),
            self._judging(section.get("output", [])),
        )

    def _judging(self, names: list[str]) -> tuple[JudgeRule, ...]:
        return tuple(self._judges[name] for name in dict.fromkeys(names) if name in self._judges)

    def _inherited(self, name: str, sections: dict[str, Any]) -> dict[str, Any]:
        """Return a section with what it takes from others."""
        chain: list[str] = []
        merged: dict[str, Any] = {}
        next_name: Any = name
        while next_name is not None:
            if next_name in chain:
                raise ValueError(f"[keys.{name}] inherits in a circle: {' -> '.join(chain)}")
            if not isinstance(next_name, str) or next_name not in sections:
                near = _nearest(str(next_name), sections)
                raise ValueError(f"[keys.{chain[-1]}] inherits {next_name!r:.80}: {near}")
            chain.append(next_name)
            section = sections[next_name]
            _check_names(section, _OF_KEY, f"[keys.{next_name}]")
            merged = section | merged
            next_name = section.get("inherits")
        return merged

    def _compile(self, value: Any, where: str) -> TextRules:
        key = tuple(_texts(value, where))
        names = [*self._rules, *self._judges]
        for name in key:
            if name not in names:
                raise ValueError(f"{where} names the rule {name!r:.80}: {_nearest(name, names)}")
        if key not in self._compiled:
            rules = [rule for name in dict.fromkeys(key) for rule in self._rules.get(name, ())]
            self._compiled[key] = TextRules(rules, serves_on_error=self._serves)
        return self._compiled[key]


def _rules_of(name: str, table: dict[str, Any]) -> list[TextRule]:
    """Return the rules of one table, one for each pattern. Raises ValueError."""
    where = f"[rules] {name}"
    _check_names(table, _OF_RULE, where)
    action = _one_of(table.get("action"), get_args(Action), f"{where}: action")
    says = table.get("says", "")
    is_word, most = table.get("word", True), table.get("most", 256)
    if not isinstance(says, str) or type(is_word) is not bool or type(most) is not int:
        raise ValueError(
            f"{where}: says is {says!r:.40}, word {is_word!r:.40}, most {most!r:.40}: they must be "
            "text, true or false, and a whole number"
        )
    rules = []
    for kind in _texts(table.get("kinds", []), f"{where}: kinds"):
        _one_of(kind, KINDS, f"{where}: kinds")
        rules.append(TextRule(name, KINDS[kind], action, f"[{kind.upper()}]", says))
    for expression in _texts(table.get("patterns", []), f"{where}: patterns"):
        pattern = TextPattern(expression, WORD if is_word else "", most)
        rules.append(TextRule(name, pattern, action, f"[{name.upper()}]", says))
    if not rules:
        raise ValueError(f"{where} looks for nothing: write kinds or patterns")
    try:
        TextRules(rules)  # alone, so that an error names it
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return rules


def _judge_of(name: str, table: dict[str, Any]) -> JudgeRule:
    """Return the rule of one table, by a model. Raises ValueError."""
    where = f"[rules] {name}"
    _check_names(table, _OF_JUDGE, where)
    action = _one_of(table.get("action"), get_args(JudgeAction), f"{where}: action")
    model, says = table["model"], table.get("says", "")
    if not isinstance(model, str) or not isinstance(says, str) or not model:
        raise ValueError(f"{where}: model is the name of a guard, and says a text")
    at, every = table.get("at", 0.5), table.get("every", 64)
    if type(at) not in (int, float) or not 0 < at <= 1:
        raise ValueError(f"{where}: at is {at!r:.40}: write a score above 0, up to 1")
    if type(every) is not int or every < 1:
        raise ValueError(f"{where}: every is {every!r:.40}: write a number of tokens")
    categories = _texts(table.get("categories", []), f"{where}: categories")
    examples = table.get("examples", {})
    if not isinstance(examples, dict) or not all(examples.values()):
        raise ValueError(f'{where}: examples is a table of texts, as {{ medical = ["..."] }}')
    topics = tuple(
        (topic, tuple(_texts(texts, f"{where}: examples"))) for topic, texts in examples.items()
    )
    return JudgeRule(name, model, action, at, tuple(categories), every, says, topics)


def _tables(document: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    tables = document.get(name, {})
    if not isinstance(tables, dict) or not all(isinstance(one, dict) for one in tables.values()):
        raise ValueError(f"[{name}] must have a table for each name")
    return tables


def _texts(values: Any, where: str) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise ValueError(f'{where} must be a list of texts, as ["a", "b"]')
    return values


def _one_of(value: Any, choices: Collection[str], where: str) -> Any:
    if value not in choices:
        raise ValueError(f"{where} is {value!r:.80}: {_nearest(str(value), choices)}")
    return value


def _check_names(table: Mapping[str, Any], names: Collection[str], where: str) -> None:
    for name in table:
        if name not in names:
            raise ValueError(f"{where} has {name!r:.80}: {_nearest(name, names)}")


def _nearest(name: str, choices: Collection[str]) -> str:
    """Return what may have been meant, or else what there is."""
    if near := get_close_matches(name, list(choices), 1):
        return f"did you mean {near[0]!r}?"
    return f"there is {', '.join(list(choices)[:20])}" if choices else "there is none"
