"""The rules of a server, as its requests meet them. A refusal names the rule, not its pattern."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ridgeline.core.params import SamplingParams
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.keys import ANYONE
from ridgeline.serve.http.request_state import STATE, RequestState
from ridgeline.trust.rules.file import JudgeRule, KeyRules, RulesFile, read_rules
from ridgeline.trust.rules.tokens import SearchedTokens, TokenText
from ridgeline.trust.text_rules.answer import (
    NEW,
    AnswerGuard,
    BegunText,
    TextRule,
    TextRules,
    screened,
)

Value = TypeVar("Value")
Count = Callable[[str, str, str], None]  # of a match: rule, where, action
FAILED = "a rule of this server has failed"
_MOST_NOTED = 100  # matches in a line of a log
_MOST_CACHED = 100_000  # texts of tokens


class PolicyFile:
    """The file's rules; ``reload`` reads it again.

    Attributes:
        now: what holds.
    """

    now: RulesFile

    def __init__(
        self,
        file: Path,
        labels: Callable[[], Collection[str]],
        count: Count,
        check: Callable[[RulesFile], None],
        check_judge: Callable[[JudgeRule], None],
    ) -> None:
        """Read a file for the keys of ``labels``. Raises OSError or ValueError.

        ``count`` is told of each match; ``check`` raises ValueError for what this server cannot do,
        and ``check_judge`` for a rule whose model cannot judge.
        """
        self._file, self._labels, self._count = file, labels, count
        self._check, self._check_judge = check, check_judge
        self.reload()

    def reload(self) -> None:
        """Read the file again; what holds stays if that fails, with OSError or ValueError."""
        self.now = self._checked(read_rules(self._file, self._labels()))

    def _checked(self, rules: RulesFile) -> RulesFile:
        self._check(rules)
        for key in rules.keys.values():
            for rule in (*key.input_judges, *key.output_judges):
                try:
                    self._check_judge(rule)
                except ValueError as error:
                    raise ValueError(f"{self._file.name}: [rules] {rule.name}: {error}") from None
        return rules

    def here(self) -> RequestPolicy:
        """Return the rules for the request that is being answered: one object until its end."""
        state: RequestState = STATE.get() or {}
        if "rules" not in state:
            key = self.now.of(state.get("tenant", ANYONE))
            note = state.get("note", {})
            state["rules"] = RequestPolicy(key, self.now, self._count, note)
        policy: RequestPolicy = state["rules"]
        return policy


def features_of(body: Any, params: SamplingParams) -> list[str]:
    """Return what a request for an answer uses of what a key may be denied.

    ``params`` are those that were made of it: a route has its own names for the same.
    """
    used = ["chat" if hasattr(body, "messages") else "completions"]
    used += ["stream"] if body.stream else []
    used += ["tools"] if getattr(body, "tools", None) else []
    tells = params.logprobs is not None or params.prompt_logprobs is not None
    return used + (["logprobs"] if tells else [])


class RequestPolicy:
    """The rules for one request.

    Attributes:
        key: what holds for its key.
        name: the version of the rules, and the section for the key.
        digest: of the file.
    """

    def __init__(self, key: KeyRules, file: RulesFile, count: Count, note: dict[str, Any]) -> None:
        """Take what a file says of a key; the request's line of the log becomes ``note``."""
        self.key, self._count, self._note = key, count, note
        self.digest = file.digest
        self.name = note["rules"] = f"{file.version}/{key.section}"
        self._are_shown: dict[str, bool] = {}

    def check_model(self, model: str) -> None:
        """Raise ApiError unless the key may use a model."""
        if not self.key.may_use(model):
            raise self._denied(f"the model {model[:80]!r}", "models", "model")

    def params_of(
        self, body: Any, make: Callable[..., SamplingParams], vocab_size: int
    ) -> SamplingParams:
        """Return the parameters of a request for an answer, within what the key may have.

        Raises ApiError for those that cannot be, and for all that the key may not use.
        """
        params: SamplingParams = body.params(partial(self._limited, make), vocab_size)
        self.check_features(features_of(body, params))
        return params

    def _limited(
        self,
        make: Callable[..., SamplingParams],
        *,
        max_tokens: int | None = None,
        min_tokens: int = 0,
        **others: Any,
    ) -> SamplingParams:
        """Make parameters with at most as many tokens as the key may have. Raises ValueError."""
        most = self.key.limits.get("max_tokens")
        if most is not None and min_tokens > most:
            where = f"limits of [keys.{self.key.section}] in the rules"
            message = f"answers to this key have at most {most} tokens: {where}"
            raise ValueError(f"min_tokens is {min_tokens}: {message}")
        longest = min((one for one in (max_tokens, most) if one is not None), default=None)
        return make(max_tokens=longest, min_tokens=min_tokens, **others)

    def check_features(self, used: Collection[str]) -> None:
        """Raise ApiError unless the key may use these features."""
        for one in used:
            if self.key.features is not None and one not in self.key.features:
                raise self._denied(one, "features", None)

    def _denied(self, what: str, field: str, param: str | None) -> ApiError:
        message = f"this key may not use {what}: {field} of [keys.{self.key.section}] in the rules"
        return ApiError(403, message, param=param, code="policy_denied")

    # --- what a model reads --------------------------------------------------------------------

    def read(self, value: Value, param: str) -> Value:
        """Return what a request brings, a text or JSON, as a model may read it.

        Raises ApiError if a rule forbids it.
        """
        rules = self.key.input
        return self._each(value, rules, param) if rules else value

    @property
    def checks_ids(self) -> bool:
        """Whether prompts are also read as the text of their token ids."""
        return bool(self.key.input)

    def check_read(self, text: str, param: str) -> None:
        """Raise ApiError if a text that cannot be changed any more has what no model may read."""
        if self.key.input.forbidding:
            rules: list[TextRule] = []
            self._screen(text, self.key.input, rules.append)
            if rules:
                raise self.refused(rules[0], param)

    def as_read(self, value: Value) -> Value:
        """Return what a request brought as a model has read it; matches do not count again."""
        return self._shown(value, self.key.input) if self.key.input.forbidding else value

    def _each(self, value: Any, rules: TextRules, param: str) -> Any:
        if isinstance(value, str):
            shown, blocked = self._screen(value, rules, lambda rule: self.tell(rule, "input"))
            if blocked:
                raise self.refused(blocked, param)
            return shown
        if isinstance(value, dict):
            pairs = value.items()
            return {self._each(k, rules, param): self._each(v, rules, param) for k, v in pairs}
        if isinstance(value, list | tuple):
            return [self._each(one, rules, param) for one in value]
        return value

    def _screen(
        self, text: str, rules: TextRules, note: Callable[[TextRule], None]
    ) -> tuple[str, TextRule | None]:
        try:
            return screened(text, rules, note)
        except Exception:
            self.count_error("input")
            if rules.serves_on_error:
                return text, None
            raise ApiError(503, FAILED, code="rules_failed") from None

    def refused(self, rule: TextRule | JudgeRule, param: str) -> ApiError:
        """Return the error of a request that a rule forbids."""
        message = rule.says or f"{param} has what the rule {rule.name!r} does not allow"
        return ApiError(400, message, param=param, code="content_filter")

    # --- what it writes ------------------------------------------------------------------------

    def begun(self, text: str) -> BegunText:
        """Return what an answer begins with that goes on with a text."""
        return self.key.output.begun(text) if text else NEW

    def new_guard(self, *, is_constrained: bool, begun: BegunText) -> AnswerGuard | None:
        """Return what reads an answer, None where no rule is for it."""
        rules = self.key.output
        if not rules:
            return None
        return AnswerGuard(rules, self.tell, is_constrained=is_constrained, begun=begun)

    def new_tokens(
        self, token_bytes: Callable[[int], bytes], text: TokenText, begun: BegunText = NEW
    ) -> SearchedTokens:
        """Return what says which tokens of a text may be told of; ``text`` decodes them."""
        rules = self.key.output
        return SearchedTokens(rules, self.is_shown, token_bytes, text, begun.forbidden)

    def shown(self, value: Value) -> Value:
        """Return what an answer repeats of its request, with what no answer may say replaced."""
        return self._shown(value, self.key.output) if self.key.output.forbidding else value

    def _shown(self, value: Any, rules: TextRules) -> Any:
        if isinstance(value, str):
            text, blocked = screened(value, rules, lambda rule: None)
            return text + blocked.label if blocked else text
        if isinstance(value, dict):
            pairs = value.items()
            return {self._shown(name, rules): self._shown(one, rules) for name, one in pairs}
        return [self._shown(one, rules) for one in value] if isinstance(value, list) else value

    def is_shown(self, text: str) -> bool:
        """Whether an answer may say a text that stands alone, such as a token's."""
        is_shown = self._are_shown.get(text)
        if is_shown is None:
            if len(self._are_shown) > _MOST_CACHED:
                self._are_shown.clear()
            is_shown = self._are_shown[text] = self.shown(text) == text
        return is_shown

    def tell(self, rule: TextRule | JudgeRule, where: str) -> None:
        """Note and count a match."""
        self._count(rule.name, where, rule.action)
        hits = self._note.setdefault("hits", [])
        if len(hits) < _MOST_NOTED:
            hits.append(f"{rule.name}:{where}:{rule.action}")

    @property
    def serves_on_error(self) -> bool:
        """Whether texts pass where a rule fails."""
        return self.key.input.serves_on_error

    def count_error(self, where: str) -> None:
        """Count a rule that has failed."""
        self._count("error", where, "error")
