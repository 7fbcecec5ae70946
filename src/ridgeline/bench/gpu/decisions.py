"""What each result decides, in a line: the limits are those of the backend's design."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ridgeline.bench.gpu.parts import Finding
from ridgeline.model.cost.hardware import Device

# Shares of the floor that whole steps should reach: what is wanted first, and in the end.
_DECODE = {1: (0.60, 0.79), 64: (0.60, 0.77), 256: (0.60, 0.75)}
_PREFILL = (0.45, 0.62)
_LEAST_OF_TORCH = 0.90  # speed of a product of ours
_LEAST_OF_ROOF = 0.70  # of attention over single tokens
_LARGE_BYTES = 64 << 20  # of keys and values, below which launching is what takes time
_LEAST_OF_PEER = 1.5
_WAY = "graphs and ahead"  # that steps are meant to run
_GATE = {"smoke", "correct", "bits"}  # parts that must be right before "auto" takes a GPU
_SHOWN = 4


def is_wrong(finding: Finding) -> bool:
    """Whether a finding is a check that failed, or a part that did not end by itself."""
    if finding["what"] == "end":
        return bool(finding["code"] != 0)
    return not finding.get("ok", True)


def passes(findings: Sequence[Finding]) -> bool | None:
    """Return whether answers are right on this card; None if not all of it was checked."""
    checks = [one for one in findings if one["part"] in _GATE]
    if any(map(is_wrong, checks)):
        return False
    ended = {one["part"] for one in checks if one["what"] == "end"}
    left = any(one["what"] == "left out" for one in checks)
    return True if ended >= _GATE and not left else None


def floor_s(finding: Finding, device: Device | None) -> float | None:
    """Return the least time of a step on a card, as the planner reckons; None if unknown."""
    if device is None or "least_bytes" not in finding:
        return None
    reads_s = float(finding["least_bytes"]) / device.read_bytes_per_s
    return max(reads_s, float(finding["flops"]) / device.peak_ops_per_s["bf16"])


def share_of_floor(finding: Finding, device: Device | None) -> float | None:
    """Return the least time over the time that a step took."""
    least_s = floor_s(finding, device)
    return None if least_s is None else least_s * 1e3 / float(finding["ms"])


def decisions(findings: Sequence[Finding], device: Device | None) -> Iterator[str]:
    """Yield a line for each question that the findings answer."""
    yield from _correct(findings)
    yield from _bits(findings)
    yield from _gate(findings)
    yield from _steps(findings, device)
    yield from _ahead(findings)
    yield from _products(findings)
    yield from _packed(findings)
    yield from _attention(findings)
    yield from _peer(findings)


def _correct(findings: Sequence[Finding]) -> Iterator[str]:
    checks = [one for one in findings if one["part"] in ("smoke", "correct")]
    wrong = sum(map(is_wrong, checks))
    if wrong:
        yield f"right? NO: {wrong} wrong in smoke and correct: mend these; no speed counts before"
    elif any("ok" in one for one in checks):
        yield "right? yes: smoke and correct are clean, so speeds count"


def _bits(findings: Sequence[Finding]) -> Iterator[str]:
    told = [one for one in findings if one["part"] == "bits" and "same_bits" in one]
    ours = [one for one in told if "ok" in one]
    differ = [one["what"] for one in ours if not one["same_bits"]]
    if differ:
        yield (
            f"same bits? NO, in {len(differ)} of {len(ours)}: one tile for all numbers of rows "
            f"there, or the promise is void on this card: {_few(differ)}"
        )
    elif ours:
        of_torch = [one["same_bits"] for one in told if "ok" not in one]
        yield (
            f"same bits? yes, in all {len(ours)}: tiles may differ by the number of rows; torch's "
            f"product keeps them in {sum(of_torch)} of {len(of_torch)}"
        )


def _gate(findings: Sequence[Finding]) -> Iterator[str]:
    if (passed := passes(findings)) is not None:
        no = "the processor: this GPU has to be right first"
        yield f"--backend auto? {'this GPU, from now on' if passed else no}"


def _steps(findings: Sequence[Finding], device: Device | None) -> Iterator[str]:
    for one in findings:
        share = share_of_floor(one, device)
        wanted = _PREFILL if "prefill" in one["what"] else _DECODE.get(one.get("batch", 0))
        is_meant = " bf16 " in one["what"] and one.get("way", _WAY) == _WAY
        if share is None or wanted is None or not is_meant:
            continue
        first, last = wanted
        verdict = "the target" if share >= last else "enough to land" if share >= first else "LOW"
        yield (
            f"{one['what'].partition(',')[0]}: {share:.0%} of the floor, {verdict} (first "
            f"{first:.0%}, target {last:.0%})"
            + ("" if share >= first else ": see host us, attention, products")
        )


def _ahead(findings: Sequence[Finding]) -> Iterator[str]:
    rates = {one["what"]: one["tok_per_s"] for one in findings if "way" in one}
    gains = {
        what.partition(",")[0]: rate / rates[plain] - 1
        for what, rate in rates.items()
        if what.endswith(_WAY) and (plain := what.removesuffix(" and ahead")) in rates
    }
    if gains:
        least, most = min(gains.values()), max(gains.values())
        verdict = "keep it" if least > -0.02 else "NO GAIN somewhere: see rest and waits of host us"
        yield f"running ahead gains {least:.0%} to {most:.0%}: {verdict}"


def _products(findings: Sequence[Finding]) -> Iterator[str]:
    ours = [one for one in findings if one.get("who") == "ours"]
    slow = [one["what"] for one in ours if one["speed_of_torch"] < _LEAST_OF_TORCH]
    if slow:
        yield (
            f"our product is below {_LEAST_OF_TORCH:.0%} of torch's in {len(slow)} of {len(ours)}: "
            f"try other tiles there: {_few(slow)}"
        )
    elif ours:
        yield f"our product has {_LEAST_OF_TORCH:.0%} of torch's speed everywhere: keep the tiles"


def _packed(findings: Sequence[Finding]) -> Iterator[str]:
    of_64 = {one["what"]: one["us"] for one in findings if one.get("rows") == 64}
    pairs = [(what, us, of_64.get(what.replace("int4", "ours"))) for what, us in of_64.items()]
    slower = [
        what for what, us, wide in pairs if what.endswith("int4") and wide is not None and us > wide
    ]
    if slower:
        yield f"int4 is slower than bf16 at 64 rows: unpack once a step above that: {_few(slower)}"
    elif any(what.endswith("int4") for what in of_64):
        yield "int4 is as fast as bf16 at 64 rows: the packed product serves all numbers of rows"


def _attention(findings: Sequence[Finding]) -> Iterator[str]:
    roofs = [one["tb_per_s"] for one in findings if one["part"] == "roof" and "tb_per_s" in one]
    decodes = [one for one in findings if one["part"] == "attention" and "num_bytes" in one]
    large = [one for one in decodes if one["num_bytes"] >= _LARGE_BYTES]
    if not roofs or not large:
        return
    slow = [one["what"] for one in large if one["tb_per_s"] < _LEAST_OF_ROOF * max(roofs)]
    what = f"attention of single tokens at {_LEAST_OF_ROOF:.0%} of the fastest copy or read"
    if slow:
        yield f"{what}: NO in {len(slow)}: try other rows and warps for it: {_few(slow)}"
    else:
        yield f"{what}: yes, in all {len(large)} of 64 MiB and more"


def _peer(findings: Sequence[Finding]) -> Iterator[str]:
    peers = [one["tok_per_s"] for one in findings if one.get("peer") == "warm"]
    ours = [
        one["tok_per_s"]
        for one in findings
        if one.get("workload") == "warm" and " bf16 " in one["what"] and "llama" in one["what"]
    ]
    if peers and ours:
        ratio = ours[0] / max(peers)
        verdict = "enough" if ratio >= _LEAST_OF_PEER else "TOO LITTLE"
        yield f"{ratio:.1f} times transformers' batching, {verdict} (wanted {_LEAST_OF_PEER})"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return "; ".join(names[:_SHOWN]) + more
