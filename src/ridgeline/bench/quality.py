"""What each format costs in quality: the next-token distributions of a text, against f32.

The text is cut into windows; each window is fed to the reference backend in f32 and to the
candidate, and their distributions are compared after every token whose successor is in the window.
Nothing is generated, so no sampling and no scheduling is in the numbers.

Texts are prose, code, other scripts, and text that repeats itself. Nothing is fetched: prose and
code come with every CPython, the rest is beside this file.

Measured in nats and in float64. It does not know how a format computes: a candidate is anything
that returns logits.
"""

from __future__ import annotations

import inspect
import json
import json.decoder
import math
import platform
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import starmap
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ridgeline.engine.setup.build import new_runner
from ridgeline.engine.setup.home import locate
from ridgeline.engine.setup.options import Options
from ridgeline.engine.setup.progress import Report, bytes_bar, count_bar
from ridgeline.engine.setup.resolve import resolve
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.system.report import Table
from ridgeline.system.terminal import console, drawn
from ridgeline.text.checkpoint_tokenizer import tokenizer_of

Tokens = Sequence[int]
Floats = NDArray[np.float32]
# Pages of the manual that every CPython has within it, about 190,000 characters that do not
# repeat each other. Their wording differs a little from one Python version to the next.
TOPICS = ("objects", "types", "execmodel", "import", "compound", "specialnames", "debugger")


class WeightsFormat(NamedTuple):
    """A way to compute, named by the options that choose it."""

    backend: str
    dtype: str
    kv_cache_dtype: str

    def __str__(self) -> str:
        return "/".join(self)


REFERENCE = WeightsFormat("reference", "f32", "f32")
FORMATS = (
    WeightsFormat("cpu", "auto", "int8"),  # the default
    WeightsFormat("cpu", "auto", "f16"),
    WeightsFormat("cpu", "int8", "int8"),
    WeightsFormat("cpu", "int8", "f16"),
    WeightsFormat("cpu", "int8-row", "int8"),
    WeightsFormat("cpu", "int4", "int8"),
    WeightsFormat("cpu", "bf16", "int8"),
    WeightsFormat("cpu", "bf16", "f32"),
    WeightsFormat("cpu", "f32", "int8"),
    WeightsFormat("cpu", "f32", "f32"),
    WeightsFormat("cpu", "auto", "int8-int4"),
    WeightsFormat("cpu", "f32", "int8-int4"),
    REFERENCE,
)

_WINDOW = 512  # tokens of a window, where --max-model-len does not say
_ROWS = 64  # rows of logits held at once: a row may have 150,000


class FormatCandidate(Protocol):
    """A runner, seen as a function from a text to its next-token logits."""

    def prompt_logits(self, tokens: Tokens, start: int = 0) -> Floats:
        """Return logits ``[tokens, vocab]``; ``tokens`` continue a text at position ``start``."""


@dataclass(frozen=True, slots=True)
class Quality:
    """How far a candidate is from the reference.

    Attributes:
        num_predictions: next-token distributions that were compared.
        mean_kl: KL(reference || candidate), nats, mean over the predictions.
        max_kl: the same, of the worst prediction.
        top1_agreement: share of predictions where both find the same token likeliest.
        perplexity: the candidate's on this text.
        perplexity_ratio: that over the reference's.
    """

    num_predictions: int
    mean_kl: float
    max_kl: float
    top1_agreement: float
    perplexity: float
    perplexity_ratio: float


