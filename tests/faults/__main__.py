"""Run rows at full size: ``python -m tests.faults T01 --count 1000``; without a row, list them.

``all`` is every row of one server, half an hour on two idle cores; ``fleet`` those of several,
about two hours.
"""

from __future__ import annotations

import argparse
import atexit
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from ridgeline.engine.setup.home import default_home
from tests.engine.test_llm import write_model
from tests.faults.oracles import Unreachable
from tests.faults.rows import LEFT_OUT, ROWS
from tests.own_home import own_home


def main() -> int:
    """Run what the command line names; exit status 1 if an oracle fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="such as T01, all or fleet")
    parser.add_argument("--count", type=int, help="how often; default: the row's full size")
    parser.add_argument("--ci", action="store_true", help="the size that the tests use")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if unknown := set(options.rows) - {"all", "fleet"} - {row.id for row in ROWS}:
        parser.error(f"there is no row {', '.join(sorted(unknown))}")
    if not options.rows:
        print(f"row  {'what happens':50} {'CI':>5} {'full':>8}  status")
    failed = 0
    home = Path(tempfile.mkdtemp(prefix="ridgeline-faults-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    os.environ |= own_home(home / "home", default_home())
    for row in ROWS:
        if not options.rows:
            status = f"all but: {row.beyond}" if row.beyond else "runs"
            print(f"{row.id}  {row.title:50} {row.ci:>5} {row.full:>8}  {status}")
        elif not {row.id, "fleet" if row.is_of_fleets else "all"}.isdisjoint(options.rows):
            count = options.count or (row.ci if options.ci else row.full)
            if count:
                failed += not _run(row.id, count, options.seed)
    if not options.rows:
        for row_id, why in LEFT_OUT.items():
            print(f"{row_id}  left out: {why}")
    return failed > 0


def _run(row_id: str, count: int, seed: int) -> bool:
    (row,) = (row for row in ROWS if row.id == row_id)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "random")
        try:
            figure = row.run(model, count, random.Random(seed))
        except Unreachable as why:
            print(f"{row.id}  not run: {why}", flush=True)
            return True
        # An oracle's, several of one oracle, or the server broke in the row's hands.
        except (Exception, BaseExceptionGroup) as error:
            print(f"{row.id}  FAILED with --count {count} --seed {seed}: {error!r}", flush=True)
            return False
    print(f"{row.id}  {figure}  [{time.monotonic() - start_s:.0f} s]", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
