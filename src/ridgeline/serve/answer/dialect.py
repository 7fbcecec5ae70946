"""Another API over OpenAI's: which fields they share, and what errors must call the others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from ridgeline.serve.http.errors import ApiError, validation_error

Target = TypeVar("Target", bound=BaseModel)  # a request of OpenAI's


class Dialect:
    """An API whose requests are answered as OpenAI's."""

    def __init__(self, names: Mapping[str, str] = {}, same: Sequence[str] = ()) -> None:
        """Describe it.

        Args:
            names: what this API calls OpenAI's fields, by paths or parts of paths. Where several
                begin alike, the longest comes first. One with ``^`` before it must begin the text.
            same: fields that have the same name and meaning.
        """
        self._same = same
        self._names = {name.removeprefix("^"): other for name, other in names.items()}
        # Words in quotes are the client's own, and stay.
        self._pattern = re.compile("|".join(["'[^']*'", *map(_pattern, names)]))

    def request(self, kind: type[Target], body: BaseModel | None, fields: dict[str, Any]) -> Target:
        """Return OpenAI's request with the same fields as ``body``, and others.

        Raises ApiError, which names a field of OpenAI's.
        """
        same = {name: getattr(body, name, None) for name in self._same}
        try:
            return kind.model_validate(fields | same)
        except ValidationError as error:
            raise validation_error(error.errors()) from None

    def renamed(self, error: ApiError) -> ApiError:
        """Return an error about OpenAI's request with the names of this API."""
        param = error.param and self.renamed_text(error.param)
        return ApiError(
            error.status,
            self.renamed_text(str(error)),
            param=param,
            code=error.code,
            headers=error.headers,
            counts=error.counts,
        )

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Let errors that are raised within the block have the names of this API."""
        try:
            yield
        except ApiError as error:
            raise self.renamed(error) from None

    def renamed_text(self, text: str) -> str:
        """Return text about fields of OpenAI's with the names of this API."""
        return self._pattern.sub(lambda match: self._names.get(match[0], match[0]), text)


def _pattern(name: str) -> str:
    """Return a pattern that finds a name as a whole, not as a field of something else."""
    begin = "^" if name.startswith("^") else r"(?<![\w.])" if name[0].isalpha() else ""
    end = r"(?!\w)" if name[-1].isalnum() else ""
    return begin + re.escape(name.removeprefix("^")) + end


class HasText(Protocol):
    """A part of a message: text."""

    text: str


def text_of(content: str | Sequence[HasText]) -> str:
    """Return a message's text; each part of several stands on a line of its own."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


OPENAI = Dialect()
