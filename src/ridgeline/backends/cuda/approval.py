"""Whether ``--backend auto`` takes this machine's GPU: only after ``ridgeline bench gpu`` passed.

What passed is remembered by GPU, versions of torch and Triton, and our own code. If one of them
changes, the gate is closed until the GPU is checked again.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from ridgeline.backends.cuda import device
from ridgeline.system.machine import digest_of_sources, write_whole

FILE = "gpu_gate.json"
_NUM_HEX = 16


class Approval(NamedTuple):
    """What is known of this machine's GPU.

    Attributes:
        is_open: whether "auto" takes it.
        why: the reason, in words.
    """

    is_open: bool
    why: str


def read(home: Path) -> Approval | None:
    """Return whether the GPU passed; None if there is no NVIDIA driver.

    torch is imported only if some GPU has passed before.
    """
    if not device.has_driver():
        return None
    if not (passed := _passed(home)):
        return Approval(False, "the GPU has not passed ridgeline bench gpu yet")
    if why := device.problem():
        return Approval(False, why)
    if date := passed.get(_key()):
        return Approval(True, f"{device.describe()} passed ridgeline bench gpu on {date}")
    return Approval(
        False, f"{device.describe()} has not passed ridgeline bench gpu with this version"
    )


def remember(home: Path, date: str, *, is_right: bool) -> None:
    """Open the gate for this GPU and these versions, or close it. Raises OSError."""
    passed = _passed(home)
    passed.pop(key := _key(), None)
    if is_right:
        passed[key] = date
    content = json.dumps(passed, indent=1).encode()
    write_whole(home / FILE, lambda file: file.write(content))


def _key() -> str:
    """Return what the bits of an answer depend on here."""
    stack = device.facts()
    triton = version("triton") if stack.has_triton else None
    code = digest_of_sources(Path(__file__).parent.parent, ["cuda"])
    return f"{stack.gpu}, torch {stack.torch}, triton {triton}, code {code[:_NUM_HEX]}"


def _passed(home: Path) -> dict[str, str]:
    """Return the dates by key; none of a file that is missing or damaged."""
    try:
        document = json.loads((home / FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    pairs = document.items() if isinstance(document, dict) else ()
    return {key: date for key, date in pairs if isinstance(date, str)}
