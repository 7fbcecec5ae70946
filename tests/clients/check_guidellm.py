"""guidellm: a load of chats, all of them answered."""

import json
import os
import subprocess


def test_four_streams(tmp_path, exported):
    url, model = os.environ["RIDGELINE_URL"], os.environ["RIDGELINE_MODEL"]
    target = f"kind=openai_http,target={url},model={model}"
    done = subprocess.run(
        [
            "guidellm",
            "run",
            "--backend",
            target,
            "--profile",
            "kind=concurrent,streams=4",
            "--constraint",
            "kind=max_requests,count=16",
            "--disable-progress",
            "--data",
            "kind=synthetic_text,prompt_tokens=64,output_tokens=32",
            "--tokenizer",
            f"kind=huggingface_auto,model={exported}",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"][0]["metrics"]
    assert found["request_totals"]["successful"] == 16, found["request_totals"]
    assert not found["request_totals"]["errored"]
