"""The table of ``bench gpu``: numbers, what each result decides, and last what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.bench.gpu import MOST_CHARACTERS, decisions, is_wrong, passes, share_of_floor, table
from ridgeline.planner.catalogue import devices

CARD = devices()["h200-sxm"]
END = {"what": "end", "code": 0, "seconds": 12.0, "tail": []}


def check(part: str, what: str, ok: bool, **values: Any) -> dict[str, Any]:
    return {"part": part, "what": what, "ok": ok, **values}


def decode(batch: int, way: str, ms: float) -> dict[str, Any]:
    """A step whose least time on the card is 5 ms."""
    return {
        "part": "engine",
        "what": f"llama3-8b bf16 decode {batch} x 1024, {way}",
        "way": way,
        "batch": batch,
        "ms": ms,
        "tok_per_s": batch / ms * 1e3,
        "host_us": {"arranges": 100.0, "rest": 50.0},
        "least_bytes": CARD.read_bytes_per_s * 5e-3,
        "flops": 1.0,
    }


def checked(**codes: int) -> list[dict[str, Any]]:
    """Parts that ended with these codes, each after a check that was right."""
    return [
        finding
        for part, code in codes.items()
        for finding in (check(part, "logits", True), {"part": part, **END, "code": code})
    ]


def product(what: str, us: float, speed_of_torch: float, who: str) -> dict[str, Any]:
    found = {"part": "products", "what": f"{what}, 64 rows, {who}", "rows": 64, "who": who}
    return {**found, "us": us, "speed_of_torch": speed_of_torch}


# Findings, and the one line that they decide.
DECIDED = {
    "clean": ([check("smoke", "logits", True)], "right? yes"),
    "a wrong kernel": ([check("correct", "gate", False)], "right? NO: 1 wrong"),
    "a crash": ([{"part": "smoke", **END, "code": -6}], "right? NO: 1 wrong"),
    "bits": (
        [
            check("bits", "qkv, ours", True, same_bits=True),
            {"part": "bits", "what": "qkv, torch", "same_bits": False},
        ],
        "torch's product keeps them in 0 of 1",
    ),
    "other bits": (
        [check("bits", f"{name}, ours", False, same_bits=False) for name in "abcdef"],
        "same bits? NO, in 6 of 6: one tile for all numbers of rows there, or the promise is void "
        "on this card: a, ours; b, ours; c, ours; d, ours and 2 more",
    ),
    "a clean gate": (checked(smoke=0, correct=0, bits=0), "--backend auto? this GPU, from now on"),
    "a gate that a kernel fails": (
        [*checked(smoke=0, correct=0, bits=0), check("correct", "gate", False)],
        "--backend auto? the processor",
    ),
    "at the floor": ([decode(1, "graphs and ahead", 6.0)], "83% of the floor, the target"),
    "enough": ([decode(64, "graphs and ahead", 8.0)], "62% of the floor, enough to land"),
    "slow": ([decode(256, "graphs and ahead", 10.0)], "50% of the floor, LOW"),
    "ahead": (
        [decode(8, "graphs and ahead", 10.0), decode(8, "graphs", 11.0)],
        "running ahead gains 10% to 10%: keep it",
    ),
    "ahead in vain": (
        [decode(8, "graphs and ahead", 11.0), decode(8, "graphs", 10.0)],
        "NO GAIN",
    ),
    "products": ([product("o", 9.0, 0.95, "ours")], "keep the tiles"),
    "slow products": ([product("o", 9.0, 0.8, "ours")], "try other tiles there: o, 64 rows, ours"),
    "int4": (
        [product("o", 9.0, 0.95, "ours"), product("o", 10.0, 0.9, "int4")],
        "int4 is slower than bf16 at 64 rows",
    ),
    "fast int4": (
        [product("o", 9.0, 0.95, "ours"), product("o", 8.0, 1.1, "int4")],
        "int4 is as fast as bf16 at 64 rows",
    ),
    "attention": (
        [
            {"part": "roof", "what": "copy", "tb_per_s": 4.0},
            {"part": "attention", "what": "decode a", "tb_per_s": 2.0, "num_bytes": 1 << 30},
            {"part": "attention", "what": "decode b", "tb_per_s": 0.5, "num_bytes": 1 << 20},
        ],
        "attention of single tokens at 70% of the fastest copy or read: NO in 1: try other rows "
        "and warps for it: decode a",
    ),
    "fast attention": (
        [
            {"part": "roof", "what": "copy", "tb_per_s": 4.0},
            {"part": "attention", "what": "decode a", "tb_per_s": 3.0, "num_bytes": 1 << 30},
        ],
        "attention of single tokens at 70% of the fastest copy or read: yes, in all 1 of 64 MiB",
    ),
    "peer": (
        [
            {"part": "peer", "what": "sdpa", "peer": "warm", "tok_per_s": 400.0},
            {
                "part": "engine",
                "what": "llama3-8b bf16 workload",
                "workload": "warm",
                "tok_per_s": 480.0,
            },
        ],
        "1.2 times transformers' batching, TOO LITTLE",
    ),
}


@pytest.mark.parametrize("name", DECIDED)
def test_a_result_decides_something(name: str) -> None:
    findings, wanted = DECIDED[name]
    lines = list(decisions(findings, CARD))
    assert sum(wanted in line for line in lines) == 1, lines


def test_without_findings_nothing_is_decided() -> None:
    assert list(decisions([], CARD)) == []
    assert list(decisions([decode(1, "graphs and ahead", 6.0)], None)) == []  # an unknown card


def test_a_gpu_passes_when_all_was_checked_and_nothing_was_wrong() -> None:
    whole = checked(smoke=0, correct=0, bits=0)
    left_out = {"part": "bits", "what": "left out", "cases": ["qkv"]}
    assert passes(whole) is True
    assert passes([*whole, {"part": "engine", **END, "code": -9}]) is True  # too slow is not wrong
    assert passes([*whole, left_out]) is None
    assert passes(checked(smoke=0, correct=0)) is None
    assert passes(checked(smoke=0, correct=0, bits=-11)) is False
    assert passes([*checked(smoke=0), check("smoke", "memory", False)]) is False


def test_a_step_cannot_be_faster_than_bytes_and_operations_allow() -> None:
    step = decode(1, "graphs", 10.0)
    assert share_of_floor(step, CARD) == pytest.approx(0.5)
    step["flops"] = CARD.peak_ops_per_s["bf16"] * 8e-3
    assert share_of_floor(step, CARD) == pytest.approx(0.8)
    assert share_of_floor(check("smoke", "logits", True), CARD) is None


def test_what_is_wrong_stands_at_the_very_end() -> None:
    findings = [
        check("smoke", "logits", True, error=1e-3),
        check("smoke", "tokens", False, failed="RuntimeError: no kernel image"),
        {"part": "smoke", **END},
        decode(64, "graphs and ahead", 8.0),
        decode(64, "graphs", 10.0),
        product("o", 9.5, 1.0, "torch"),
        product("o", 9.0, 1.05, "ours"),
        {"part": "engine", **END, "code": None, "seconds": 150.0},
        {"part": "roof", **END, "code": -6, "tail": ["a warning", "Aborted"]},
        {"part": "peer", "what": "skipped", "why": "transformers is not installed"},
        {"part": "peer", "what": "flash", "failed": "ImportError: flash_attn"},
        {"part": "bits", "what": "left out", "cases": ["qkv", "o"]},
    ]
    lines = table(findings, CARD).splitlines()
    assert lines[-4:] == [
        "WRONG smoke: tokens failed RuntimeError: no kernel image",
        "WRONG engine: ended at its deadline after 150 s ",
        "WRONG roof: ended with -6 after 12 s: Aborted",
        "3 wrong",
    ]
    assert "smoke: 1 of 2 checks right, 12 s" in lines
    assert "peer: skipped, transformers is not installed" in lines
    assert "peer: flash failed, ImportError: flash_attn" in lines
    assert "bits: no time left for qkv, o" in lines
    assert (
        "engine    llama3-8b bf16 decode 64 x 1024: tok_per_s graphs and ahead 8,000, graphs "
        "6,400, of floor 62%, host us arranges 100, rest 50"
    ) in lines
    assert "products  o, 64 rows: us torch 9.5, ours 9" in lines
    assert table([check("smoke", "logits", True)], CARD).endswith("nothing is wrong")
    assert "=>" not in table(findings, CARD, decides=False)


def test_of_a_long_table_the_end_is_kept() -> None:
    findings: list[dict[str, Any]] = [
        {"part": "attention", "what": f"decode {i}", "us": 9.0} for i in range(500)
    ]
    findings += [check("correct", f"gate {i}", False, error=0.5) for i in range(60)]
    text = table(findings, CARD)
    assert MOST_CHARACTERS - 300 < len(text) <= MOST_CHARACTERS
    assert text.endswith("WRONG and 35 more\n60 wrong")
    assert "decode 499" in text


def test_a_part_that_was_ended_is_wrong_and_one_that_was_skipped_is_not() -> None:
    assert is_wrong({"part": "smoke", **END, "code": None})
    assert not is_wrong({"part": "smoke", **END})
    assert not is_wrong({"part": "peer", "what": "skipped", "why": ""})
