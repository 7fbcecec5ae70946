"""From a GGUF file to OpenVINO's own format, by OpenVINO's own reader; NNCF may compress it.

    python -m peers.drivers.openvino_convert MODEL.gguf gguf|int8|int4 OUT

``gguf`` keeps the file's blocks; ``int8`` (per channel) and ``int4`` (symmetric, groups of 64,
embedding in int8) want a file of 16-bit weights. Runs in OpenVINO's environment. A directory in
this format starts in half the time that the GGUF file takes.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import openvino  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]


def convert(source: Path, kind: str, out: Path) -> None:
    """Write ``out``, a directory with model and tokenizer."""
    out.mkdir(parents=True)
    link = out / "model.gguf"  # it saves beside the file that it reads
    link.symlink_to(source.resolve())
    genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
    link.unlink()
    if kind != "gguf":
        _compress(out, kind)


def _compress(directory: Path, kind: str) -> None:
    import nncf  # type: ignore[import-not-found]

    model = openvino.Core().read_model(directory / "openvino_model.xml")
    if kind == "int8":
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
    else:
        mode = nncf.CompressWeightsMode.INT4_SYM
        model = nncf.compress_weights(model, mode=mode, group_size=64, ratio=1.0)
    # The old weights are still mapped: the new ones go elsewhere first.
    openvino.save_model(model, directory / "new.xml", compress_to_fp16=False)
    for suffix in (".xml", ".bin"):
        (directory / f"new{suffix}").replace(directory / f"openvino_model{suffix}")


def main(source: Path, kind: str, out: Path) -> None:
    """Make ``out`` under a temporary name and rename it, so that what is there is whole."""
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".unfinished-{out.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    convert(source, kind, unfinished)
    unfinished.replace(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
