"""Where the model of a name is on this machine; it is pulled if it is not here."""

from __future__ import annotations

import os
from functools import cache

from ridgeline.engine.setup.home import default_home
from ridgeline.engine.setup.progress import bytes_bar, say
from ridgeline.model.hub.find import LocalModel, NotPulledError, find_model, home_expanded
from ridgeline.model.hub.places import Stores
from ridgeline.system.machine import available_bytes, users_home


def stores() -> Stores:
    """Return where models may lie for this user, who may have no home."""
    return Stores.of(home := default_home(), os.environ, users_home() or home)


def locate(model: str, *, verify: bool = False) -> LocalModel:
    """Return where ``model`` is, pulled if it is not here or, with ``verify``, if it is damaged.

    Says, once, which file it is where there was a choice, or where another program has put it.

    Raises:
        ValueError: there is no such model, it cannot be reached, or it does not fit into memory.
        ModelFileError: what arrived is not what its publisher announced.
    """
    places, room_bytes = stores(), available_bytes()
    try:
        located = None if verify else find_model(model, places, room_bytes)
    except NotPulledError:
        located = None
    if located is None:
        # Imported here: what a download needs is a tenth of a start that downloads nothing.
        from ridgeline.model.hub.pull import pull

        done_bytes = 0

        def note(done: int, total: int) -> None:
            nonlocal done_bytes
            done_bytes = done
            report(done, total)

        try:
            with bytes_bar(f"Pulling {model}") as report:
                located = pull(model, places, room_bytes=room_bytes, announce=say, progress=note)
        except KeyboardInterrupt:
            say(f"stopped: the same command resumes from {done_bytes / 1e6:,.0f} MB")
            raise
    is_in_home = located.path.is_relative_to(places.home)
    is_theirs = not is_in_home and located.path != home_expanded(model)
    if located.note or is_theirs:  # of several, or of another program's
        _say_once(f"{model}: {located.note + '; ' if located.note else ''}{located.path}")
    return located


_say_once = cache(say)
