"""The models of a server that judge texts, by name: its own, if it is a guard, and others.

It imports what they need when one is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, cast

from ridgeline.serve.http.errors import ApiError

if TYPE_CHECKING:
    from ridgeline.trust.guards.guard import Guard
    from ridgeline.trust.guards.guard_loading import Judge
    from ridgeline.trust.rules.file import JudgeRule


class GuardModels:
    """The guards of a server."""

    def __init__(
        self,
        find_own: Callable[[], Judge | None],
        is_own: Callable[[str], bool],
        others: Mapping[str, Judge],
    ) -> None:
        """Take the guards of ``--guard``, and what says whether the model that is served is one.

        ``is_own`` says whether a name is that of the served model.
        """
        self._find_own, self._is_own, self._others = find_own, is_own, others

    @cached_property
    def _own(self) -> Judge | None:
        return self._find_own()

    def trouble(self) -> str | None:
        """Return why one of the other models judges nothing any more, if so."""
        return next(filter(None, (one.trouble() for one in self._others.values())), None)

    def check(self, rule: JudgeRule) -> None:
        """Raise ValueError if a rule's model cannot judge, or not what it asks."""
        try:
            self.judge(rule.model).check(rule)
        except ApiError as error:
            raise ValueError(f"{error} (--guard MODEL)") from None

    def named(self, name: str | None) -> Guard:
        """Return the guard of a name, or the first where none is named. Raises ApiError."""
        guards = [one for one, own in self._others.items() if own.categories]
        judge = self.judge(guards[0] if name is None and guards else name)
        if not judge.categories:
            raise _unsupported(
                f"{judge.name} is an encoder, not a guard model: start the server with --guard "
                "MODEL"
            )
        return cast("Guard", judge)

    def judge(self, name: str | None) -> Judge:
        """Return what judges under a name, or the served model where none is named.

        Raises ApiError.
        """
        if name is not None and name in self._others:
            return self._others[name]
        try:
            own = self._own if name is None or self._is_own(name) else None
        except ValueError as error:
            raise _unsupported(str(error)) from None
        if own is not None:
            return own
        has = ", ".join(map(repr, self._others)) or "none"
        if name is not None and not self._is_own(name):
            message = f"there is no guard {name[:80]!r} here: this server has {has}"
            raise ApiError(404, message, param="model", code="model_not_found")
        raise _unsupported(
            "this server's model is not a known guard model: start it with --guard MODEL"
        )


def _unsupported(message: str) -> ApiError:
    return ApiError(400, message, param="model", code="unsupported_endpoint")
