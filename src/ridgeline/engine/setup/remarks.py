"""What a start says of a model: where its answers may be others than the publisher's.

A line says which weights run otherwise than in blocks of their file: what the file has, what that
becomes, and how many bytes either takes; nothing is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ridgeline.backends import BACKENDS
from ridgeline.engine.setup.resolve import EngineConfig
from ridgeline.model.files.gguf.pre_tokenizers import names_no_pre_tokenizer
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.model.shape.model import ModelArch

_FOUR_BITS = ("Q4_", "Q2_", "Q3_", "IQ", "MXFP4")  # and those that have fewer
# What becomes of types, where --dtype leaves it to the engine.
_AGAIN = "8 bits, quantised again"
_OUT_OF_ORDER = f"{_AGAIN}, for its groups are out of order (act-order)"
_BECOME = {
    "INT4": "4 bits, as in the file",
    "INT4_ZERO": "4 bits with zeros, as in the file",
    "INT4_FLOAT_ZERO": "4 bits, zeros rounded to half floats",
    "INT4_ORDERED": _OUT_OF_ORDER,
    "INT8": "8 bits, as in the file",
    "INT8_ZERO": _AGAIN,
    "INT8_ORDERED": _OUT_OF_ORDER,
    "FP8": _AGAIN,
    "NF4": "4 bits, levels rounded to 1/127 of the largest",
    "MXFP4": "4 bits, as in the file",
}
# What running so, by default, added to the mean KL of SmolLM2 on prose (docs/benchmarks.md).
_ADDED_KL = {
    "INT4": 0.004,
    "INT4_ZERO": 0.004,
    "INT4_FLOAT_ZERO": 0.005,
    "INT8": 0.002,
    "FP8": 0.003,
    "NF4": 0.009,
    "MXFP4": 0.003,
}
_FEW_BITS = ("Q2_", "Q3_", "IQ1_", "IQ2_", "IQ3_")  # of GGUF, which nothing runs as they are
_WIDTHS = {"int4": "4 bits", "int8": "8 bits", "int8-row": "8 bits per output"}


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


def conversion_line(model: str, checkpoint: Checkpoint, config: EngineConfig) -> str:
    """Return the line to say, "" where the weights run as they are in the file.

    ``model`` is what the user calls it.
    """
    types = list(dict.fromkeys(tensor.dtype for tensor in checkpoint.tensors.values()))
    few = [name for name in types if name.startswith(_FEW_BITS)]
    if not checkpoint.quantization and not few:
        return ""
    has = checkpoint.quantization or ", ".join(few)
    converted = [name for name in types if name in _BECOME]
    kind = _becomes(converted, config)
    in_memory = sum(BACKENDS[config.backend].packed_bytes(checkpoint, config).values())
    smaller = ""
    if few and not checkpoint.quantization and config.dtype in ("auto", "int8"):
        smaller = "; --dtype int4 takes less, and loses more"
    cost = ""
    if config.dtype == "auto" and converted and _ADDED_KL.keys() >= {*converted}:
        most = max(_ADDED_KL[name] for name in converted)
        cost = f"; that added {most} to the mean KL of SmolLM2"
    return (
        f"{has} runs as {kind}: {checkpoint.nbytes / 1e6:,.0f} MB in the file, "
        f"{in_memory / 1e6:,.0f} MB in memory{smaller}{cost}; "
        f"`ridgeline bench quality {model}` measures what it costs"
    )


def _becomes(types: Sequence[str], config: EngineConfig) -> str:
    """Return what these types, or those that only GGUF has, become."""
    if config.dtype != "auto":
        return _WIDTHS.get(config.dtype, config.dtype)
    return "; ".join(dict.fromkeys(_BECOME[name] for name in types)) or _AGAIN
