"""The same weights in another format: what a peer wants to read, made from one GGUF file.

    python -m peers.weights MODEL.gguf FORMAT OUT

FORMAT is a GGML type (``Q4_0``, ``Q8_0``, ``F16``) and OUT a GGUF file, or ``hf-bf16`` or
``hf-int8`` and OUT a directory in Hugging Face layout, tokenizer included. Runs in
Ridgeline's own environment; knows nothing about engines.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.text.checkpoint_tokenizer import tokenizer_of
from ridgeline.text.grammar.export import export_tokenizer

# Ridgeline's name of a tensor in a layer, and Hugging Face's.
_HF_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_HF_OUTSIDE = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight"}


def requantise(source: Path, dtype: str, out: Path) -> None:
    """Write ``source`` again with the matrices of its layers as blocks of ``dtype``.

    Embedding and head are converted only to a type of at least 8 bits: they stay what they are
    in a 4-bit file, as everybody's own 4-bit files have them.
    """
    reader = gguf.GGUFReader(source)
    kind = gguf.GGMLQuantizationType[dtype]
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in (
            "general.architecture",
            "general.file_type",
        ):
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{dtype}"])
    for tensor in reader.tensors:
        stays = len(tensor.shape) == 1 or (dtype == "Q4_0" and not tensor.name.startswith("blk."))
        if stays:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            plain = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, gguf.quants.quantize(plain, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def hugging_face(source: Path, dtype: str, out: Path) -> None:
    """Write ``source`` as a directory of safetensors: bfloat16, or int8 per output channel.

    The int8 form is that of compressed-tensors, with activations quantised per token at run time.

    Raises:
        ValueError: the model is of a family that this does not spell.
    """
    checkpoint = load_checkpoint(source)
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(_hf_config(checkpoint, dtype), indent=1))
    export_tokenizer(checkpoint, tokenizer_of(checkpoint), out)
    tensors = dict(_hf_tensors(checkpoint, dtype))
    # The safetensors format: the length of a JSON header, the header, and the bytes it speaks of.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (kind, array) in tensors.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (out / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in tensors.values():
            file.write(array.tobytes())


def _hf_tensors(
    checkpoint: Checkpoint, dtype: str
) -> Iterator[tuple[str, tuple[str, NDArray[Any]]]]:
    for name, tensor in checkpoint.tensors.items():
        values = tensor.to_f32()
        if name.startswith("layers."):
            _, layer, part = name.split(".")
            spelled = f"model.layers.{layer}.{_HF_NAMES[part]}"
            if dtype == "int8" and values.ndim == 2:
                scale = np.abs(values).max(axis=1, keepdims=True) / 127
                quantised = np.rint(values / np.maximum(scale, 1e-12)).astype(np.int8)
                yield spelled, ("I8", quantised)
                yield f"{spelled}_scale", ("F32", scale)
                continue
        else:
            spelled = _HF_OUTSIDE.get(name, "lm_head.weight")
        yield spelled, ("BF16", _bf16(values))


def _bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _hf_config(checkpoint: Checkpoint, dtype: str) -> dict[str, Any]:
    arch = checkpoint.arch
    first = arch.layers[0]
    mixer, rope = first.known_attention, first.known_attention.rope
    is_plain = all(layer == first for layer in arch.layers) and mixer.window is None
    if not is_plain or mixer.qk_norm or mixer.o_bias or rope is None or rope.divisors:
        raise ValueError(f"{checkpoint.path.name}: only plain Llama and Qwen2 models are rewritten")
    family = "qwen2" if mixer.qkv_bias else "llama"
    config = {
        "model_type": family,
        "architectures": ["Qwen2ForCausalLM" if family == "qwen2" else "LlamaForCausalLM"],
        "hidden_act": "silu",
        "num_hidden_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "intermediate_size": first.ffn.size,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "vocab_size": arch.vocab_size,
        "max_position_embeddings": arch.max_position,
        "rms_norm_eps": arch.norm_eps,
        "rope_theta": rope.theta,
        "tie_word_embeddings": arch.tied_embeddings,
        "eos_token_id": list(checkpoint.eos_ids),
        "bos_token_id": checkpoint.bos_id,
        "torch_dtype": "bfloat16",
    }
    if dtype == "int8":
        eight_bits = {"num_bits": 8, "type": "int", "symmetric": True}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**eight_bits, "strategy": "channel", "dynamic": False},
                    "input_activations": {**eight_bits, "strategy": "token", "dynamic": True},
                }
            },
        }
    return config


def main(source: Path, wanted: str, out: Path) -> None:
    """Make ``out`` under a temporary name and rename it, so that what is there is whole."""
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".unfinished-{out.name}")
    if unfinished.is_dir():
        shutil.rmtree(unfinished)
    if wanted.startswith("hf-"):
        hugging_face(source, wanted.removeprefix("hf-"), unfinished)
    else:
        requantise(source, wanted, unfinished)
    unfinished.replace(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
