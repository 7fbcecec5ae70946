"""What three clouds say on their metadata addresses, as they document it, on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.waiting import PATIENCE_S

MACHINE = "ridgeline_3"


class Cloud:
    """A cloud's address.

    Attributes:
        left_s: None until the machine is taken away.
        resources: which machines Azure's event is about.
        says: what it says instead of anything else, with status 200.
        num_asked: how often it was asked for a notice.
    """

    def __init__(self, name: str) -> None:
        self.name, self.url = name, ""
        self.left_s: float | None = None
        self.resources = [MACHINE]
        self.says: str | None = None
        self.num_asked = 0
        self._was_asked = threading.Condition()

    def wait_asked(self, times: int) -> None:
        """Return when it was asked so many times more."""
        with self._was_asked:
            wanted = self.num_asked + times
            assert self._was_asked.wait_for(lambda: self.num_asked >= wanted, PATIENCE_S)

    def _note_asked(self) -> None:
        with self._was_asked:
            self.num_asked += 1
            self._was_asked.notify_all()

    def answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        """Return status and text for a request."""
        if self.says is not None:
            self._note_asked()
            return 200, self.says
        end = datetime.now(UTC) + timedelta(seconds=self.left_s or 0)
        match self.name, method, path:
            case "aws", "PUT", "/latest/api/token":
                return 200, "AQAEAE"
            case "aws", "GET", "/latest/meta-data/spot/instance-action":
                self._note_asked()
                assert headers["x-aws-ec2-metadata-token"] == "AQAEAE"
                said = {"action": "terminate", "time": end.strftime("%Y-%m-%dT%H:%M:%SZ")}
                return (404, "") if self.left_s is None else (200, json.dumps(said))
            case (
                "azure",
                "GET",
                "/metadata/instance/compute/name?api-version=2021-02-01&format=text",
            ):
                return 200, MACHINE
            case "azure", "GET", "/metadata/scheduledevents?api-version=2020-07-01":
                self._note_asked()
                assert headers["metadata"] == "true"
                event = {
                    "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
                    "EventType": "Preempt",
                    "ResourceType": "VirtualMachine",
                    "Resources": self.resources,
                    "EventStatus": "Scheduled",
                    "NotBefore": format_datetime(end, usegmt=True),
                    "EventSource": "Platform",
                }
                events = [] if self.left_s is None else [event]
                return 200, json.dumps({"DocumentIncarnation": 1, "Events": events})
            case "gcp", "GET", "/computeMetadata/v1/instance/preempted":
                self._note_asked()
                assert headers["metadata-flavor"] == "Google"
                return 200, "FALSE" if self.left_s is None else "TRUE"
        return 404, ""


@contextmanager
def serving_cloud(name: str) -> Iterator[Cloud]:
    """Serve a cloud's address for as long as the block lasts."""
    cloud = Cloud(name)

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            headers = {key.lower(): value for key, value in self.headers.items()}
            status, text = cloud.answer(self.command, self.path, headers)
            self.send_response(status)
            if name == "gcp":
                self.send_header("Metadata-Flavor", "Google")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PUT = _answer

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        cloud.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield cloud
        finally:
            server.shutdown()
            thread.join()
