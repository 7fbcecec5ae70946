"""The tokens of a batch, added up from answers of each of its routes."""

from __future__ import annotations

import json
from typing import Any

from ridgeline.serve.batch_files.lines import usage_of


def line(body: Any) -> bytes:
    return json.dumps({"response": {"status_code": 200, "body": body}}).encode()


def test_usage_of_all_routes_is_added_up() -> None:
    completion = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
    completion |= {"prompt_tokens_details": {"cached_tokens": 2}}
    completion |= {"completion_tokens_details": {"reasoning_tokens": 3}}
    response = {"input_tokens": 10, "output_tokens": 20, "total_tokens": 30}
    response |= {"input_tokens_details": {"cached_tokens": 4}}
    response |= {"output_tokens_details": {"reasoning_tokens": 1}}
    vectors = {"prompt_tokens": 100, "total_tokens": 100}
    lines = [line({"usage": one}) for one in (completion, response, vectors, None)]
    assert usage_of([*lines, line({"object": "list"})]) == {
        "input_tokens": 115,
        "input_tokens_details": {"cached_tokens": 6},
        "output_tokens": 27,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 142,
    }
    assert usage_of([])["total_tokens"] == 0
