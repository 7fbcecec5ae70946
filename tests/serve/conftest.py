"""One server for the tests that leave it as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.test_llm import model, write_model  # noqa: F401  (a fixture)
from tests.serve.page.browser import browser, page, slow  # noqa: F401  (fixtures)
from tests.serve.serving import Served, serving
from tests.text.test_infill import QWEN


@pytest.fixture(scope="session")
def coder_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random model, with Qwen2.5-Coder's tokens for filling in the middle."""
    return write_coder(tmp_path_factory.mktemp("models") / "coder")


def write_coder(path: Path) -> Path:
    """Write that model."""
    write_model(path)
    file = path / "tokenizer.json"
    spec = json.loads(file.read_text())
    plain = spec["added_tokens"][0] | {"rstrip": False}
    for i, spelling in enumerate(QWEN, 403):
        spec["added_tokens"].append(plain | {"id": i, "content": spelling})
    file.write_text(json.dumps(spec))
    return path


@pytest.fixture(scope="session")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose context has room for the description of a tool."""
    path = write_coder(tmp_path_factory.mktemp("models") / "roomy")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return path


@pytest.fixture(scope="session")
def shared(model: Path) -> Iterator[Served]:  # noqa: F811
    with serving(model) as served:
        yield served


@pytest.fixture
def served(shared: Served) -> Iterator[Served]:
    """Each test must leave the server idle, whole and able to answer."""
    yield shared
    shared.valve.free()
    shared.assert_idle()
    status, answer, _ = shared.call("/v1/completions", {"prompt": "still here", "max_tokens": 2})
    assert (status, answer["usage"]["completion_tokens"] > 0) == (200, True)
