"""The most that the device can do: later parts are compared with it."""

from __future__ import annotations

from functools import partial

import torch

from ridgeline.backends.cuda.measure.part import Part


def measure(part: Part) -> None:
    """Measure copies, products, launches and transfers."""
    part.run(
        [
            ("copy", partial(_copy, part)),
            ("product", partial(_product, part)),
            ("launches", partial(_launches, part)),
            ("transfers", partial(_transfers, part)),
        ]
    )


def _copy(part: Part) -> None:
    """Copy numbers of 16 bits; a copy reads and writes."""
    count = (1 << 20) if part.is_tiny else (2 << 30)
    source = torch.zeros(count, dtype=torch.bfloat16, device=part.device)
    target = torch.empty_like(source)
    took_s = part.seconds(lambda: target.copy_(source))
    part.say("copy", tb_per_s=2 * source.nbytes / took_s / 1e12)
    took_s = part.seconds(source.amax)
    part.say("read", tb_per_s=source.nbytes / took_s / 1e12)


def _product(part: Part) -> None:
    n = 128 if part.is_tiny else 8192
    for dtype in (torch.bfloat16, torch.float16):
        a, b = (part.normal(n, n, dtype=dtype) for _ in range(2))
        took_s = part.seconds(partial(torch.mm, a, b))
        name = str(dtype).removeprefix("torch.")
        part.say(f"product {name}", tflops_per_s=2 * n**3 / took_s / 1e12)


def _launches(part: Part) -> None:
    one = torch.zeros(1, device=part.device)

    def many() -> None:
        for _ in range(100):
            one.add_(1)

    part.say("launch in a graph", us=1e6 * part.seconds(many, 100))
    part.say("launch from Python", us=1e6 * part.host_seconds(many, 5) / 100)


def _transfers(part: Part) -> None:
    host = torch.zeros(64 << 20, dtype=torch.uint8, pin_memory=not part.is_tiny)
    there = torch.empty_like(host, device=part.device)
    took_s = part.host_seconds(lambda: there.copy_(host, non_blocking=True), 5)
    part.say("to the device", gb_per_s=host.nbytes / took_s / 1e9)
    took_s = part.host_seconds(lambda: host.copy_(there, non_blocking=True), 5)
    part.say("from the device", gb_per_s=host.nbytes / took_s / 1e9)
    token = torch.zeros(1, dtype=torch.int32, device=part.device)
    part.say("token back", us=1e6 * part.host_seconds(token.tolist, 50))
