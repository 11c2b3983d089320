"""The small script that fails while the step is not finite: its text, and `python -m skills.debug_nan.script FILE`."""

import json
import runpy
import sys
from pathlib import Path

from skills.debug_nan.answer import Answer, Order

NAME = "reproduce.py"
TEXT = '''"""{title}

Found: {found}
Takes that step as the trainer does, from the state before it: exits with 1 while it is not finite, with 0 once it is.
"""

import sys

sys.path.insert(0, {root})

from skills.debug_nan.work import check

if __name__ == "__main__":
    code = check(
        run={run},
        overrides={overrides},
        state={state},
        step={step},
        ranks={ranks},
        folder={folder},
    )
    sys.exit(code)
'''


def write(folder: Path, root: Path, order: Order, answer: Answer) -> Path:
    """Writes the script for an answer that names a step."""
    assert answer.bad is not None and answer.state is not None
    values = {
        "title": f"{order.run}: {answer.headline()}.",
        "found": answer.origin.words() if answer.origin else "no operator was seen to begin it.",
        "root": json.dumps(str(root)),
        "run": json.dumps(str(order.run)),
        "overrides": repr(order.overrides),
        "state": json.dumps(str(answer.state)),
        "step": answer.bad,
        "ranks": order.ranks,
        "folder": json.dumps(str(folder)),
    }
    path = folder / NAME
    path.write_text(TEXT.format(**values), encoding="utf-8")
    return path


if __name__ == "__main__":
    runpy.run_path(sys.argv[1], run_name="__main__")
