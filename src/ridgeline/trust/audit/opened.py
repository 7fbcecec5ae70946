"""The audit log of a server, as its flags ask for it, from start to end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ridgeline.engine.setup.home import default_home
from ridgeline.serve.http.options import ServeOptions
from ridgeline.trust.audit.files import LogFiles
from ridgeline.trust.audit.lines import key_of
from ridgeline.trust.audit.log import AuditLog
from ridgeline.version import __version__

KEY_FILE = "audit.key"  # in Ridgeline's own folder, if no other is named


@contextmanager
def audit_log(options: ServeOptions, name: str = "") -> Iterator[AuditLog]:
    """Have the log that ``options`` ask for, in a folder of this name below theirs.

    Raises OSError or ValueError if it cannot be written.
    """
    assert options.audit is not None
    files = LogFiles(
        options.audit / name,
        key_of(options.audit_key or default_home() / KEY_FILE),
        rotate_bytes=options.audit_rotate_bytes,
        keep_s=options.audit_keep_s,
    )
    log = AuditLog(files, is_strict=options.audit_strict)
    log.submit({"event": "start", "version": __version__, "pid": os.getpid()})
    try:
        yield log
    finally:
        log.close()
