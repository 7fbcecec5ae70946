"""lm-eval: generation and likelihoods, with the server's tokenizer and with an exported one."""

import json
import os
import shutil
import subprocess
from pathlib import Path

URL, MODEL = os.environ["RIDGELINE_URL"], os.environ["RIDGELINE_MODEL"]
TASKS = Path(__file__).parent / "lm_eval_task"


def run(folder, task, *arguments, kind="local-completions", route="completions"):
    shutil.copytree(TASKS, folder / "tasks")
    model = f"model={MODEL},base_url={URL}/v1/{route},num_concurrent=4,max_retries=1"
    done = subprocess.run(
        [
            "lm_eval",
            "run",
            "--model",
            kind,
            "--tasks",
            task,
            "--include_path",
            ".",
            "--output_path",
            str(folder / "out"),
            "--model_args",
            ",".join([model, *arguments[:1]]),
            *arguments[1:],
        ],
        cwd=folder / "tasks",
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "x"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = (folder / "out").rglob("results*.json")
    return json.loads(found.read_text())["results"][task]


def test_likelihoods_without_set_up(tmp_path):
    assert run(tmp_path, "capitals_choice", "tokenizer_backend=remote")["acc,none"] == 1.0


def test_likelihoods_with_an_exported_tokenizer(tmp_path, exported):
    found = run(tmp_path, "capitals_choice", f"tokenizer={exported}", "--batch_size", "4")
    assert found["acc,none"] == 1.0


def test_rolling_likelihoods(tmp_path, exported):
    remote = run(tmp_path / "remote", "capitals_perplexity", "tokenizer_backend=remote")
    local = run(tmp_path / "local", "capitals_perplexity", f"tokenizer={exported}")
    assert 1 < remote["word_perplexity,none"] < 1e6
    assert local["word_perplexity,none"] == remote["word_perplexity,none"]


def test_generation(tmp_path):
    found = run(tmp_path, "capitals_free", "tokenizer_backend=None,tokenized_requests=False")
    assert found["exact_match,none"] > 0


def test_chat(tmp_path):
    found = run(
        tmp_path,
        "capitals_free",
        "max_gen_toks=8",
        "--apply_chat_template",
        kind="local-chat-completions",
        route="chat/completions",
    )
    assert "exact_match,none" in found
