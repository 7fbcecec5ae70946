"""docs/server.md: every flag, metric, log field and limit, as the program has them."""

from __future__ import annotations

import json
import re
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import pytest
from annotated_types import MaxLen
from prometheus_client.parser import text_string_to_metric_families

from ridgeline.engine.setup.options import Options
from ridgeline.serve.answer import conversation, protocol, samplers
from ridgeline.serve.dialects.llamacpp import infill
from ridgeline.serve.http import request_body
from ridgeline.serve.http.edge import connection
from ridgeline.serve.http.options import ServeOptions
from ridgeline.text.template import process
from tests.serve.observe.test_spans import CALLER, COMPLETE
from tests.serve.serving import Served, serving

TEXT = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
CONTENT = "the prompt's fields, and `response`"  # the log has these only with --log-content


def rows(title: str) -> list[list[str]]:
    """The cells of the table below a title, without its head."""
    section = TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


FLAGS = [*fields(ServeOptions), *(one for one in fields(Options) if one.name != "is_shared")]


@pytest.mark.parametrize("field", FLAGS, ids=lambda f: f.name)
def test_every_flag_is_explained(field: Field[Any]) -> None:
    row = re.search(rf"^\| `--{field.name.replace('_', '-')}` \| (.*) \| (.*) \|$", TEXT, re.M)
    assert row is not None
    default, what = row.groups()
    assert what == field.metadata["help"]
    shown = {"None": "", "": "", "False": "", "True": "yes"}.get(f"{field.default}")
    assert default == (f"`{field.default}`" if shown is None else shown)


def test_every_metric_is_explained_with_its_kind_and_labels(served: Served) -> None:
    body = {"prompt": "a b c", "max_tokens": 4, "ignore_eos": True}
    assert served.call(COMPLETE, body)[0] == 200
    served.assert_idle()
    text = served.call("/metrics")[1].decode()
    kinds = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M)
    table = rows("Metrics")
    assert {name.strip("`"): kind for name, kind, *_ in table} == dict(kinds)
    assert len(table) == len(kinds)
    explained = {
        name.strip("`"): set(re.findall(r"`(\w+)`", labels)) for name, _, labels, _ in table
    }
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name if sample.name in explained else family.name
            assert sample.labels.keys() - {"model_name", "le"} == explained[name], sample.name


def test_every_field_of_the_log_is_explained(model: Path) -> None:
    with serving(model, log_format="json") as served:
        body = {"prompt": "a b c", "max_tokens": 2, "deadline": {"total_ms": 60_000}}
        served.call(COMPLETE, body, traceparent=CALLER)
        served.call(COMPLETE, {"prompt": 7})
        served.assert_idle()
        found = {name for line in served.lines for name in json.loads(line)}
    names = [name for name, _ in rows("The log") if name != CONTENT]
    explained = re.findall(r"`(\w+)`", " ".join(names))
    assert len(names) < len(rows("The log"))
    assert sorted(explained) == sorted(found)


def test_every_route_is_named_in_a_page(served: Served) -> None:
    docs = Path(__file__).parents[2] / "docs"
    text = "\n".join(page.read_text() for page in sorted(docs.glob("*.md")))
    paths = served.call("/openapi.json")[1]["paths"]
    assert len(paths) > 40
    for path in paths:
        begin, brace, _ = path.partition("{")  # what follows a name may be called otherwise
        end = r"(?!\w)" if brace else r"(?![\w/])"
        assert re.search(rf"(?<![\w/]){re.escape(begin.rstrip('/'))}{end}", text), path


def test_every_limit_without_a_flag_has_its_number() -> None:
    most_prompts = next(one.max_length for one in protocol.EACH.metadata if isinstance(one, MaxLen))
    numbers = re.compile(r"\d+(?:,\d{3})*(?: KiB)?")
    said = [numbers.findall(cell) for _, cell in rows("Limits without a flag")]
    assert said == [
        [f"{connection._MAX_HEAD_BYTES >> 10} KiB"],
        [f"{request_body.MAX_VALUES:,}", f"{request_body.MAX_PARTS:,}"],
        [f"{most_prompts:,}"],
        [f"{conversation._MAX_MESSAGES:,}"],
        [f"{samplers.MAX_BIASES:,}", f"{protocol._MAX_METADATA}"],
        [f"{protocol._MAX_STOP_IDS:,}"],
        [f"{protocol._MAX_STOP_CHARS:,}"],
        [f"{infill._MAX_FILES:,}"],
        [f"{process._MAX_RENDERED_CHARS:,}"],
    ]
