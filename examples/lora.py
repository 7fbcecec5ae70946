"""An adapter changes how a model answers, request by request, and the model stays as it was.

The model is a tiny random one of Phi-3's shape and the adapter is random too: nothing is learnt
here, so the answers are no words. They show that a request with the adapter gets another answer,
also in one batch with others, and that the next one without it gets the old answer.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ridgeline import LLM, SamplingParams

HIDDEN, INNER, LAYERS, RANK = 64, 128, 2, 4
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
rng = np.random.default_rng(1)


def random(rows: int, columns: int) -> np.ndarray:
    """A matrix that keeps values about as large as they are."""
    return rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)


def write_model(path: Path) -> Path:
    """A Phi-3 of two layers, whose tokens are bytes."""
    path.mkdir()
    config = {
        "architectures": ["Phi3ForCausalLM"], "vocab_size": len(LETTERS), "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    weights = {
        "model.embed_tokens.weight": random(len(LETTERS), HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": 4 * random(len(LETTERS), HIDDEN),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        weights |= {
            f"{layer}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{layer}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{layer}.self_attn.qkv_proj.weight": random(3 * HIDDEN, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": random(HIDDEN, HIDDEN),
            f"{layer}.mlp.gate_up_proj.weight": random(2 * INNER, HIDDEN),
            f"{layer}.mlp.down_proj.weight": random(HIDDEN, INNER),
        }
    save_file(weights, path / "model.safetensors")
    return path


def write_adapter(path: Path) -> Path:
    """An adapter of two of its matrices, as PEFT saves one."""
    path.mkdir()
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 8, "bias": "none",
        "target_modules": ["qkv_proj", "down_proj"],
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config))
    shapes = {"self_attn.qkv_proj": (3 * HIDDEN, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
    tensors = {}
    for i in range(LAYERS):
        for module, (rows, columns) in shapes.items():
            name = f"base_model.model.model.layers.{i}.{module}"
            tensors[f"{name}.lora_A.weight"] = random(RANK, columns)
            tensors[f"{name}.lora_B.weight"] = random(rows, RANK)
    save_file(tensors, path / "adapter_model.safetensors")
    return path


words = [LETTERS.index(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
params = SamplingParams(temperature=0, max_tokens=24, allowed_token_ids=words)
prompt = "Tell me a story."

with tempfile.TemporaryDirectory() as folder:
    model, adapter = write_model(Path(folder) / "model"), write_adapter(Path(folder) / "adapter")
    with LLM(model, lora={"other": adapter}, kv_cache_memory="1MiB") as llm:
        for name in (None, "other", None):
            [out] = llm.generate(prompt, params, lora_request=name)
            print(f"{name or 'the model itself':16}  {out.outputs[0].text}")
        print("both in one batch:")
        for out in llm.generate([prompt, prompt], params, lora_request=[None, "other"]):
            print(f"{'':16}  {out.outputs[0].text}")
