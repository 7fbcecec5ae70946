"""aiperf: a load of streamed chats, all of them answered."""

import json
import os
import subprocess

COUNT = 16


def test_a_load(tmp_path, exported):
    done = subprocess.run(
        [
            "aiperf",
            "profile",
            "--model",
            os.environ["RIDGELINE_MODEL"],
            "--url",
            os.environ["RIDGELINE_URL"],
            "--endpoint-type",
            "chat",
            "--streaming",
            "--tokenizer",
            exported,
            "--synthetic-input-tokens-mean",
            "64",
            "--output-tokens-mean",
            "16",
            "--request-count",
            str(COUNT),
            "--concurrency",
            "4",
            "--artifact-dir",
            "out",
            "--ui",
            "none",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    (result,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
    found = json.loads(result.read_text())
    assert found["request_count"]["avg"] == COUNT
    assert "error_request_count" not in found or not found["error_request_count"]["avg"]
