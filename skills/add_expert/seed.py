"""Finds a seed for a golden case: `python -m skills.add_expert.seed CASE` prints it.

With it no choice of experts in the run is close, so that machines that round otherwise choose the same.
"""

import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from golden.cases import Case, select
from golden.replay import replay

GAP = 1e-5  # the smallest distance between the last expert chosen and the best one left out
TRIES = 30


def find(case: Case) -> int:
    """ValueError when the run is no number, or no seed of TRIES will do."""
    largest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(TRIES):
            trace = replay(replace(case, seed=seed), case.one_rank, case.steps, Path(folder), {})
            if not all(math.isfinite(step.loss) and math.isfinite(step.grad_norm) for step in trace.steps):
                raise ValueError(
                    f"the golden run of {case.name} diverges: a loss or gradient norm is not finite with seed {seed}; "
                    "bound the formula, for instance with tanh or clamp"
                )
            if trace.smallest_gap >= GAP:
                return seed
            largest = max(largest, trace.smallest_gap)
    raise ValueError(
        f"{case.name}: no seed below {TRIES} keeps every choice of experts {GAP} apart in its golden run, at best "
        f"{largest:.1e}; formulas of ordinary size need a few: bound this one, for instance with tanh or clamp"
    )


if __name__ == "__main__":
    try:
        print(find(select([sys.argv[1]])[0]))
    except ValueError as error:
        sys.exit(str(error))
