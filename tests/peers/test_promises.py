"""Refused in vain, of a trace: what is simulated again comes as it came then."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from peers.promises import Sent, in_vain

from peers import promises
from ridgeline.foresight.structure import to_json
from tests.foresight.overload import Noise, Promising, overload

WANDERING = Noise(0.0, 0.2, 3.0, 0.0)  # its speed alone


@pytest.mark.full
def test_a_trace_is_simulated_again_at_the_speed_of_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promises, "_MOST_REPLAYED", 20)  # each is a simulation of the whole trace
    server, wishes = Promising(WANDERING, 2), overload(20.0, 2)
    server.run(wishes)
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(to_json(one)) + "\n" for one in server.records))
    plan = [
        Sent(
            wish.prompt,
            wish.num_new,
            wish.arrived_s,
            total_s=wish.total_s,
            sent_s=wish.arrived_s,
            end_s=wish.entered_s if wish.outcome == "refused" else wish.end_s,
            outcome="refused" if wish.outcome == "refused" else "ok",
            promise="" if wish.outcome == "refused" else wish.outcome,
        )
        for wish in wishes
    ]
    num_vain, num_again = in_vain(trace, plan, random.Random(0))
    said = re.search(r"simulated again, (\d+) of (\d+) promises", capsys.readouterr().err)
    assert said is not None
    again, kept = map(int, said.groups())
    assert kept > 150
    assert again >= 0.98 * kept
    assert (num_again, num_vain < 0.3 * num_again) == (20, True)
