"""A plan in words: the parts of a bar, and one sentence that answers."""

from __future__ import annotations

from ridgeline.planner.memory.ledger import Ledger
from ridgeline.planner.memory.placement import Placement
from ridgeline.system.report import gib


def length(tokens: int | None) -> str:
    """Return a context for people; None is one without an end."""
    return "any length" if tokens is None else f"{tokens:,}"


def parts_of(ledger: Ledger) -> list[tuple[str, int]]:
    """Return the five parts of a bar, which sum to the total."""
    return [
        ("weights", ledger.weights_bytes),
        ("KV cache", ledger.kv_bytes),
        ("activations", ledger.activation_bytes),
        ("framework", ledger.overhead_bytes),
        ("margin", ledger.lines[-1].num_bytes),
    ]


def sentence(placement: Placement) -> str:
    """Return the answer: whether it fits, with how much to spare, and what fits beside it."""
    ledger, setting = placement.ledger, placement.setting
    where = _where(placement)
    if not ledger.fits:
        missing = max(-ledger.spare_bytes, ledger.kv_need_bytes - ledger.kv_budget_bytes)
        ways = " or ".join(placement.would_help)
        hint = f"; it would with {ways}" if ways else "; nothing that was tried makes it fit"
        return f"does not fit on {where}: {gib(missing)} too much{hint}"
    each = " on each" if placement.num_devices > 1 else ""
    sequences = f"{placement.max_concurrency:,} sequence{'s'[: placement.max_concurrency != 1]}"
    if placement.max_concurrency >= 1 << 32:
        sequences = "any number of sequences"
    alternative = ""
    if placement.max_context is None or placement.max_context > setting.context:
        alone = "one sequence" if setting.concurrency == 1 else f"{setting.concurrency:,} sequences"
        alternative = f", or {alone} of {length(placement.max_context)}"
    return (
        f"fits on {where} with {gib(ledger.spare_bytes)} to spare{each}: {sequences} of "
        f"{setting.context:,} tokens{alternative}"
    )


def _where(placement: Placement) -> str:
    setting, device, count = placement.setting, placement.device, placement.num_devices
    if device.id == "here":
        return "this machine"
    if count == 1:
        return f"one {device.name}"
    ways = [f"tensor parallel {setting.tp}"] if setting.tp > 1 else []
    ways += [f"pipeline parallel {setting.pp}"] if setting.pp > 1 else []
    return f"{count} {device.name} ({', '.join(ways)})"
