"""Plans of models on the hub: their headers are fetched, and no weight."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline.planner import plan
from tests.model.cost.published_configs import PUBLISHED
from tests.model.files.tiny import CONFIG, gguf_metadata, gguf_weights, vocabulary, write_gguf
from tests.model.hub.fetch.test_repos import run
from tests.model.hub.loopback import Hub, Repo, running_hub
from tests.planner.test_plan import write_safetensors

MEGABYTE = 1 << 20


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    constants = pytest.importorskip("huggingface_hub.constants")
    with running_hub() as hub:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path / "home"))
        yield hub


def num_fetched(hub: Hub, file: str) -> int:
    """Return how many bytes of a file were asked for; what has no range counts as a gigabyte."""
    ranges = [asked for name, asked in hub.ranges if name == file]
    found = [re.fullmatch(r"bytes=(\d+)-(\d+)", asked) for asked in ranges]
    return sum(int(one[2]) + 1 - int(one[1]) if one else 1 << 30 for one in found)


def test_a_config_and_the_headers_of_safetensors_are_enough(hub: Hub, tmp_path: Path) -> None:
    config = PUBLISHED["deepseek-v3"]["config"] | {"num_hidden_layers": 4}
    sizes = {
        "model.embed_tokens.weight": 3 * MEGABYTE,
        "model.layers.3.mlp.experts.7.up_proj.weight": 300,
        "model.layers.3.self_attn.o_proj.weight": 50,
    }
    weights = write_safetensors(tmp_path / "m.safetensors", sizes).read_bytes()
    files = {"config.json": json.dumps(config).encode(), "model-1-of-1.safetensors": weights}
    others = dict.fromkeys(("tokenizer.json", "pytorch_model.bin", "consolidated.safetensors"), b"")
    hub.repos["o/n"] = Repo(files | others)
    found = plan("o/n", on="h200-sxm")
    assert found.spec.name == "o/n"
    lines = {n.removeprefix("weights, "): size for n, size, how in found.best.ledger.lines}
    assert lines["embedding"] == 3 * MEGABYTE
    assert (lines["experts"], lines["attention"]) == (300, 50)
    assert {name for name, _ in hub.ranges} == set(files)
    assert num_fetched(hub, "model-1-of-1.safetensors") == MEGABYTE


@pytest.mark.parametrize("is_long", [False, True], ids=["short", "longer than the first piece"])
def test_the_header_of_a_gguf_is_enough(is_long: bool, hub: Hub, tmp_path: Path) -> None:
    config = CONFIG | {"intermediate_size": 1 << 15}  # so that it is worth a range
    metadata = gguf_metadata(config, "llama") | vocabulary()
    if is_long:
        metadata["general.description"] = "x" * (3 * MEGABYTE // 2)
    path = write_gguf(tmp_path / "m-Q8_0.gguf", metadata, gguf_weights(config, "llama"))
    assert path.stat().st_size > 6 * MEGABYTE
    hub.repos["o/n"] = Repo({"m-Q8_0.gguf": path.read_bytes(), "m-F16.gguf": b"GGUF" * 300})
    there, local = plan("o/n", on="l4"), plan(path, on="l4")
    assert there.best.ledger.lines == local.best.ledger.lines
    assert plan("o/n:Q8_0", on="l4").best.ledger.lines == local.best.ledger.lines
    assert num_fetched(hub, "m-Q8_0.gguf") == 2 * (4 if is_long else 1) * MEGABYTE
    assert num_fetched(hub, "m-F16.gguf") == 0
    assert not (tmp_path / "home").exists()


def test_a_config_without_weights_that_are_understood_is_enough(hub: Hub) -> None:
    config = json.dumps(PUBLISHED["llama-3.1-8b"]["config"]).encode()
    hub.repos["o/n"] = Repo({"config.json": config, "pytorch_model.bin": bytes(2000)})
    assert plan("o/n", on="l4").best.ledger.fits
    assert hub.ranges == [("config.json", "")]


def test_what_is_said_of_a_quantisation_beside_the_config_is_fetched(hub: Hub) -> None:
    config = json.dumps(PUBLISHED["llama-3.1-8b"]["config"]).encode()
    beside = json.dumps({"quantization": {"quant_algo": "NVFP4"}}).encode()
    hub.repos["o/n"] = Repo({"config.json": config, "hf_quant_config.json": beside})
    assert plan("o/n", on="l4").spec.storage.name == "nvfp4"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"README.md": b""}, "o/n has neither .gguf files"),
        ({"m-Q8_0.gguf": bytes(5000)}, "does not begin with GGUF"),
        ({"config.json": b"[]"}, "the JSON is not an object"),
        ({"config.json": b"{}"}, "config.json"),
        (
            {"config.json": b"{}", "model.safetensors": (1 << 40).to_bytes(8, "little") * 200},
            "its header does not end within",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    files: dict[str, bytes], message: str, hub: Hub
) -> None:
    hub.repos["o/n"] = Repo(files)
    with pytest.raises(ValueError, match=message) as caught:
        plan("o/n", on="l4")
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("for a plan, the path of its config.json is enough")


def test_the_command_asks_for_consent_and_says_what_fits(hub: Hub, tmp_path: Path) -> None:
    config = json.dumps(PUBLISHED["llama-3.1-8b"]["config"]).encode()
    hub.repos["o/n"] = Repo({"config.json": config}, is_gated=True)
    refused = run(hub, tmp_path, "plan", "o/n", "--on", "l4")
    assert (refused.returncode, "HF_TOKEN" in refused.stderr) == (1, True)
    found = run(hub, tmp_path, "plan", "o/n", "--on", "l4", HF_TOKEN=hub.token)
    assert found.stdout.splitlines()[-1].startswith("fits on one NVIDIA L4")
