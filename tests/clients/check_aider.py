"""aider: one message about a file."""

import os
import subprocess


def test_one_message(tmp_path):
    (tmp_path / "a.py").write_text('print("hi")\n')
    url, model = os.environ["RIDGELINE_URL"], os.environ["RIDGELINE_MODEL"]
    done = subprocess.run(
        [
            "aider",
            "--no-git",
            "--yes-always",
            "--no-check-update",
            "--no-analytics",
            "--no-show-model-warnings",
            "--model",
            f"openai/{model}",
            "--openai-api-base",
            f"{url}/v1",
            "--openai-api-key",
            "x",
            "--map-tokens",
            "0",
            "--message",
            "Say hi",
            "a.py",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert "received." in done.stdout  # "Tokens: N sent, N received."
    assert "APIError" not in done.stdout
