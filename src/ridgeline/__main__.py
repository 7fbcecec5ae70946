"""The program's first lines: Ctrl-C ends it quietly even before the command line is imported.

The command line's imports take up to a second; nothing may be imported here that takes long.
"""

import gc
import os
import re
import signal
import sys


def main() -> None:
    """Import and run the command line."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # otherwise our parent process wants it ignored
        signal.signal(signal.SIGINT, lambda signum, frame: os._exit(130))
    for name in ("COLUMNS", "LINES"):  # libraries take all that looks like digits for a number
        if not re.fullmatch(r"[1-9][0-9]{0,5}", os.environ.get(name, "1")):
            del os.environ[name]
    gc.disable()  # it would look through all that is imported, again and again: a fifth of a start
    try:
        from ridgeline.cli.main import main as run
    except (ImportError, MemoryError) as error:
        if "--debug" in sys.argv:
            raise
        cause = error.__cause__ or error  # NumPy's own words are a page
        sys.exit(f"ridgeline: it cannot start: {str(cause) or type(cause).__name__}")

    gc.freeze()  # all this stays
    gc.enable()
    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
