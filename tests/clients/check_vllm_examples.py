"""vLLM's own offline examples, unchanged but for the name of the package they import.

They are read from the unpacked source of vLLM that VLLM_SOURCE names: its wheel has none of them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FEW = ["--model", "smollm2", "--max-tokens", "8", "--max_model_len=1024"]
PROGRAMS = {  # what each is told, and what it writes of each answer, how often
    "basic": ([], r"^Output: +(['\"]).+\1$", 4),
    "chat": (FEW, r"^Generated text: (['\"]).+\1$", 11),
    "generate": ([*FEW, "--temperature", "0"], r"^Generated text: (['\"]).+\1$", 4),
    "score": (["--model", "all-minilm"], r"^Score: 0\.\d+$", 2),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example(tmp_path, name):
    if not (source := os.environ.get("VLLM_SOURCE")):
        pytest.skip("VLLM_SOURCE names no unpacked source of vLLM")
    arguments, answer, count = PROGRAMS[name]
    text = (Path(source) / "examples/basic/offline_inference" / f"{name}.py").read_text()
    text = re.sub(r"\bfrom vllm(\.[\w.]+)? import", "from ridgeline import", text)
    text = text.replace('LLM(model="facebook/opt-125m")', "LLM()")  # there is no hub here
    (tmp_path / "example.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "example.py", *arguments],
        cwd=tmp_path,
        env=os.environ | {"HOME": os.environ["RIDGELINE_USER_HOME"]},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(re.findall(answer, done.stdout, re.M)) == count, done.stdout
