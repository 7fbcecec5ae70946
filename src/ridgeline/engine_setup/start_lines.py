"""What a start says of a model: where its answers may be others than the publisher's."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.engine_setup.conversion import conversion_line
from ridgeline.engine_setup.resolve import EngineConfig
from ridgeline.models.pre_tokenizers import names_no_pre_tokenizer
from ridgeline.models.tensors import Checkpoint
from ridgeline.physics.arch import ModelArch


def start_lines(model: str, checkpoint: Checkpoint, config: EngineConfig) -> list[str]:
    """Return the lines to say, each with the way out. ``model`` is what the user calls it."""
    told, lines = checkpoint.tokenizer, []
    if isinstance(told, Mapping) and names_no_pre_tokenizer(told):
        lines.append(
            f"{checkpoint.path.name} names no pre-tokenizer: its text is cut as llama.cpp's default"
        )
    lines.append(_long_rope_line(checkpoint.arch, config.max_model_len))
    if checkpoint.arch.chunk:
        lines.append(
            f"sequences end at {checkpoint.arch.max_position:,} tokens: beyond them layers of this "
            f"model see chunks of {checkpoint.arch.chunk:,} tokens, which is not computed"
        )
    lines.append(conversion_line(model, checkpoint, config))
    return [line for line in lines if line]


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
