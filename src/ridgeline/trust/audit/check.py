"""Whether an audit log is as it was written: what ``ridgeline audit verify`` says of its files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from ridgeline.trust.audit.record_format import (
    HEAD_FILE,
    START,
    ChainPosition,
    Head,
    data_of,
    digest_of,
    file_name,
    files_of,
    is_signed,
    number_of,
    read,
    read_head,
)


@dataclass
class CheckedLog:
    """What was found in the files of one log.

    Attributes:
        folder: where they are.
        num_files: how many there are; ``num_lines``: and lines in them.
        num_requests: lines that are about a request.
        since: the time of the first line; ``until``: of the last.
        head: the last line.
        log: its id; empty for one that an earlier version has written.
        servers: what a router's log says of the logs of its servers, by their ids.
        faults: what is not as it was written, in order.
        notes: what is, and is worth knowing.
    """

    folder: Path
    num_files: int
    num_lines: int = 0
    num_requests: int = 0
    since: str = ""
    until: str = ""
    head: ChainPosition = START
    log: str = ""
    servers: dict[str, dict[str, Any]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def logs_in(paths: Iterable[Path]) -> dict[Path, list[Path]]:
    """Return the files of each log among paths, which are files, or folders with logs in them.

    Raises ValueError or OSError for a path where there is none.
    """
    files_of_log: dict[Path, set[Path]] = {}
    for path in paths:
        if path.is_dir():
            folders = [path, *(one for one in path.rglob("*") if one.is_dir())]
            logs = [one for one in folders if files_of(one) or (one / HEAD_FILE).exists()]
            if not logs:
                raise ValueError(f"{path} has no audit log")
            for folder in logs:
                files_of_log.setdefault(folder, set()).update(files_of(folder))
        elif number_of(path) is None:
            reason = "is not a file of an audit log" if path.exists() else "does not exist"
            raise ValueError(f"{path} {reason}: give files as they were written, or their folder")
        else:
            files_of_log.setdefault(path.parent, set()).add(path)
    return {folder: sorted(files) for folder, files in files_of_log.items()}


def check(
    folder: Path, files: Sequence[Path], key: bytes | None, head: str | None = None
) -> CheckedLog:
    """Check some files of a log, in order. Raises OSError if one cannot be read.

    Args:
        folder: where they are.
        files: all files of the log, or some that follow each other.
        key: of the log; without it a chain that was computed again is not found.
        head: the hash of a line that must be there, as it was kept elsewhere.
    """
    return _Checker(folder, files, key, head).check()


def compare(logs: Sequence[CheckedLog], searched: Sequence[Path]) -> None:
    """Add to checked logs what is wrong with them beside each other.

    Each must be in one place only, and those that a router's log names in their folders beside it,
    if these were ``searched``.
    """
    places: dict[str, list[CheckedLog]] = {}
    for one in logs:
        places.setdefault(one.log, []).append(one)
    for copies in (same for log, same in places.items() if log and len(same) > 1):
        for one in copies:
            others = ", ".join(str(other.folder) for other in copies if other is not one)
            one.faults.append(f"this is the log {one.log}, and so is {others}: one is a copy")
    for router in (one for one in logs if one.servers):
        beside = router.folder.parent
        are_all = any(one.resolve() in router.folder.resolve().parents for one in searched)
        for log, said in router.servers.items():
            _compare_named(router, beside, said, places.get(log, []), are_all=are_all)


def _compare_named(
    router: CheckedLog,
    beside: Path,
    said: dict[str, Any],
    matches: Sequence[CheckedLog],
    *,
    are_all: bool,
) -> None:
    """Compare a log that a router has named with where it was found."""
    named = f"the log {said.get('server_log')} of the server {said.get('server')}"
    folder = said.get("folder")
    if not matches and (folder is None or not are_all):
        where = "of another machine" if folder is None else f"in {beside / str(folder)}"
        router.notes.append(f"{named}, {where}, is not among these")
    elif not matches:
        router.faults.append(f"{named} is not in {beside}: it was removed, or replaced by another")
    elif folder is not None and all(one.folder.name != folder for one in matches):
        others = ", ".join(str(one.folder) for one in matches)
        router.faults.append(f"{named} is in {others}, and was written in {folder}")


class _Checker:
    def __init__(
        self, folder: Path, files: Sequence[Path], key: bytes | None, head: str | None
    ) -> None:
        self._files, self._key, self._wanted = files, key, head
        self._all = files_of(folder)
        self._log = CheckedLog(folder, len(files))
        self._before: ChainPosition | None = None  # the line before, if it could be read
        self._first: dict[str, Any] | None = None
        self._removed: list[ChainPosition] = []  # ends of what the server has removed
        self._is_changed = False  # the line before, which was said
        self._has_wanted, self._is_running = head is None, False
        self._is_unnamed = False  # lines of an earlier version were there, which name no log
        self._head: Head | None = None  # where the log ended when the server last said so

    def check(self) -> CheckedLog:
        has_end = not self._all or self._files[-1:] == self._all[-1:]
        if has_end:
            self._read_head()
        for i, file in enumerate(self._files):
            self._check_file(file, is_last=i == len(self._files) - 1)
        self._check_begin()
        if has_end:
            self._check_end()
        else:
            self._log.notes.append(f"files after {self._files[-1].name} are not among these")
        if not self._has_wanted:
            self._fault(f"no line has the hash {self._wanted}: it is missing, or was changed")
        if self._before:
            self._log.head = self._before
        if self._is_unnamed:
            self._log.notes.append(
                "an earlier version began it, whose lines do not say of which log they are: that "
                "these are another server's would not be noticed"
            )
        return self._log

    def _fault(self, text: str) -> None:
        self._log.faults.append(text)

    # --- lines ---------------------------------------------------------------------------------

    def _check_file(self, file: Path, *, is_last: bool) -> None:
        """Check the lines of a file; pieces that are not lines must be marked by the next one."""
        broken, begin, is_first = bytearray(), 0, True
        try:
            lines = BytesIO(data_of(file))
        except OSError as error:
            self._fault(f"{file} cannot be read: {error.strerror or error}")
            return
        for number, line in enumerate(lines, start=1):
            fields = read(line) if line.endswith(b"\n") else None
            if fields is None:
                begin = begin or number
                broken += line
                continue
            if broken:
                self._check_torn(f"{file}:{begin}", bytes(broken), fields)
                broken.clear()
                begin = 0
            is_changed = self._check_line(f"{file}:{number}", line, fields)
            if is_first and not is_changed:
                self._check_whose(file, fields)
            is_first = False
        if broken and is_last:
            self._log.notes.append(
                f"{file}:{begin} is not whole: it is being written, or the server was killed; its "
                "next start marks it"
            )
        elif broken:
            self._fault(f"{file}:{begin} is not a line of an audit log")

    def _check_torn(self, where: str, broken: bytes, mark: dict[str, Any]) -> None:
        is_marked = mark.get("event") == "torn" and mark.get("bytes") == len(broken)
        if is_marked and mark.get("sha256") == hashlib.sha256(broken).hexdigest():
            self._log.notes.append(
                f"{where} was cut short when the server was killed; its next start has marked it"
            )
        else:
            self._fault(f"{where} is not a line of an audit log")

    def _check_whose(self, file: Path, first: dict[str, Any]) -> None:
        """Check that a file is of the same log as those before it, and has its own number."""
        said, number, log = first.get("log"), first.get("file"), self._log
        if "file" not in first:
            self._is_unnamed = True
            if log.log:
                self._fault(f"{file} does not say of which log it is, as files before it do")
            return
        if log.log and said != log.log:
            self._fault(f"{file} is of the log {said}, and files before it of {log.log}")
        if number != number_of(file):
            was = file_name(number) if isinstance(number, int) else f"file {number}"
            self._fault(f"{file} was written as {was}: it was renamed")
        log.log = log.log or str(said)

    def _check_line(self, where: str, line: bytes, fields: dict[str, Any]) -> bool:
        """Check a line behind the one before it; return whether it was changed."""
        log, place = self._log, ChainPosition(fields["seq"], digest_of(line))
        is_changed = self._key is not None and not is_signed(line, self._key)
        if is_changed:
            self._fault(f"{where} was changed, or written without the key")
        elif self._before is None:
            self._first = fields
        else:
            self._check_order(where, self._before, fields)
        self._before, self._is_changed = place, is_changed
        self._has_wanted |= place.digest == self._wanted
        head = self._head.place if self._head else START
        if head.seq == place.seq and head.digest != place.digest:
            self._fault(f"{where} is not the line that {HEAD_FILE} has")
        log.num_lines += 1
        log.num_requests += fields.get("event") == "request"
        log.since = log.since or fields["time"]
        log.until = fields["time"]
        if not is_changed:
            self._take_event(where, fields)
        return is_changed

    def _check_order(self, where: str, before: ChainPosition, fields: dict[str, Any]) -> None:
        num_missing = fields["seq"] - before.seq - 1
        if num_missing > 0:
            lines = "line is" if num_missing == 1 else "lines are"
            first, last = before.seq + 1, fields["seq"] - 1
            span = f"{first}" if num_missing == 1 else f"{first} to {last}"
            self._fault(f"{where}: {num_missing} {lines} missing before it: {span}")
        elif num_missing < 0:
            self._fault(f"{where} is line {fields['seq']}, after line {before.seq}: it was moved")
        elif fields["before"] != before.digest and not self._is_changed:
            self._fault(f"{where}: the line before it was changed, or is of another log")

    def _take_event(self, where: str, fields: dict[str, Any]) -> None:
        """Take what a line says of the log itself."""
        event, log = fields.get("event"), self._log
        if event == "start":
            if self._is_running:
                log.notes.append(f"{where}: the server before was killed")
            self._is_running = True
        elif event == "stop":
            self._is_running = False
        elif event == "lost":
            log.notes.append(f"{where}: {fields.get('lines')} lines could not be written before it")
        elif event == "missing":
            self._fault(f"{where}: when the server started, {fields.get('why')}")
        elif event == "removed":
            self._removed.append(ChainPosition(fields.get("last", -1), fields.get("head", "")))
        elif event == "named":
            self._is_unnamed, log.log = True, log.log or str(fields.get("log"))
        listed = fields.get("servers")
        named = [*(listed if isinstance(listed, list) else ()), fields]
        for one in named:
            if isinstance(one, dict) and isinstance(one.get("server_log"), str):
                log.servers[one["server_log"]] = one

    # --- both ends -----------------------------------------------------------------------------

    def _check_begin(self) -> None:
        """Check that nothing is missing before the first line but what the server has removed."""
        if self._first is None:
            return
        before = ChainPosition(self._first["seq"] - 1, self._first["before"])
        if before == START or before in self._removed:
            return
        if before.seq < 0:
            self._fault(f"{self._files[0]}: its first line was changed, or is of another log")
        elif self._files[0] == self._all[0]:
            self._fault(f"{before.seq + 1} lines are missing before {self._files[0]}")
        else:
            self._log.notes.append(f"{before.seq + 1} lines before these are in other files")

    def _read_head(self) -> None:
        try:
            self._head = read_head(self._log.folder, self._key)
        except ValueError as error:
            if self._wanted is None:
                self._fault(f"{error}; without it, lines may be missing at the end")

    def _check_end(self) -> None:
        if self._head is None:
            return
        (head, log), last = self._head, self._before or START
        if head.seq > last.seq:
            num = head.seq - last.seq
            lines = "line is" if num == 1 else "lines are"
            self._fault(f"{num} {lines} missing at the end: {HEAD_FILE} has line {head.seq}")
        if self._log.num_lines and log != self._log.log:
            self._fault(f"{HEAD_FILE} is of the log {log}, and the files of {self._log.log}")
        self._log.log = self._log.log or log
