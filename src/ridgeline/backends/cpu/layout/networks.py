"""Padded shapes of what a token goes through by itself: a network, or a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Experts:
    """How many experts there are, and how a row's are chosen: see ``arch.model``."""

    num: int
    per_token: int
    normalised: bool
    scale: float
    bias: bool = False  # of the router and of all projections
    own_scales: bool = False
    dense: FeedForward | None = None  # what all rows go through as well
    dense_gated: bool = False  # its output is weighed
    dense_apart: bool = False  # it reads other rows than the experts, and norms stand behind both
    router: str = "softmax"  # see ``arch.model``
    choice_bias: bool = False
    num_groups: int = 1
    groups_met: int = 1
    jitter: float = 0.0
    scales_input: bool = False  # its weight multiplies what an expert reads

    @property
    def weights(self) -> int:
        """Weights of a row: the experts', and behind them that of the dense network."""
        return self.num + (self.dense is not None)

    @property
    def route_stride(self) -> int:
        """Bytes from row to row of them: whole vectors."""
        return -(-self.weights // 16) * 64

    @property
    def is_limited(self) -> bool:
        """Whether experts are chosen by other numbers than the shares of a softmax."""
        return self.router == "sigmoid" or self.choice_bias or self.num_groups > 1

    @property
    def choice_bytes(self) -> int:
        """Bytes of what they are chosen by: a number for each, and two for each group."""
        if self.router == "sparsemixer":  # products, and those of experts that are left
            return 2 * self.route_stride
        groups = -(-self.num_groups // 16) * 64
        return self.route_stride + 2 * groups if self.is_limited else 0


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A feed-forward network, or a mixture of experts: see ``arch.model``."""

    size: int  # padded inner width, of each expert if there are some
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    experts: Experts | None = None
    given: bool = False  # what gates let through is no product: see ``Layer.input_size``
    gate_scale: float = 1.0  # of what goes into the activation of a gate
    out_scale: float = 1.0  # of what gates let through

    @property
    def inner(self) -> tuple[str, ...]:
        """The matrices that make the inner values."""
        if self.given:
            return ("gate",)
        return ("gate", "up") if self.gated else ("up",)

    @property
    def gate_up_stride(self) -> int:
        """Bytes from row to row of gates and ups; off the multiples of a page."""
        return (2 * self.size + 48) * 4
