"""One chat template in processes of its own, with limits on its time and memory (``text.child``).

This module knows nothing of jinja2 and messages: JSON values go in, text comes out.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from ridgeline.text.child import BUSY_TIMES, Children, Overdue

_PROGRAM = Path(__file__).with_name("process.py")
_MAX_CPU_S = 2.0


class Renderer:
    """Renders one template; any thread may call."""

    def __init__(self, source: str) -> None:
        """Prepare to render ``source``, in jinja2 as Hugging Face's templates are written."""
        self._children = Children(_PROGRAM, lambda: source)

    def start(self) -> None:
        """Start the process now, so that the first rendering need not wait for it."""
        self._children.start()

    def render(self, variables: Mapping[str, Any], now: datetime) -> str:
        """Return the text that the template makes of ``variables``, which are JSON values.

        Its ``strftime_now`` writes ``now``, in the time zone of that.

        Raises:
            ValueError: the template is broken, refuses, or takes more time or memory than it may.
            ChildProcessError: no process can be started any more, or the machine is too busy.
        """
        question = {"now": now.isoformat(), "variables": variables, "limit_s": _MAX_CPU_S}
        try:
            answer: dict[str, str] | None = self._children.ask(question, BUSY_TIMES * _MAX_CPU_S)
        except ChildProcessError as error:
            if self._children.has_started or isinstance(error, Overdue):
                raise ChildProcessError(f"chats cannot be written now: {error}") from None
            raise ValueError(f"the chat template fails: {error}") from None
        if answer is None:
            raise ValueError(
                f"the chat template fails: it takes more than {_MAX_CPU_S:g} s of computing, "
                "or more memory than any template needs"
            )
        if "error" in answer:
            raise ValueError(f"the chat template fails: {answer['error']}")
        return answer["text"]

    def close(self) -> None:
        """End the processes, if there are such."""
        self._children.close()
