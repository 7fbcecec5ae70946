"""Requests made from our own OpenAPI document, right ones and wrong ones: never a 5xx, nothing
answered that the document does not describe, every error in OpenAI's shape."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from ridgeline import LLM
from ridgeline.serve.answer.response_format import FIELDS
from tests.faults.oracles import check_body
from tests.serve.serving import Served, serving
from tests.trust.guards.models import write_guard
from tests.waiting import PATIENCE_S

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
OPERATIONS = [
    ("POST", "/v1/chat/completions", 30),
    ("POST", "/v1/completions", 30),
    ("POST", "/infill", 20),
    ("POST", "/completion", 20),
    ("POST", "/completions", 20),
    ("POST", "/v1/responses/input_tokens", 20),
    ("POST", "/apply-template", 20),
    ("POST", "/v1/chat/completions/input_tokens", 20),
    *(("GET", path, 3) for path in ("/props", "/slots", "/api/v0/models")),
    *(("POST", f"/v1/{name}", 20) for name in ("embeddings", "moderations", "rerank", "score")),
    *(("POST", f"/api/{name}", 20) for name in ("embed", "embeddings")),
    ("POST", "/v1/responses", 20),
    ("POST", "/v1/messages", 20),
    ("POST", "/v1/messages/count_tokens", 20),
    ("POST", "/api/chat", 30),
    ("POST", "/api/generate", 30),
    ("POST", "/api/show", 10),
    *(("POST", f"/v2/models/{{model}}/{name}", 20) for name in ("generate", "generate_stream")),
    ("POST", "/v2/models/{model}/infer", 20),
    ("POST", "/v2/repository/index", 3),
    *(("GET", f"/v2{name}", 3) for name in ("", "/health/live", "/health/ready")),
    *(("GET", f"/v2/models/{{model}}{name}", 5) for name in ("", "/ready", "/config")),
    ("POST", "/tokenize", 20),
    ("POST", "/detokenize", 20),
    ("GET", "/v1/models/{name}", 20),
    ("GET", "/v1/requests/{name}/explain", 20),
    *(("GET", path, 3) for path in ("/v1/models", "/health", "/ready", "/version", "/metrics")),
    ("GET", "/tokenizer_info", 3),
    ("GET", "/v1/memory", 3),
    ("GET", "/v1/receipts/key", 3),
    ("POST", "/v1/plan", 20),
    ("GET", "/v1/plan/devices", 3),
    *(("GET", f"/api/{name}", 3) for name in ("tags", "ps", "version")),
    *(("POST", f"/api/{name}", 10) for name in ("pull", "create", "copy")),
    ("DELETE", "/api/delete", 10),
    *(("GET", path, 3) for path in ("/v2/models/stats", "/v2/models/{model}/stats")),
    ("POST", "/v1/files", 20),
    ("POST", "/v1/batches", 20),
    ("POST", "/v1/batches/{batch_id}/cancel", 3),
    *(("GET", f"/v1/{name}", 3) for name in ("files", "batches", "batches/{batch_id}")),
    *(("GET", f"/v1/files/{name}", 3) for name in ("{file_id}", "{file_id}/content")),
]
# They name what is not there.
UNKNOWN = ("{", "/v1/batches", "/api/create", "/api/copy", "/api/delete")


def has_body(operation: tuple[str, str, int]) -> bool:
    method, path, _ = operation
    return method == "POST" and not path.endswith(("/cancel", "/index"))


@contextmanager
def with_all_routes(coder_path: Path, folder: Path) -> Iterator[Served]:
    """Serve a model that fills in middles, beside a guard, with a home for files."""
    path = write_guard(folder / "guard", "Llama Guard 3 8B")
    with (
        LLM(path, backend="reference", kv_cache_memory="4MiB") as guard,
        serving(
            coder_path, {"max_model_len": 32}, folder / "home", {"guard": guard}, max_n=2
        ) as served,
    ):
        yield served
        served.assert_idle()


@pytest.fixture(scope="module")
def small(coder_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with with_all_routes(coder_path, tmp_path_factory.mktemp("small")) as served:
        yield served


def allows(document: dict[str, Any], case: Case) -> bool:
    """Whether the document allows the body of a request."""
    operation = document["paths"][case.path][case.method.lower()]
    forms = operation.get("requestBody", {"content": {}})["content"]
    if not isinstance(case.body, dict) or "application/json" not in forms:
        return False
    whole = forms["application/json"]["schema"] | {"components": document["components"]}
    # A tag says which of several forms a value has, though others may fit it too.
    whole = json.loads(json.dumps(whole).replace('"oneOf":', '"anyOf":'))
    return bool(jsonschema.Draft202012Validator(whole).is_valid(case.body))


@pytest.mark.parametrize(
    ("method", "path", "count", "mode"),
    [
        *((*one, GenerationMode.POSITIVE) for one in OPERATIONS),
        *((*one, GenerationMode.NEGATIVE) for one in OPERATIONS if has_body(one)),
    ],
)
@pytest.mark.parametrize("part", [3, pytest.param(1, marks=pytest.mark.full)])
def test_what_the_document_allows_and_forbids(
    small: Served, method: str, path: str, count: int, mode: GenerationMode, part: int
) -> None:
    """The third part of all examples is run often."""
    document = small.running.parts.app.openapi()
    operation = schemathesis.openapi.from_dict(document)[path][method]
    statuses: Counter[int] = Counter()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=max(3, count // part),
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Case) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            # Nearly all names are unknown, and nothing more is seen; some routes need one.
            if case.body.pop("model", None) is not None and re.search("/messages|/api/", path):
                case.body["model"] = "tiny"
            case.body.pop("deadline", None)  # whether it can be kept, the document does not say
            if "/v2/models" in path:
                case.path_parameters["model"] = "tiny"
            for form in [name for name in FIELDS if case.body.get(name)][1:]:
                del case.body[form]  # an answer has one form
        response = case.call(base_url=small.url, timeout=PATIENCE_S)
        statuses[response.status_code] += 1
        check_body(response.status_code, response.content)
        # A body that is too long is refused before it is read, whatever is wrong in it.
        # What was made wrong for one form of a value may be right for another.
        status = response.status_code
        is_left_out = status == 413 or (status < 300 and allows(document, case))
        checks = CHECKS[:-1] if is_left_out else CHECKS
        case.validate_response(response, checks=checks)

    check()
    if mode is GenerationMode.POSITIVE and not any(one in path for one in UNKNOWN):
        # What is drawn changes with the document, and all of it may contradict itself.
        for number in range(1, 10):
            if not statuses[200]:
                seed(number)(check)()
        assert statuses[200], (method, path, statuses)


def test_every_route_is_tried(small: Served) -> None:
    endless = {"/v1/live"}  # test_live.py reads that one
    tried = {path for _, path, _ in OPERATIONS}
    assert set(small.running.parts.app.openapi()["paths"]) == tried | endless
