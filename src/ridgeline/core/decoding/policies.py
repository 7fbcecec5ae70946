"""All policies by name: the engine's own, and older ones that read prompts whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ridgeline.core.scheduling.policies import Load, Policy, Queue, SplitFuse, Wish


@dataclass(frozen=True)
class Static:
    """Form a batch, run it until its last member is done, then form the next."""

    name: str = "static"
    reserve_full: bool = True
    whole_prompts: bool = True
    least: int = SplitFuse.least  # not used: prompts run whole

    def wishes(self, running: Queue, waiting: Queue, load: Load, budget: int) -> Iterator[Wish]:
        """Yield the batch, or a new one when the last is done."""
        for seq in running or waiting:
            yield seq, seq.num_pending


@dataclass(frozen=True)
class Orca:
    """Sequences join and leave at every step, prompts whole (Yu et al., Orca, OSDI 2022)."""

    name: str = "orca"
    reserve_full: bool = True
    whole_prompts: bool = True
    least: int = SplitFuse.least  # not used: prompts run whole

    def wishes(self, running: Queue, waiting: Queue, load: Load, budget: int) -> Iterator[Wish]:
        """Yield all sequences, the running ones first."""
        for group in (running, waiting):
            for seq in group:
                yield seq, seq.num_pending


POLICIES: Mapping[str, Static | Orca | SplitFuse] = {
    one.name: one for one in (Static(), Orca(), SplitFuse())
}


def policy_of(name: str, least: int, reserve_full: bool | None) -> Policy:
    """Return a policy of a name, as an engine's record describes it. Raises LookupError."""
    policy = POLICIES[name]
    is_full = policy.reserve_full if reserve_full is None else reserve_full
    return replace(policy, least=least, reserve_full=is_full)
