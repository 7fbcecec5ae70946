"""An adapter is merged into a model and both are written in fewer bits: size, memory, speed, loss.

The adapter is random and small: nothing is learnt here. The loss is the mean KL divergence of next
tokens' distributions from those of the merged model in 8 bits, on a text not calibrated on.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ridgeline import LLM, SamplingParams
from ridgeline.bench.quality import REFERENCE, measure, texts, windows
from ridgeline.engine.setup.home import locate
from ridgeline.engine.setup.options import Options
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.tensors import Checkpoint

CALIBRATION = sorted(Path(__file__).parents[1].glob("docs/*.md"))
RANK, NUM_TOKENS = 4, 192


def write_adapter(path: Path, layers: int, size: int) -> Path:
    """A LoRA adapter of the queries, as PEFT saves it."""
    path.mkdir()
    rng = np.random.default_rng(1)
    tensors = {}
    for i in range(layers):
        name = f"base_model.model.model.layers.{i}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = rng.normal(0, 0.05, (RANK, size)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = rng.normal(0, 0.05, (size, RANK)).astype(np.float32)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def quantize(model: Path, out: Path, *flags: str) -> None:
    command = [sys.executable, "-m", "ridgeline", "quantize", str(model), str(out), *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def loss_of(path: Path, base: Checkpoint) -> float:
    checkpoint = load_checkpoint(path)
    parts = {"text": windows(checkpoint, texts()["prose"], NUM_TOKENS, NUM_TOKENS)}
    return measure(checkpoint, [REFERENCE], parts, Options(), base)[REFERENCE]["text"].mean_kl


def speed_of(path: Path) -> float:
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    with LLM(str(path), kv_cache_memory="32MiB") as llm:
        llm.generate(["Once"], params)
        begin = time.monotonic()
        llm.generate(["Once upon a time"], params)
    return params.max_tokens / (time.monotonic() - begin)


def main() -> None:
    model = locate("smollm2").path
    arch = load_checkpoint(model).arch
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        text = here / "text.txt"
        text.write_text("\n".join(path.read_text() for path in CALIBRATION)[:12_000])
        adapter = write_adapter(here / "adapter", arch.num_layers, arch.hidden_size)
        merge = ("--merge-lora", str(adapter))
        ways = {
            "8 bits": ("q8_0", ()),
            "4 bits": ("q4_k_m", ()),
            "4 bits, calibrated": ("q4_k_m", ("--calibrate", str(text))),
        }
        made = {}
        for name, (target, flags) in ways.items():  # all first: a child's peak counts its parent's
            out, begin = here / f"{target}-{len(flags)}.gguf", time.monotonic()
            quantize(model, out, "--to", target, *merge, *flags)
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
            made[name] = out, time.monotonic() - begin, peak
        base = load_checkpoint(made["8 bits"][0])
        for name, (out, seconds, peak) in made.items():
            print(
                f"{name:18} {out.stat().st_size / 1e6:6.1f} MB, written in {seconds:.1f} s with at "
                f"most {peak:,.0f} MB; {speed_of(out):.0f} tokens/s; KL {loss_of(out, base):.4f}"
            )


main()
