"""One line, at start, for weights that run otherwise than in blocks of their file.

It says what the file has, what that becomes, and how many bytes either takes; nothing is read.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.backends import BACKENDS
from ridgeline.engine.setup.resolve import EngineConfig
from ridgeline.model.files.tensors import Checkpoint

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
