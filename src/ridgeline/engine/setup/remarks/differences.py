"""What a start says of a model: where its answers may be others than the publisher's."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.engine.setup.remarks.conversion import conversion_line
from ridgeline.engine.setup.resolve import EngineConfig
from ridgeline.model.files.gguf.pre_tokenizers import names_no_pre_tokenizer
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.model.shape.model import ModelArch

_FOUR_BITS = ("Q4_", "Q2_", "Q3_", "IQ", "MXFP4")  # and those that have fewer


def start_lines(model: str, checkpoint: Checkpoint, config: EngineConfig) -> list[str]:
    """Return the lines to say, each with the way out. ``model`` is what the user calls it."""
    told, lines = checkpoint.tokenizer, [f"{model}: {note}" for note in checkpoint.notes]
    if checkpoint.arch.has_head and not checkpoint.eos_ids:
        lines.append(
            f"{model} names no token that ends an answer: answers run to their limit of tokens, or "
            f"to a stop string; name one under eos_token in tokenizer_config.json, or in a GGUF "
            f"file as tokenizer.ggml.eos_token_id"
        )
    if isinstance(told, Mapping) and names_no_pre_tokenizer(told):
        lines.append(f"{checkpoint.path.name} names no pre-tokenizer: llama.cpp's default is used")
    lines.append(_long_rope_line(checkpoint.arch, config.max_model_len))
    if checkpoint.arch.chunk:
        lines.append(
            f"sequences end at {checkpoint.arch.max_position:,} tokens: beyond them layers of this "
            f"model see chunks of {checkpoint.arch.chunk:,} tokens, which is not computed"
        )
    lines.append(conversion_line(model, checkpoint, config))
    if not lines[-1]:  # which says as much of quantised files
        lines.append(_four_bits_line(model, checkpoint, config.dtype))
    return [line for line in lines if line]


def _four_bits_line(model: str, checkpoint: Checkpoint, dtype: str) -> str:
    """Return what to say of ``--dtype int4`` where the file has more bits, else ""."""
    matrices = [one.dtype for one in checkpoint.tensors.values() if len(one.shape) == 2]
    wider = dict.fromkeys(kind for kind in matrices if not kind.startswith(_FOUR_BITS))
    if dtype != "int4" or not wider:
        return ""
    return (
        f"--dtype int4: what the file has as {', '.join(wider)} becomes 4 bits, which raised the "
        f"perplexity of Qwen2.5-Coder 0.5B by 7 %, and the file's own blocks by 0.2 %: those run "
        f"without --dtype; `ridgeline bench quality {model}` measures it"
    )


def _long_rope_line(arch: ModelArch, max_model_len: int) -> str:
    """Return what to say where LongRoPE's factors of long texts serve short ones too, else ""."""
    ropes = [mixer.rope for mixer in arch.attentions if mixer.rope and mixer.rope.long_divisors]
    if not ropes or max_model_len <= (original := ropes[0].original_max_position):
        return ""
    return (
        f"LongRoPE: sequences may have {max_model_len:,} tokens, so positions of all texts turn by "
        f"the factors of long ones; the publisher's code has others for texts of up to "
        f"{original:,} tokens, and --max-model-len {original} takes those"
    )
