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
BASIC, TEXT = "basic/offline_inference", r"^Generated text: (['\"]).+\1$"
SIZED = r"\(size={}\)$"
PROGRAMS = {  # what each is told, and what it writes of each answer, how often
    f"{BASIC}/basic": ([], r"^Output: +(['\"]).+\1$", 4),
    f"{BASIC}/chat": (FEW, TEXT, 11),
    f"{BASIC}/embed": (["--model", "all-minilm"], SIZED.format(384), 4),
    f"{BASIC}/generate": ([*FEW, "--temperature", "0"], TEXT, 4),
    f"{BASIC}/score": (["--model", "all-minilm"], r"^Score: 0\.\d+$", 2),
    "features/automatic_prefix_caching/automatic_prefix_caching_offline": ([], r"^Output: .", 2),
    "features/structured_outputs/structured_outputs_offline": (
        [], r"by (?:Choice: (?:Posi|Nega)tive|Regex: \w|JSON: \{|Grammar: SELECT col_[12] )", 4,
    ),
    "observability/metrics/offline": (
        [], r"^ridgeline:(?:prompt|generation)_tokens \(counter\) = [1-9]", 2,
    ),
    "rl/batch_invariance/reproducibility_offline": ([], TEXT, 4),
    "pooling/embed/embed_matryoshka_fy_offline": (
        ["--model", "all-minilm"], SIZED.format(32), 6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example(tmp_path, name):
    if not (source := os.environ.get("VLLM_SOURCE")):
        pytest.skip("VLLM_SOURCE names no unpacked source of vLLM")
    arguments, answer, count = PROGRAMS[name]
    text = (Path(source) / "examples" / f"{name}.py").read_text()
    text = re.sub(r"\bfrom vllm(\.[\w.]+)? import", "from ridgeline import", text)
    text = re.sub(r'LLM\(model="[^"]+"', 'LLM(model="smollm2"', text)  # there is no hub here
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
