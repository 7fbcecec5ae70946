"""Errors in the names of another API."""

from __future__ import annotations

import pytest

from ridgeline.serve.answer.dialect import Dialect
from ridgeline.serve.http.errors import ApiError


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("max_tokens is 0: too few", "limit is 0: too few"),
        ("min_max_tokens and max_tokens_2 stay", "min_max_tokens and max_tokens_2 stay"),
        ("options.max_tokens is another's", "options.max_tokens is another's"),
        ("'max_tokens' is the client's word", "'max_tokens' is the client's word"),
        ("form.schema.a is wrong, as form is", "format.a is wrong, as format is"),
        ("tools[1].function.name is wrong", "tools[1].name is wrong"),
        ("stop[1] is wrong: stop", "stop_sequences[1] is wrong: stop"),
        ("the server will stop, and is stopping", "the server will stop, and is stopping"),
    ],
)
def test_errors_have_the_names_of_the_dialect(said: str, told: str) -> None:
    names = {"max_tokens": "limit", "form.schema": "format", "form": "format"}
    dialect = Dialect(names | {".function.": ".", "^stop": "stop_sequences"})
    with pytest.raises(ApiError) as raised, dialect.errors():
        raise ApiError(429, said, param="max_tokens", code="x", headers={"retry-after": "5"})
    error = raised.value
    assert (str(error), error.param, error.status) == (told, "limit", 429)
    assert (error.code, error.headers) == ("x", {"retry-after": "5"})
