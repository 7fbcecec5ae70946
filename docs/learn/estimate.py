"""The estimate on paper: what a model on a device can do at most, a line for each formula.

    python estimate.py llama-3.1-8b.json l4 --batch 8 --context 1000 --only step,tokens/s

Sizes come from the model's config.json, speeds from the catalogue of devices. Every line shows its
formula with the numbers in it. Nothing is fitted and nothing measured: no machine is faster.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from ridgeline.engine.setup.home import stores
from ridgeline.model.cost.device_time import StepWork, work_of
from ridgeline.model.cost.format_bytes import storage_of_dtype
from ridgeline.model.cost.hardware import Device
from ridgeline.model.cost.shapes import ModelShape, weight_params
from ridgeline.planner.catalogue import devices
from ridgeline.planner.memory.model_spec import read_model_spec


@dataclass(frozen=True)
class Estimate:
    """A model on some devices that share each layer, and a step of equal sequences.

    Attributes:
        shape, device: the two.
        ranks: devices; together they read and calculate so many times as fast, at best.
        batch, context: sequences of a step, and the tokens that each has in the cache.
        bits, kv_bits: of a weight, and of a number in the cache.
    """

    shape: ModelShape
    device: Device
    ranks: int = 1
    batch: int = 1
    context: int = 1000
    bits: float = 16
    kv_bits: float = 16

    @property
    def params(self) -> int:
        """All weights."""
        return weight_params(self.shape)

    @property
    def work(self) -> StepWork:
        """What plans say that a step reads and calculates, with weights of 16 bits."""
        return work_of(self.shape, storage_of_dtype("bf16", self.shape), self.kv_bits / 8)

    @property
    def active(self) -> float:
        """Weights that a token is multiplied by: of the embedding it looks up a row."""
        return (self.work.token_flops + self.work.row_flops) / 2

    @property
    def num_experts(self) -> tuple[int, int]:
        """Experts that a token uses, and that a layer has; 0 of 0 without experts."""
        found = [(m.active, m.copies) for _, m in self.shape.matrices() if m.copies > 1]
        return max(found, default=(0, 0))

    def weight_read_bytes(self, num_tokens: int) -> float:
        """Return the bytes of the weights that a step reads: of experts those that some token uses.

        Tokens choose their experts by chance here.
        """
        work = self.work
        met = sum(one.num_bytes * (1 - (1 - one.share) ** num_tokens) for one in work.experts)
        return (work.layer_bytes + work.head_bytes + met) * self.bits / 16

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of a token in the cache."""
        return self.work.position_bytes

    @property
    def kv_bytes(self) -> float:
        """Bytes of the cache of all sequences; where a layer has a window, of its last tokens."""
        total = 0.0
        for layer in self.shape.layers:
            kept = min(self.context, layer.cache.window or self.context)
            total += kept * layer.cache.values_per_token() * self.kv_bits / 8
        return self.batch * total

    @property
    def bytes_per_s(self) -> float:
        """What the devices read."""
        return self.ranks * self.device.read_bytes_per_s

    @property
    def flop_per_s(self) -> float:
        """What the devices calculate, in 16 bits."""
        return self.ranks * (self.device.ops_per_s("bf16") or self.device.ops_per_s("f16") or 0)

    @property
    def read_s(self) -> float:
        """Seconds for reading what a step of answers reads."""
        return (self.weight_read_bytes(self.batch) + self.kv_bytes) / self.bytes_per_s

    @property
    def compute_s(self) -> float:
        """Seconds for the products of a step of answers."""
        return self.batch * 2 * self.active / self.flop_per_s

    @property
    def step_s(self) -> float:
        """The least that a step of answers takes: the slower of the two decides."""
        return max(self.read_s, self.compute_s)

    def prompt_s(self, num_tokens: int) -> float:
        """Return the least that a prompt takes in one step."""
        read_s = self.weight_read_bytes(num_tokens) / self.bytes_per_s
        return max(read_s, num_tokens * 2 * self.active / self.flop_per_s)


