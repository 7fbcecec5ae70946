"""One answer under rules: what comes out of it, no rule forbids.

It reads the pieces of a message (``messages.message``): thoughts, text and calls each are a text of
their own, whatever stood between them as the model wrote them. What may still become a match is
held back. A match is replaced, or it ends the answer, or it is only noted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from ridgeline.text.messages.tool_calls import MessageDelta
from ridgeline.trust.text_rules.escapes import may_escape
from ridgeline.trust.text_rules.folding import units
from ridgeline.trust.text_rules.patterns import Hit, Patterns, TextPattern
from ridgeline.trust.text_rules.search import NOTHING, Begun, MatchSearch

Action = Literal["redact", "block", "note"]


class TextRule(NamedTuple):
    """What is done with the matches of a pattern.

    Attributes:
        name: of the rule, for who counts.
        pattern: what it looks for.
        action: replace the match, end the answer before it, or only count it.
        label: what stands in its place.
        says: what an answer says that it ends.
    """

    name: str
    pattern: TextPattern
    action: Action
    label: str
    says: str = ""


class TextRules:
    """Rules that hold together, compiled."""

    def __init__(self, rules: Sequence[TextRule], *, serves_on_error: bool = False) -> None:
        """Compile rules; texts pass where one fails if it ``serves_on_error``.

        Raises ExpressionError.
        """
        self.forbidding = [rule for rule in rules if rule.action != "note"]
        self.noting = [rule for rule in rules if rule.action == "note"]
        # Apart: what is only noted must not hide a match that is forbidden.
        self.forbidden = _compiled(self.forbidding)
        self.noted = _compiled(self.noting)
        self.serves_on_error = serves_on_error

    def may_match(self, text: str) -> bool:
        """Whether a rule may find something in a whole text; False is certain."""
        compiled = (self.forbidden, self.noted)
        return may_escape(text) or any(one is not None and one.may_match(text) for one in compiled)

    def begun(self, text: str) -> BegunText:
        """Return what an answer under these rules begins with that goes on with a text."""
        return BegunText(_begun(self.forbidden, text), _begun(self.noted, text))

    def __bool__(self) -> bool:
        """Whether there is any rule."""
        return bool(self.forbidding or self.noting)


def _compiled(rules: Sequence[TextRule]) -> Patterns | None:
    return Patterns([rule.pattern for rule in rules]) if rules else None


def _begun(patterns: Patterns | None, text: str) -> Begun:
    if patterns is None:
        return NOTHING
    end = _end_of(text, patterns.most)
    size = len(text) - len(end)
    search = MatchSearch(patterns, Begun(before=text[:size][-1:]))
    search.feed(end)
    return search.begun


Note = Callable[[TextRule, str], None]  # of a match: its rule, and the kind of its text


class BegunText(NamedTuple):
    """What an answer goes on with, as far as matches in the answer may have begun in it."""

    forbidden: Begun = NOTHING
    noted: Begun = NOTHING


NEW = BegunText()


class GuardedText:
    """A text that grows, under rules.

    Attributes:
        blocked: the rule that has ended it, if one has.
    """

    def __init__(
        self,
        rules: TextRules,
        note: Callable[[TextRule], None],
        *,
        keeps_form: bool,
        begun: BegunText = NEW,
    ) -> None:
        """Begin before the first character, behind what has ``begun``.

        With ``keeps_form`` the text has a form that a replacement could break, so a match ends it.
        """
        self._rules, self._note, self._keeps_form = rules, note, keeps_form
        self._search = MatchSearch(rules.forbidden, begun.forbidden) if rules.forbidden else None
        self._noting = MatchSearch(rules.noted, begun.noted) if rules.noted else None
        self._shown: list[str] = []  # since the last match
        # Characters that are shown already, and searched once more.
        self._num_gone = len(begun.forbidden.pending)
        self.blocked: TextRule | None = None

    @property
    def pending(self) -> str:
        """The end of the text, which is not shown yet."""
        return self._search.pending[self._num_gone :] if self._search else ""

    def feed(self, text: str, *, is_end: bool = False) -> str:
        """Take more text; return what is shown of it, which is final.

        What follows an end may go on with the text, and a match may reach back over it.
        """
        if self._noting:
            for one in self._noting.feed(text, is_end=is_end):
                if isinstance(one, Hit):
                    self._note(self._rules.noting[one.pattern])
        if self._search is None:
            return text
        news = self._search.feed(text, is_end=is_end)
        if len(news) == 1 and isinstance(news[0], str) and not self._num_gone and not self.blocked:
            self._shown.append(news[0])
            return news[0]
        return "".join(self._allowed(one) for one in news)

    def completes(self, text: str) -> int:
        """Return how much of a text would complete a match that is forbidden, in characters."""
        return self._search.completes(text) if self._search else 0

    def _allowed(self, one: str | Hit) -> str:
        """Return what is shown of a piece, or in place of a match."""
        if self.blocked:
            return ""
        text = one.text if isinstance(one, Hit) else one
        num_gone = min(self._num_gone, len(text))
        self._num_gone -= num_gone
        if isinstance(one, str):
            self._shown.append(text)
            return text[num_gone:]
        if num_gone == len(text):
            return ""
        rule = self._rules.forbidding[one.pattern]
        self._note(rule)
        self._shown.clear()
        if rule.action == "block" or self._keeps_form:
            self.blocked = rule
            return ""
        return rule.label

    def resume(self) -> None:
        """Go on behind an end: what follows is searched together with what was shown before."""
        patterns = self._rules.forbidden
        if patterns is None:
            return
        before = "".join(self._shown)
        shown = _end_of(before, patterns.most)
        size = len(before) - len(shown)
        self._search = MatchSearch(patterns, Begun(before=before[:size][-1:]))
        self._shown, self._num_gone = [], len(shown)
        again, self._noting = self._noting, None
        self.feed(shown)
        self._noting = again


def _end_of(text: str, most: int) -> str:
    """Return the end of a text in which a match of ``most`` seen characters may have begun."""
    size = most
    while size < len(text) and len(units(text[-size:])) < most:
        size *= 2
    return text[-size:]


class AnswerGuard:
    """The pieces of one answer, as the rules let them out.

    Attributes:
        blocked: the rule that has ended the answer, if one has.
        num_hits: matches of rules that forbid.
    """

    def __init__(
        self,
        rules: TextRules,
        note: Note,
        *,
        is_constrained: bool = False,
        begun: BegunText = NEW,
    ) -> None:
        """Begin before the first piece; the text of the answer goes on with what has ``begun``.

        ``note`` is told of each match. Text that ``is_constrained`` has a form to keep.
        """
        self._rules, self._tell, self._is_constrained = rules, note, is_constrained
        self._begun = begun
        self._texts: dict[str, GuardedText] = {}
        self._kind = ""
        self._has_failed = False
        self.blocked: TextRule | None = None
        self.num_hits = 0

    def completing(self, text: str) -> MessageDelta | None:
        """Return what of a text, if it came now, would complete a match that is forbidden."""
        if self.blocked or self._has_failed or self._kind == "call":
            return None
        kind = self._kind or "content"
        if kind not in self._texts:
            self._enter(kind)
        num = self._texts[kind].completes(text)
        return MessageDelta(kind, text[:num]) if num else None

    @property
    def num_held(self) -> int:
        """Characters at the end of the text so far that are not shown yet."""
        text = self._texts.get(self._kind)
        return len(text.pending) if text and not self.blocked else 0

    def take(self, pieces: Sequence[MessageDelta], *, is_over: bool) -> list[MessageDelta]:
        """Take the next pieces; return what is shown of them. Nothing is after a block."""
        shown: list[MessageDelta] = []
        for piece in pieces:
            if piece.kind != self._kind or piece.kind == "call":
                self._leave(shown)
                self._enter(piece.kind)
            self._show(shown, piece.text, is_end=piece.kind == "call")
        if is_over:
            self._leave(shown)
        return shown

    def _enter(self, kind: str) -> None:
        self._kind = kind
        if kind in self._texts and kind not in ("call", "arguments"):  # each call is new
            self._texts[kind].resume()
            return
        keeps_form = kind in ("call", "arguments") or (kind == "content" and self._is_constrained)
        begun = self._begun if kind == "content" else NEW
        self._texts[kind] = GuardedText(self._rules, self._note, keeps_form=keeps_form, begun=begun)

    def _leave(self, shown: list[MessageDelta]) -> None:
        if self._kind and self._kind != "call":
            self._show(shown, "", is_end=True)

    def _note(self, rule: TextRule) -> None:
        self.num_hits += rule.action != "note"
        self._tell(rule, self._kind)

    def _show(self, shown: list[MessageDelta], text: str, *, is_end: bool) -> None:
        """Add what is shown of a text to the pieces that are."""
        if self.blocked:
            return
        guarded = self._texts[self._kind]
        if self._has_failed:
            final = text
        else:
            pending = guarded.pending
            try:
                final = guarded.feed(text, is_end=is_end)
            except Exception:
                final = self._after_failure(pending + text)
        if final:
            shown.append(MessageDelta(self._kind, final))
        if guarded.blocked and not self.blocked:
            self._block(guarded.blocked, shown)

    def _after_failure(self, unread: str) -> str:
        """Return what is shown where a rule has failed: nothing, unless texts may pass then."""
        self._has_failed = True
        failed = TextRule("error", TextPattern("."), "note", "")
        self._tell(failed, self._kind)
        if self._rules.serves_on_error:
            return unread
        self.blocked = failed
        return ""

    def _block(self, rule: TextRule, shown: list[MessageDelta]) -> None:
        self.blocked = rule
        if rule.says:
            shown.append(MessageDelta("refusal", rule.says))


def screened(
    text: str, rules: TextRules, note: Callable[[TextRule], None]
) -> tuple[str, TextRule | None]:
    """Return a whole text as it may be shown, and the rule that ends it, if one does."""
    if not rules.may_match(text):  # as most are
        return text, None
    guarded = GuardedText(rules, note, keeps_form=False)
    shown = guarded.feed(text, is_end=True)
    return shown, guarded.blocked