def quality(
    model: str, *, text_file: Path | None, num_tokens: int, options: Options, against: str | None
) -> None:
    """Measure every format that ``options`` leave open; print tables, then one line of JSON.

    ``num_tokens`` are taken of the text, or of each kind of text where none is given. ``against``
    is the model whose weights the reference has: the one that a quantised one was made of.
    Raises ValueError if no format is left, the text is too short, the two models have other
    tokens, or memory does not suffice.
    """
    formats = chosen(options)
    kinds = texts() if text_file is None else {text_file.name: _read(text_file)}
    checkpoint = load_checkpoint(locate(model).path)
    base = load_checkpoint(locate(against).path) if against else checkpoint
    length = options.max_model_len or min(_WINDOW, checkpoint.arch.max_position)
    parts = {
        kind: windows(checkpoint, text, num_tokens, length, whole=text_file is not None)
        for kind, text in kinds.items()
    }
    if parts != {
        kind: windows(base, text, num_tokens, length, whole=text_file is not None)
        for kind, text in kinds.items()
    }:
        raise ValueError(f"--against {against}: it cuts text into other tokens than {model}")
    results = measure(checkpoint, formats, parts, options, base)
    for kind in parts:
        _print(kind, {format: by_kind[kind] for format, by_kind in results.items()})
    facts = {
        "model": checkpoint.path.name,
        "against": base.path.name,
        "python": platform.python_version(),  # prose and code come with it
        "tokens": num_tokens,
        "window": length,
    }
    numbers = {
        str(format): {kind: asdict(row) for kind, row in by_kind.items()}
        for format, by_kind in results.items()
    }
    print(json.dumps(facts | {"formats": numbers}))


def chosen(options: Options) -> list[WeightsFormat]:
    """Return the formats that agree with the options that are not "auto"; ValueError if none."""
    formats = [
        format
        for format in FORMATS
        if all(
            getattr(options, name) in ("auto", value) for name, value in format._asdict().items()
        )
    ]
    if not formats:
        raise ValueError(
            "no format has this --backend, --dtype and --kv-cache-dtype; there are "
            + ", ".join(map(str, FORMATS))
        )
    return formats


def windows(
    checkpoint: Checkpoint, text: str, num_tokens: int, length: int, *, whole: bool = True
) -> list[tuple[int, ...]]:
    """Cut the first ``num_tokens`` tokens of ``text`` into windows of at most ``length`` tokens.

    Each begins as the model's texts begin, with BOS or without. Raises ValueError if the text is
    too short and has to be ``whole``.
    """
    tokenizer = tokenizer_of(checkpoint)
    ids = tokenizer.encode(text, parse_special=False, add_bos=False)
    begin = checkpoint.begin_ids
    num_tokens = num_tokens if whole else min(num_tokens, len(ids))
    if len(ids) < num_tokens:
        raise ValueError(
            f"the text has {len(ids)} tokens, fewer than --tokens {num_tokens}: "
            "give a longer --text, or fewer --tokens"
        )
    room = length - len(begin)
    return [(*begin, *ids[low : min(low + room, num_tokens)]) for low in range(0, num_tokens, room)]


def measure(
    checkpoint: Checkpoint,
    formats: Sequence[WeightsFormat],
    parts: Mapping[str, Sequence[Tokens]],
    options: Options,
    base: Checkpoint | None = None,
) -> dict[WeightsFormat, dict[str, Quality]]:
    """Compare each format with f32 on windows of token ids, by the name of their text.

    The reference has the weights of ``base``, or those of the candidates. It and one candidate are
    in memory at a time. Raises ValueError if that does not fit, an option contradicts a format, or
    the model's logits are not finite.
    """
    options = replace(
        options,
        max_model_len=max(len(ids) for windows in parts.values() for ids in windows),
        max_num_seqs=1,
        max_num_batched_tokens=_ROWS,
    )
    base = base or checkpoint
    if base.arch.vocab_size != checkpoint.arch.vocab_size:
        raise ValueError(
            f"{base.path.name} has {base.arch.vocab_size} tokens, and {checkpoint.path.name} has "
            f"{checkpoint.arch.vocab_size}: they cannot be compared"
        )
    reference = _load(base, REFERENCE, options)
    results: dict[WeightsFormat, dict[str, Quality]] = {}
    for format in formats:
        is_same = format == REFERENCE and base is checkpoint
        candidate = reference if is_same else _load(checkpoint, format, options)
        results[format] = {}
        for kind, of_kind in parts.items():
            with count_bar(f"Measuring {format} on {kind}", note="predictions") as report:
                measured = compare(reference, candidate, of_kind, report)
            if not all(map(math.isfinite, astuple(measured))):
                raise ValueError(f"{format}: logits are not finite; is the model file damaged?")
            results[format][kind] = measured
    return results


