"""``make test-parity-full``: every key of every family's config flipped in turn, and judged."""

from __future__ import annotations

import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

from tests.parity.tiny import ALL
from tests.parity.verdicts import Judged, flips_of, judge

BAD = ("wrong", "unnamed")
_EVERY = 10  # flips, of which one also runs on the CPU backend


def judge_all(name: str) -> list[Judged]:
    """Judge all flips of a tiny model, one in ten on the CPU backend too."""
    found = []
    for i, flip in enumerate(flips_of(name)):
        found.append(judge(name, flip))
        if i % _EVERY == 0 and found[-1].verdict == "equal":
            found.append(judge(name, flip, "cpu"))
    return found


def table(found: Iterable[Judged]) -> str:
    """Return the verdicts counted by model."""
    counts: dict[str, Counter[str]] = {}
    for one in found:
        counts.setdefault(one.name, Counter())[one.verdict] += 1
    kinds = ("equal", "refused", "impossible", "ours", "unnamed", "wrong")
    lines = [f"{'model':24}" + "".join(f"{kind:>12}" for kind in kinds)]
    counts["all"] = sum(counts.values(), Counter())
    for name, of_name in counts.items():
        lines.append(f"{name:24}" + "".join(f"{of_name[kind]:12}" for kind in kinds))
    return "\n".join(lines)


def main(wanted: list[str]) -> int:
    """Judge the models that begin with one of these names, or all. Returns the exit status."""
    names = [name for name in ALL if name.startswith(tuple(wanted) or "")]
    found: list[Judged] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=context) as pool:
        for name, of_name in zip(names, pool.map(judge_all, names), strict=True):
            found += of_name
            print(
                f"[{len({one.name for one in found})}/{len(names)}] {name}: {len(of_name)} flips",
                flush=True,
            )
            for one in of_name:
                if one.verdict in BAD:
                    print(f"    {one.verdict}: {one.flip}: {one.why}", flush=True)
    print(table(found))
    return 1 if any(one.verdict in BAD for one in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
