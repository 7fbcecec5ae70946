"""``ridgeline quantize``: a model written again in fewer bits, an adapter merged on the way."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ridgeline.cli.commands.models import Model
from ridgeline.cli.flags import UsageError
from ridgeline.engine.quantise import gptq
from ridgeline.engine.quantise.imatrix import read_imatrix, write_imatrix
from ridgeline.engine.quantise.job import QuantisedFile, QuantiseOptions, quantise_file
from ridgeline.engine.quantise.source import SourceFile, additions, read_directory, read_source
from ridgeline.engine.quantise.targets import PLAIN, TARGETS
from ridgeline.engine.setup.home import locate
from ridgeline.engine.setup.progress import count_bar, say
from ridgeline.model.files.gguf.parts import part_paths
from ridgeline.system.machine import usable_cpus
from ridgeline.system.report import gb, of_pairs
from ridgeline.system.terminal import console, drawn
from ridgeline.text.checkpoint_tokenizer import tokenizer_of

_TARGETS = (*TARGETS, gptq.TARGET)
_WINDOW = 512
_LEAST_TOKENS, _MOST_TOKENS = 2_000, 4_096  # of a text; more changes little, and takes longer


def quantize(
    model: Model,
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="The .gguf file to write; a directory for int4-gptq."),
    ],
    to: Annotated[
        str, typer.Option(metavar="FORMAT", help=f"What to write: {', '.join(_TARGETS)}.")
    ],
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Text like what the model will read: errors are weighted by its importance and "
            "compensated in later weights."
        ),
    ] = None,
    imatrix: Annotated[
        Path | None,
        typer.Option(help="Weight errors by llama.cpp's importance matrix, a GGUF file."),
    ] = None,
    imatrix_out: Annotated[
        Path | None, typer.Option(help="Also write the importance that --calibrate measures.")
    ] = None,
    merge_lora: Annotated[
        Path | None, typer.Option(help="LoRA adapter to merge first: a PEFT folder or a GGUF file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT.")] = False,
) -> None:
    """Write a model again in fewer bits, layer by layer.

    A GGUF file is made of a GGUF file or a directory of safetensors, int4-gptq of such a directory.
    """
    to = to.lower()  # llama-quantize and Ollama write them in capitals
    if to not in _TARGETS:
        raise UsageError(f"--to {to}: give one of {', '.join(_TARGETS)}")
    located = locate(model).path
    is_directory = to == gptq.TARGET
    if is_directory:
        _check_folder(out, imatrix, imatrix_out)
    else:
        _check_out(located, out, imatrix_out, force=force)
    if imatrix_out is not None and calibrate is None:
        raise UsageError("--imatrix-out writes what --calibrate FILE measures: give that too")
    if imatrix is not None and calibrate is not None:
        raise UsageError("--imatrix and --calibrate both say what matters: give one of them")
    begin_s = time.monotonic()
    source = read_directory(located) if is_directory else read_source(located)
    _say_types(source)
    options = QuantiseOptions(
        to,
        windows(source, calibrate) if calibrate else (),
        read_imatrix(imatrix, source.raw) if imatrix else {},
        additions(merge_lora, source) if merge_lora else {},
        usable_cpus(),
    )
    with count_bar(f"Writing {out.name}", note="weights") as report:
        quantise = gptq.quantise_directory if is_directory else quantise_file
        done = quantise(source, out, options, report)
    if imatrix_out is not None and calibrate is not None:
        num_tokens = sum(map(len, options.windows))
        write_imatrix(imatrix_out, done.spreads, num_tokens, calibrate.name)
    _show(source, out, done, options, time.monotonic() - begin_s)


def windows(source: SourceFile, text_file: Path) -> list[tuple[int, ...]]:
    """Return a text as token ids, in windows that begin as the model's texts do.

    Raises ValueError if it is no text, or too short to say anything.
    """
    checkpoint = source.checkpoint
    try:
        text = text_file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{text_file}: not UTF-8 text: {error.reason} at {error.start}") from error
    ids = tokenizer_of(checkpoint).encode(text, parse_special=False, add_bos=False)
    if len(ids) < _LEAST_TOKENS:
        raise ValueError(
            f"{text_file}: {len(ids)} tokens, fewer than the {_LEAST_TOKENS:,} that calibration "
            f"needs: give a longer text"
        )
    begin = checkpoint.begin_ids
    room = min(_WINDOW, checkpoint.arch.max_position) - len(begin)
    last = min(len(ids), _MOST_TOKENS)
    return [(*begin, *ids[low : min(low + room, last)]) for low in range(0, last, room)]


def _check_folder(out: Path, imatrix: Path | None, imatrix_out: Path | None) -> None:
    """Raise UsageError if a directory cannot be written where it should be."""
    if out.exists():
        raise UsageError(f"{out} exists: name another directory, or remove it")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out}: there is no folder {out.parent}")
    if imatrix is not None or imatrix_out is not None:
        raise UsageError(f"--imatrix and --imatrix-out are for GGUF files, not for {gptq.TARGET}")


def _check_out(model: Path, out: Path, imatrix_out: Path | None, *, force: bool) -> None:
    """Raise UsageError if a file cannot be written where it should be."""
    if out.suffix != ".gguf":
        raise UsageError(f"{out}: a GGUF file is written, so its name ends in .gguf")
    for path in (out, imatrix_out):
        if path is None:
            continue
        if not path.absolute().parent.is_dir():
            raise UsageError(f"{path}: there is no folder {path.parent}")
        if path.is_dir():
            raise UsageError(f"{path} is a folder: name a file in it")
        if any(path.exists() and path.samefile(part) for part in _files(model)):
            raise UsageError(f"{path} is the model itself: name another file")
        if path.exists() and not force:
            raise UsageError(f"{path} exists: name another file, or replace it with --force")
    if imatrix_out is not None and imatrix_out.absolute() == out.absolute():
        raise UsageError(f"--imatrix-out {imatrix_out}: that is OUT: name another file")


def _files(model: Path) -> Sequence[Path]:
    return [part for part in part_paths(model) if part.exists()]


def _say_types(source: SourceFile) -> None:
    """Say it if most weights are quantised already: that quality is lost, and more will be."""
    counts: dict[str, int] = {}
    for tensor in source.raw.values():
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.nbytes
    most = max(counts, key=lambda dtype: counts[dtype])
    if most not in PLAIN:
        say(
            f"note: most weights of this model are {most} already: what that lost stays lost; "
            f"a file of 16 bits gives a better result"
        )


def _show(
    source: SourceFile, out: Path, done: QuantisedFile, options: QuantiseOptions, seconds: float
) -> None:
    before = sum(tensor.nbytes for tensor in source.raw.values())
    bits = 8 * done.num_bytes / done.num_weights
    sizes = f"{gb(before)} -> {gb(done.num_bytes)}"
    lines = [
        ("size", f"{sizes}, {bits:.2f} bits a weight"),
        ("types", _in_words(done.types, done.num_weights)),
    ]
    if done.instead:
        wider = f"{done.instead} tensors are wider: 256 does not divide their rows"
        lines.append(("note", wider))
    if options.windows or options.importance:
        share = done.calibrated / done.num_weights
        how = f"{sum(map(len, options.windows)):,} tokens" if options.windows else "--imatrix"
        lines.append(("calibrated", f"{share:.0%} of the weights, by {how}"))
    if options.added:
        lines.append(("merged", f"the adapter, into {len(options.added)} tensors"))
    lines.append(("time", f"{seconds:.1f} s"))
    console().print(drawn(of_pairs(lines), whole=(0,)))
    for command in (f"serve {out}", f"bench quality {out} --against {source.checkpoint.path}"):
        console().print(f"next: ridgeline {command}", soft_wrap=True)


def _in_words(types: Mapping[str, int], total: int) -> str:
    ordered = sorted(types, key=lambda dtype: -types[dtype])
    return ", ".join(f"{types[dtype] / total:.1%} {dtype}" for dtype in ordered)
