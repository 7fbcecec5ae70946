"""The short table at the end: numbers, what they decide, and last of all what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ridgeline.bench.gpu.decisions import decisions, is_wrong, share_of_floor
from ridgeline.bench.gpu.parts import Finding
from ridgeline.model.cost.hardware import Device

MOST_CHARACTERS = 11_000  # what a terminal's record of a run usually keeps whole
_MOST_WRONG = 25
_MOST_REASON = 200
_HOST_MATTERS = 64  # sequences of a step
# What is shown of a finding, and after which name.
_NUMBERS = (
    "tok_per_s", "ms", "us", "sdpa_us", "tb_per_s", "gb_per_s", "tflops_per_s",
    "sdpa_tflops_per_s", "seconds", "steps", "num_ahead", "gb",
)  # fmt: skip


def table(findings: Sequence[Finding], device: Device | None, *, decides: bool = True) -> str:
    """Return the last lines of a run; of too many the first are left out.

    ``device`` is the card as the catalogue knows it, if it does; a run on a CPU decides nothing.
    """
    lines = [
        *_numbers(findings, device),
        *_ends(findings),
        *(f"=> {line}" for line in decisions(findings, device) if decides),
        *_wrong(findings),
    ]
    kept: list[str] = []
    room = MOST_CHARACTERS
    for line in reversed(lines):
        room -= len(line) + 1
        if room < 0:
            break
        kept.insert(0, line)
    return "\n".join(kept)


def _numbers(findings: Sequence[Finding], device: Device | None) -> Iterator[str]:
    """Yield what was measured; what was measured in several ways has one line."""
    together: dict[tuple[str, str], list[Finding]] = {}
    for one in findings:
        has_ways = "way" in one or "who" in one
        what = one["what"].rpartition(", ")[0] if has_ways else one["what"]
        together.setdefault((one["part"], what), []).append(one)
    for (part, what), ones in together.items():
        first = ones[0]
        if what == "end" or (part == "correct" and "us" not in first):
            continue
        if "way" in first:
            shown = _ways(ones, "way", "tok_per_s")
        elif "who" in first:
            shown = _ways(ones, "who", "us")
        else:
            shown = [f"{name} {_short(first[name])}" for name in _NUMBERS if name in first]
        if (share := share_of_floor(first, device)) is not None:
            shown.append(f"of floor {share:.0%}")
        if "host_us" in first and first["batch"] >= _HOST_MATTERS:
            host = ", ".join(f"{name} {us:.0f}" for name, us in first["host_us"].items())
            shown.append(f"host us {host}")
        if shown:
            yield f"{part:9} {what}: {', '.join(shown)}"


def _ways(findings: Sequence[Finding], name: str, number: str) -> list[str]:
    """Return one number of each way."""
    first, *rest = [f"{one[name]} {_short(one[number])}" for one in findings]
    return [f"{number} {first}", *rest]


def _short(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or value >= 1000 else f"{value:.3g}"


def _ends(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield how each part ended, what it left out, and what others could not."""
    for one in findings:
        if one["what"] == "left out":
            yield f"{one['part']}: no time left for {', '.join(one['cases'])}"[:_MOST_REASON]
        elif "failed" in one and not is_wrong(one):
            yield f"{one['part']}: {one['what']} failed, {one['failed']}"[:_MOST_REASON]
        elif one["what"] == "skipped":
            yield f"{one['part']}: skipped, {one['why']}"
        elif one["what"] == "end":
            checks = [c for c in findings if c["part"] == one["part"] and "ok" in c]
            right = sum(bool(check["ok"]) for check in checks)
            yield f"{one['part']}: {right} of {len(checks)} checks right, {one['seconds']:.0f} s"


def _wrong(findings: Sequence[Finding]) -> Iterator[str]:
    wrong = [one for one in findings if is_wrong(one)]
    for one in wrong[:_MOST_WRONG]:
        yield f"WRONG {one['part']}: {_reason(one)}"[:_MOST_REASON]
    if len(wrong) > _MOST_WRONG:
        yield f"WRONG and {len(wrong) - _MOST_WRONG} more"
    yield f"{len(wrong)} wrong" if wrong else "nothing is wrong"


def _reason(finding: Finding) -> str:
    if finding["what"] != "end":
        known = (
            f"{name} {finding[name]}" for name in ("failed", "error", "bad") if name in finding
        )
        return f"{finding['what']} {', '.join(known)}"
    last = (finding["tail"] or [""])[-1]
    if finding["code"] is None:
        return f"ended at its deadline after {finding['seconds']:.0f} s {last}"
    return f"ended with {finding['code']} after {finding['seconds']:.0f} s: {last}"
