"""``ridgeline batch``: the requests of a file answered into a file, and on after a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from ridgeline import LLM
from ridgeline.cli.commands.models import loaded
from ridgeline.cli.flags import UsageError, flags
from ridgeline.engine.setup.options import Options
from ridgeline.engine.setup.progress import count_bar, say
from ridgeline.serve.batch_files.lines import RequestFile
from ridgeline.serve.batch_files.run import BatchProgress, Stopped
from ridgeline.system.machine import DiskFull, check_room

_LEAST_LINE_BYTES = 128  # of an answer, or of a reason why there is none
Load = Callable[[str], AbstractContextManager[LLM]]


class Files(NamedTuple):
    """Where the answers go.

    Attributes:
        output: the requests that were answered well.
        errors: lines that are no requests, and requests that were refused or failed.
        progress: all of them, until the last one is answered.
    """

    output: Path
    errors: Path
    progress: Path

    @property
    def folder(self) -> Path:
        """Where the answers and the progress file are."""
        return self.output.absolute().parent

    @classmethod
    def of(cls, source: Path, output: Path, errors: Path | None) -> Files:
        """Return the files, checked before work begins. Raises UsageError."""
        errors = errors or output.with_suffix(f".errors{output.suffix}")
        progress = output.with_name(f"{output.name}.part")
        if not source.is_file():
            reason = "is not a file" if source.exists() else "does not exist"
            raise UsageError(f"{source} {reason}")
        if len({path.absolute() for path in (source, output, errors)}) < 3:
            raise UsageError("input, output and errors must be three different files")
        folder = output.absolute().parent
        for path in (output, errors):
            if not path.absolute().parent.is_dir():
                raise UsageError(f"{path}: there is no folder {path.parent}")
        if not os.access(folder, os.W_OK):
            raise UsageError(f"{folder} cannot be written to")
        for path in (output, errors):
            if path.exists() and not progress.exists():
                raise UsageError(f"{path} already exists: remove it, or name another file")
        return cls(output, errors, progress)


class _Survey(NamedTuple):
    """What a file of requests has in it: how many, how many of them are wrong, and a model."""

    num_lines: int
    num_wrong: int
    model: str | None


@flags("options", Options)
def batch_command(
    requests: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="File of requests: .jsonl in OpenAI's batch format, or see --column.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="File for the answers.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Model that answers all requests. Default: the one that the first request names."
        ),
    ] = None,
    errors: Annotated[
        Path | None,
        typer.Option(
            help="File for failed requests, with the reasons. Default: OUTPUT.errors.jsonl."
        ),
    ] = None,
    column: Annotated[
        str,
        typer.Option(
            help="Column of a .csv or .tsv file, or field of .jsonl, that has the prompts. Other "
            "files have a prompt on each line."
        ),
    ] = "",
    url: Annotated[
        str, typer.Option(help="Route for plain prompts. Default: /v1/chat/completions.")
    ] = "",
    body: Annotated[
        str | None,
        typer.Option(help='Fields for requests that do not have them, such as {"max_tokens": 64}.'),
    ] = None,
    in_order: Annotated[
        bool, typer.Option("--in-order/--as-completed", help="Order of the answers.")
    ] = True,
    *,
    options: Options,
) -> None:
    """Answer the requests of a file. After a kill, the same command resumes where it was."""
    files = Files.of(requests, output, errors)
    try:
        source = RequestFile(requests, column, url, _parse_fields(body))
    except ValueError as error:
        raise UsageError(error) from error

    if not batch(source, files, model, partial(loaded, options=options), in_order=in_order):
        raise typer.Exit(1)


def batch(
    source: RequestFile, files: Files, model: str | None, load: Load, *, in_order: bool
) -> bool:
    """Answer the requests of ``source`` into ``files``; return whether any was answered well.

    Raises UsageError if there is nothing to answer or no model, and OSError or ValueError.
    """
    survey = _survey(source)
    if not survey.num_lines:
        raise UsageError(f"{source.path} has no requests")
    name = model or survey.model
    if survey.num_wrong < survey.num_lines and name is None:
        raise UsageError(f"no line of {source.path} names a model: give --model")
    if name is None or survey.num_wrong == survey.num_lines:
        first = next(source.lines())
        reason = f"line {first.number}: {first.problem}"
        raise UsageError(f"{source.path}: no line is a request; {reason}")
    if survey.num_wrong:
        say(f"{survey.num_wrong:,} of {survey.num_lines:,} lines are not requests")
    _check_room(files, survey.num_lines)
    with load(name) as llm:
        return _answer(llm, source, files, name, survey, answers_all=bool(model), in_order=in_order)


def _answer(
    llm: LLM,
    source: RequestFile,
    files: Files,
    name: str,
    survey: _Survey,
    *,
    answers_all: bool,
    in_order: bool,
) -> bool:
    from ridgeline.serve import compose  # its web framework would slow other commands
    from ridgeline.trust.stages import ServerStages

    of = compose.RequestSource(source, name, answers_all)
    progress = BatchProgress(files.progress, compose.batch_identity(llm, of))
    total = survey.num_lines
    try:
        if progress:
            say(f"resuming: {len(progress):,} of {total:,} lines are done")
        with count_bar("Answering") as report:
            report(len(progress), total)
            compose.answer_file(
                llm, of, progress, lambda: report(len(progress), total), ServerStages
            )
        check_room(files.folder, progress.num_bytes, files.output.name, "move its folder")
        progress.finish(files.output, files.errors, in_order=in_order)
        progress.remove()
    except (KeyboardInterrupt, Stopped, OSError, DiskFull) as error:
        done = f"{len(progress):,} of {total:,} lines are done: the same command goes on from there"
        if isinstance(error, KeyboardInterrupt):
            say(f"stopped; {done}")
            raise
        raise ValueError(f"{_reason(error)}; {done}") from error
    finally:
        progress.close()
    say(f"{progress.num_completed:,} of {total:,} lines are answered in {files.output}")
    if progress.num_failed:
        say(f"{progress.num_failed:,} are not: {files.errors} says why")
    return progress.num_completed > 0


def _check_room(files: Files, num_lines: int) -> None:
    """Raise UsageError where not even the shortest answers fit, in both files."""
    done = files.progress.stat().st_size if files.progress.exists() else 0
    least = 2 * num_lines * _LEAST_LINE_BYTES - done
    name = f"the shortest possible {files.output.name}"
    try:
        check_room(files.folder, least, name, "name another folder")
    except DiskFull as error:
        raise UsageError(error) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _survey(source: RequestFile) -> _Survey:
    """Read a file of requests once, before a model is loaded. Raises ValueError or OSError."""
    num_lines = num_wrong = 0
    model = None
    for line in source.lines():
        num_lines += 1
        num_wrong += bool(line.problem)
        named = line.body.get("model")
        model = model or (named if isinstance(named, str) and named else None)
    return _Survey(num_lines, num_wrong, model)


def _parse_fields(text: str | None) -> dict[str, Any]:
    """Return the fields that all bodies get. Raises UsageError if that is no JSON object."""
    try:
        fields = json.loads(text or "{}")
    except ValueError as error:
        raise UsageError(f"--body is {text!r:.80}: it is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise UsageError(f"--body is {text!r:.80}: it must be a JSON object")
    return fields