@np.errstate(all="ignore")  # values that are not finite are found in the result
def compare(
    reference: FormatCandidate, candidate: FormatCandidate, parts: Sequence[Tokens], report: Report
) -> Quality:
    """Compare the two after each token of the windows but the last, whose successor is not there.

    Both may be the same. ``report`` is told how many of how many predictions are done.
    """
    total = sum(len(ids) - 1 for ids in parts)
    rows: list[tuple[float, bool, float, float]] = []
    for ids in parts:
        for start in range(0, len(ids) - 1, _ROWS):
            answers = ids[start + 1 : start + 1 + _ROWS]
            tokens = ids[start : start + len(answers)]
            wanted = reference.prompt_logits(tokens, start)
            logits = candidate.prompt_logits(tokens, start)
            rows += starmap(_compare_row, zip(wanted, logits, answers, strict=True))
            report(len(rows), total)
    kl, agrees, wanted_loss, loss = np.array(rows, np.float64).T
    return Quality(
        num_predictions=len(rows),
        mean_kl=float(kl.mean()),
        max_kl=float(kl.max()),
        top1_agreement=float(agrees.mean()),
        perplexity=float(np.exp(loss.mean())),
        perplexity_ratio=float(np.exp(loss.mean() - wanted_loss.mean())),
    )


def _compare_row(wanted: Floats, logits: Floats, answer: int) -> tuple[float, bool, float, float]:
    """Return KL, whether the likeliest token is the same, and both surprises at ``answer``."""
    p, q = _log_softmax(wanted), _log_softmax(logits)
    agrees = bool(p.argmax() == q.argmax())
    return float(np.exp(p) @ (p - q)), agrees, -float(p[answer]), -float(q[answer])


def _log_softmax(logits: Floats) -> NDArray[np.float64]:
    shifted: NDArray[np.float64] = logits.astype(np.float64) - logits.max()
    shifted -= np.log(np.exp(shifted).sum())
    return shifted


def _load(checkpoint: Checkpoint, format: WeightsFormat, options: Options) -> FormatCandidate:
    options = replace(options, **format._asdict())
    config = resolve(options, checkpoint, keeps_all=True)
    if config.max_model_len < (options.max_model_len or 0):
        raise ValueError("; ".join(config.notes))
    with bytes_bar(f"Loading {format}") as report:
        return new_runner(config, checkpoint, report)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error.reason} at {error.start}") from error


def _print(kind: str, results: Mapping[WeightsFormat, Quality]) -> None:
    heads = (f"{kind}: backend/dtype/KV cache", "mean KL", "max KL", "top-1", "perplexity", "ratio")
    rows = [
        (
            str(format),
            f"{row.mean_kl:.5f}",
            f"{row.max_kl:.4f}",
            f"{row.top1_agreement:.2%}",
            f"{row.perplexity:.3f}",
            f"{row.perplexity_ratio:.4f}",
        )
        for format, row in results.items()
    ]
    console(100).print(drawn(Table(heads, rows)))


def texts() -> Mapping[str, str]:
    """Return a text of each kind by its name; ValueError where Python comes without its manual."""
    prose = manual()
    code = inspect.getsource(textwrap) + inspect.getsource(json.decoder)
    begin = prose.index("\n\n")
    return {
        "prose": prose,
        "code": code,
        "scripts": Path(__file__).with_name("other_scripts.txt").read_text(encoding="utf-8"),
        "repeats": prose[begin : begin + 700] * 12,
    }


def manual() -> str:
    """Return pages of Python's manual, nothing stripped; ValueError where it is not there."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError("this Python is installed without its manual: give --text FILE") from error
    return "".join(topics[name] for name in TOPICS)
