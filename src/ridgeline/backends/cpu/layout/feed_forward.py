"""What a token goes through by itself, its widths padded, and room for the choice of experts."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.model.shape.model import Experts, Mlp


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A feed-forward network, or a mixture of experts: see ``model.shape.model``."""

    of: Mlp | Experts  # with padded widths
    given: bool = False  # what gates let through is no product: see ``Layer.input_size``

    @property
    def size(self) -> int:
        """Padded inner width, of each expert if there are some."""
        return self.of.size

    @property
    def activation(self) -> str:
        """What gates, or inner values, go through."""
        return self.of.activation

    @property
    def gated(self) -> bool:
        """Whether gates multiply inner values."""
        return self.of.gated

    @property
    def bias(self) -> bool:
        """Whether all projections have a bias."""
        return self.of.bias

    @property
    def gate_scale(self) -> float:
        """What multiplies what goes into the activation of a gate."""
        return self.of.gate_scale if isinstance(self.of, Mlp) else 1.0

    @property
    def out_scale(self) -> float:
        """What multiplies what gates let through."""
        return self.of.out_scale if isinstance(self.of, Mlp) else 1.0

    @property
    def experts(self) -> Experts | None:
        """The experts, if it is a mixture of some."""
        return self.of if isinstance(self.of, Experts) else None

    @property
    def dense(self) -> FeedForward | None:
        """What all rows go through beside experts, if there is such a network."""
        network = self.experts and (self.experts.shared or self.experts.beside)
        return FeedForward(network) if network else None

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


def route_stride(experts: Experts) -> int:
    """Return the bytes from row to row of weights: the experts', and behind them the dense one."""
    count = experts.num + bool(experts.shared or experts.beside)
    return -(-count // 16) * 64


def is_limited(experts: Experts) -> bool:
    """Return whether experts are chosen by other numbers than the shares of a softmax."""
    return experts.router == "sigmoid" or experts.choice_bias or experts.num_groups > 1


def choice_bytes(experts: Experts) -> int:
    """Return the bytes of what they are chosen by: a number for each, and two for each group."""
    if experts.router == "sparsemixer":  # products, and those of experts that are left
        return 2 * route_stride(experts)
    groups = -(-experts.num_groups // 16) * 64
    return route_stride(experts) + 2 * groups if is_limited(experts) else 0
