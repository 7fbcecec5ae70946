"""Run a program against a server of its own: its last argument is the server's base URL.

    python tools/with_server.py MODEL PROGRAM...

The server listens on a free port and ends with the program, whose exit status is returned.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def main(model: str, program: list[str]) -> int:
    """Start the server, wait until it says where it is, run the program, end the server."""
    ridgeline = Path(sys.executable).with_name("ridgeline")
    command = [str(ridgeline), "serve", model, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if match := re.search(r"ready at (http://\S+)", line):
                return subprocess.run([sys.executable, *program, f"{match[1]}/v1"]).returncode
        return 1
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
