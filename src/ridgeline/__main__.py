"""The program's first lines: Ctrl-C ends it quietly even before the command line is imported.

The command line's imports take up to a second; nothing may be imported here that takes long.
"""

import os
import signal


def main() -> None:
    """Import and run the command line."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # otherwise our parent process wants it ignored
        signal.signal(signal.SIGINT, lambda signum, frame: os._exit(130))
    from ridgeline.cli.main import main as run

    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