def lines(one: Estimate, new_tokens: int) -> list[tuple[str, str]]:
    """Return names of formulas, and the formulas with their numbers."""
    read, step_flop = one.weight_read_bytes(one.batch), one.batch * 2 * one.active
    intensity = step_flop / (read + one.kv_bytes)
    ridge = one.flop_per_s / one.bytes_per_s
    slower = "memory" if one.read_s >= one.compute_s else "arithmetic"
    prompt = max(1, one.context)
    found = [
        ("weights", f"{_b(one.params)} x {one.bits / 8:g} bytes = "
         f"{_gb(one.params * one.bits / 8)}"),
        ("kv", f"{_kv(one)} = {one.kv_token_bytes:,.0f} bytes"),
        ("cache", f"{one.batch} x {one.context:,} tokens{_windows(one)}: {_gb(one.kv_bytes)}"),
        ("flop", f"2 x {_b(one.active)} = {2 * one.active / 1e9:.1f} GFLOP"),
        ("read", f"weights {_gb(read)} + KV {_gb(one.kv_bytes)} = "
         f"{_gb(read + one.kv_bytes)}"),
        ("intensity", f"{step_flop / 1e9:,.1f} GFLOP / {_gb(read + one.kv_bytes)} = "
         f"{intensity:.2f} FLOP a byte"),
        ("ridge", f"{one.flop_per_s / 1e9:,.0f} GFLOP/s / {_gb(one.bytes_per_s)}/s = "
         f"{ridge:.0f} FLOP a byte"),
        ("reading", f"{_gb(read + one.kv_bytes)} / {_gb(one.bytes_per_s)}/s = "
         f"{1e3 * one.read_s:.1f} ms"),
        ("calculating", f"{step_flop / 1e9:,.1f} GFLOP / {one.flop_per_s / 1e9:,.0f} GFLOP/s = "
         f"{1e3 * one.compute_s:.2f} ms"),
        ("step", f"at least {1e3 * one.step_s:.1f} ms: {slower} decides"),
        ("tokens/s", f"{one.batch} / {1e3 * one.step_s:.1f} ms = {one.batch / one.step_s:,.0f} "
         f"at most, {1 / one.step_s:,.0f} for each"),
        ("prompt", f"{prompt:,} tokens: at least {1e3 * one.prompt_s(prompt):,.0f} ms"),
        ("answer", f"{new_tokens:,} tokens x {1e3 * one.step_s:.1f} ms = "
         f"{new_tokens * one.step_s:,.1f} s at least"),
    ]  # fmt: skip
    used, all_experts = one.num_experts
    if all_experts:
        share = 1 - (1 - used / all_experts) ** one.batch
        met = f"{used} of {all_experts} a token; {one.batch} tokens meet {share:.0%} of them"
        found.insert(1, ("experts", met))
    return found


def _kv(one: Estimate) -> str:
    """Return the formula of a token's cache; of layers that differ, only what they are together."""
    caches = {layer.cache for layer in one.shape.layers}
    size, layers = f"{one.kv_bits / 8:g} bytes", len(one.shape.layers)
    if len(caches) > 1:
        return f"{one.kv_token_bytes * 8 / one.kv_bits:,.0f} values of {layers} layers x {size}"
    (cache,) = caches
    if cache.kind == "latent":
        return f"{layers} layers x {cache.values_per_head} values x {size}"
    return f"2 x {layers} layers x {cache.num_heads} heads x {cache.values_per_head // 2} x {size}"


def _windows(one: Estimate) -> str:
    """Return how many layers keep the last tokens alone, and how many tokens."""
    windows = [layer.cache.window for layer in one.shape.layers]
    kept = [size for size in windows if size is not None and size < one.context]
    return f", {len(kept)} of {len(windows)} layers keep {min(kept)}" if kept else ""


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.3g} GB" if num_bytes < 1e11 else f"{num_bytes / 1e9:,.0f} GB"


def _b(params: float) -> str:
    return f"{params / 1e9:,.2f} B weights"


def main() -> None:
    """Print the estimate that the arguments ask for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a config.json")
    parser.add_argument("device", help="as ridgeline plan --list-devices has it")
    for name, usual in (("ranks", 1), ("batch", 1), ("context", 1000), ("new-tokens", 100)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    for name in ("bits", "kv-bits"):
        parser.add_argument(f"--{name}", type=float, default=16)
    parser.add_argument("--only", default="", help="names of lines, with commas between them")
    given = parser.parse_args()
    if given.device not in devices():
        parser.error(f"there is no device {given.device!r}: see ridgeline plan --list-devices")
    one = Estimate(
        read_model_spec(given.model, stores()).shape, devices()[given.device],
        given.ranks, given.batch, given.context, given.bits, given.kv_bits,
    )  # fmt: skip
    name = given.model.removesuffix(".json")
    where = f"{given.ranks} x {given.device}" if given.ranks > 1 else given.device
    print(f"{name} on {where}\n")
    chosen = [name for name in given.only.split(",") if name]
    for formula, numbers in lines(one, given.new_tokens):
        if not chosen or formula in chosen:
            print(f"{formula:12} {numbers}")


if __name__ == "__main__":
    main()
