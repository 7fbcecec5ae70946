"""What is said of long work, on a terminal and where there is none."""

from __future__ import annotations

import io

import pytest

from ridgeline.engine.setup.progress import byte_lines, bytes_bar

MB = 1_000_000


def test_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 100.0
    report = byte_lines("Pulling smollm2", lambda: now_s)
    for now_s in (100.0, 109.9, 110.0, 111.0, 119.9, 120.5, 130.4, 131.0):
        report(int(now_s) * MB, 98_362_432)
    out, err = capsys.readouterr()
    assert not out
    assert err.splitlines() == [
        f"Pulling smollm2: {megabytes} of 98 MB" for megabytes in (110, 120, 131)
    ]


def test_where_the_size_is_unknown_it_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 0.0
    report = byte_lines("Pulling x", lambda: now_s)
    now_s = 11.0
    report(1_234_567_890, 0)
    assert capsys.readouterr().err == "Pulling x: 1,235 MB\n"


class Screen(io.StringIO):
    """A terminal that keeps what is drawn."""

    def isatty(self) -> bool:
        return True


def test_a_bar_shows_nothing_before_there_is_something(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with bytes_bar("Loading x"):
        pass  # all was there already
    assert "/?" not in screen.getvalue()
    assert "Loading" not in screen.getvalue()
    with bytes_bar("Loading x") as report:
        report(1_000_000, 4_000_000)
    assert "Loading x" in screen.getvalue()
    assert "1.0/4.0 MB" in screen.getvalue()
