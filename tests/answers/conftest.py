"""What tests with real models share: backends to try, and models beside this repository."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.on_cpu import compute_on_cpu
from tests.llama2c import convert
from tests.real_models import SHARED_MODELS, shared_files

CHECKPOINT, VOCABULARY = "stories15M.bin", "stories15M.tokenizer.bin"


BACKENDS: dict[str, dict[str, Any]] = {
    "reference": {"backend": "reference"},
    "cpu": {"backend": "cpu"},  # 4-bit and 8-bit weights as the file has them, int8 cache
    "cpu-f32": {"backend": "cpu", "dtype": "f32", "kv_cache_dtype": "f32"},
    "cpu-bf16-f16": {"backend": "cpu", "dtype": "bf16", "kv_cache_dtype": "f16"},
    "cpu-int8-row": {"backend": "cpu", "dtype": "int8-row"},
    "cpu-int8-int4": {"backend": "cpu", "kv_cache_dtype": "int8-int4"},  # keys 8, values 4 bits
    "cpu-int8-f16": {"backend": "cpu", "dtype": "int8", "kv_cache_dtype": "f16"},
    "cuda": {"backend": "cuda", "dtype": "f32", "kv_cache_dtype": "f32"},  # on torch's twins
}


OFTEN = ("cpu",)  # that ``make test`` runs; the others are of the full matrix


FOR_EACH = {  # tests of every backend, and what of them is run often besides ``OFTEN``
    "test_in_batches": ("cpu-int8-row",),
    "test_with_drafts": (),
    "test_drafts_leave_nothing_behind_in_the_cache": (),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most backends to ``make test-full``, above all the slowest."""
    for item in items:
        name = getattr(item, "originalname", "")
        if name in FOR_EACH:
            backend = item.callspec.params["every_backend"]  # type: ignore[attr-defined]
            together = "together" in item.name and backend == "cpu-int8-row"
            if not (backend in (*OFTEN, *FOR_EACH[name]) or together):
                item.add_marker(pytest.mark.full)


@pytest.fixture(autouse=True, scope="module")
def on_twins() -> Iterator[None]:
    """Let the cuda backend compute on the CPU, in these tests and no others of this process."""
    with pytest.MonkeyPatch.context() as patch:
        compute_on_cpu(patch)
        yield


def skip_without_torch(options: dict[str, Any]) -> None:
    """Skip a test of the cuda backend where its library is not installed."""
    if options["backend"] == "cuda":
        pytest.importorskip("torch", reason="the cuda backend needs torch: make test-gpu")


@pytest.fixture(params=BACKENDS)
def every_backend(request: pytest.FixtureRequest) -> str:
    """Key of ``BACKENDS``; a test that asks for it runs on each."""
    return str(request.param)


@pytest.fixture(
    params=[
        name if name in OFTEN else pytest.param(name, marks=pytest.mark.full) for name in BACKENDS
    ]
)
def backend(request: pytest.FixtureRequest) -> str:
    """Key of ``BACKENDS``; most of them only where all is tested."""
    return str(request.param)


@pytest.fixture(scope="session")
def shared_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the function from a name to the GGUF file of a model that `ridgeline pull` lacks.

    It skips the test where ../shared is absent. ``stories260K`` and ``stories15M`` are converted
    from llama2.c's format; any other name is one of ../shared/models/manifest.json.
    """
    converted = tmp_path_factory.mktemp("converted")

    def find(name: str) -> Path:
        if not name.startswith("stories"):
            return shared_files(f"{name}.gguf")[0]
        out = converted / f"{name}.gguf"
        if not out.exists():
            folder = SHARED_MODELS / name  # the smallest comes with ../shared itself
            small = [folder / "stories260K.bin", folder / "tok512.bin"]
            convert(*(small if folder.is_dir() else shared_files(CHECKPOINT, VOCABULARY)), out)
        return out

    return find
