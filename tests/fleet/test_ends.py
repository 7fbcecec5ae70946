"""A model that hangs, and a router that is killed: nobody is blinded, and nothing stays behind."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from ridgeline.fleet.servers.worker import json_of
from tests.fleet.test_router import ASK, routing
from tests.waiting import eventually


def test_when_it_is_ready_a_process_has_imported_what_the_first_model_needs(
    folder: Path, tmp_path: Path
) -> None:
    with routing(folder, tmp_path / "log") as routed:
        (spare,) = routed.pids()
        assert "_multiarray_umath" in Path(f"/proc/{spare}/maps").read_text(), "numpy"


def test_a_model_that_hangs_is_named_and_blinds_nobody(folder: Path, tmp_path: Path) -> None:
    """On a busy machine the other model may seem to hang for a moment, too."""
    metrics = (
        'ridgeline:model_answers{model_name="a"} 0.0\n',
        'ridgeline:model_answers{model_name="b"} 1.0\n',
        'ridgeline:num_requests_running{model_name="b"} 0.0',
    )
    states = {"a": "hung", "b": "loaded", "c": "unloaded"}
    with routing(folder, tmp_path / "log", "--step-timeout", "600") as routed:
        (first,) = routed.pids()
        routed.complete("a")
        routed.complete("b")
        os.kill(first, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(routed.complete, "a")
            health = routed.call("/health")
            assert (health[0], health[1]["status"]) == (200, "ok")
            assert "has not answered for" in health[1]["hung"]["a"]
            eventually(lambda: [*routed.call("/health")[1]["hung"]] == ["a"])
            eventually(lambda: routed.states() == states)
            assert "has not answered for" in routed.status("a")["reason"]
            eventually(lambda: all(one in routed.call("/metrics")[1] for one in metrics))
            status, answer, _ = routed.call("/v1/memory?model=a")
            assert (status, answer["error"]["code"]) == (503, "model_hung")
            assert routed.complete("b"), "others go on"
            status, answer, _ = routed.call("/v1/completions", ASK | {"model": "a"})
            assert (status, answer["error"]["code"]) == (503, "model_hung")
            assert answer["error"]["message"].startswith("a has not answered for ")
            os.kill(first, signal.SIGCONT)
            assert waiting.result()
        eventually(lambda: "hung" not in routed.call("/health")[1])
        assert first in routed.pids()


def test_a_model_that_hangs_for_too_long_is_ended(folder: Path, tmp_path: Path) -> None:
    with routing(folder, tmp_path / "log", "--step-timeout", "3") as routed:
        (first,) = routed.pids()
        routed.complete("a")
        os.kill(first, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(routed.complete, "a")
            assert waiting.result(), "by the process that comes after it"
        assert re.search("a has not answered for [0-9]+ s and is ended", routed.log)
        eventually(lambda: "hung" not in routed.call("/health")[1])


def test_models_end_with_a_router_that_is_killed(folder: Path, tmp_path: Path) -> None:
    with routing(folder, tmp_path / "log", TMPDIR=str(tmp_path)) as routed:
        routed.complete("a")
        pids = routed.pids()
        assert pids
        (socket_folder,) = (one.parent for one in tmp_path.glob("*/lock"))
        routed.process.kill()
        eventually(lambda: not any(_runs(pid) for pid in pids))
    assert socket_folder.is_dir()
    with routing(folder, tmp_path / "log", TMPDIR=str(tmp_path)) as first:
        assert not socket_folder.exists(), "the next one removes what is left of it"
        with routing(folder, tmp_path / "log2", TMPDIR=str(tmp_path)):
            assert first.complete("a"), "and leaves what is used"
        assert len(list(tmp_path.glob("*/lock"))) == 2


def _runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("content", [b"\xff" * 120, b'{"status": "o', b""])
def test_what_is_no_json_is_an_error_of_the_link(content: bytes) -> None:
    asked = httpx2.Request("GET", "http://server/health")
    with pytest.raises(httpx2.HTTPError, match="no JSON"):
        json_of(httpx2.Response(200, content=content, request=asked))
