"""``ridgeline stage``: some layers of a model that an engine on another machine runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ridgeline.cli.commands.models import Model
from ridgeline.engine.setup.progress import say


def stage(
    model: Model,
    join: Annotated[str, typer.Option(help="HOST:PORT of the engine's --stage-port.")],
    stage_key_file: Annotated[
        Path | None, typer.Option(help="File with the key that the engine has too.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Number of threads. Default: one for each usable core.")
    ] = None,
) -> None:
    """Compute some layers of a model for an engine elsewhere (serve --stages), until it ends."""
    from ridgeline.backends.cpu import join_stage
    from ridgeline.backends.interface import BackendContext
    from ridgeline.engine.setup.build import packed_folder
    from ridgeline.engine.setup.home import default_home, locate
    from ridgeline.model.files.checkpoint import load_checkpoint
    from ridgeline.system.machine import usable_cpus

    host, _, port = join.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"--join is {join!r}: write HOST:PORT, such as 10.0.0.1:9000")
    if threads is not None and threads < 1:
        raise ValueError(f"--threads is {threads}: it must be at least 1")
    checkpoint = load_checkpoint(locate(model).path)
    join_stage(
        checkpoint,
        (host.strip("[]"), int(port)),
        stage_key_file=stage_key_file,
        threads=threads or usable_cpus(),
        context=BackendContext(default_home, say=say),
        digest=checkpoint.contents.digest(packed_folder()),
        say=say,
    )
