"""Training: `python -m pithtrain.train RUN.toml` under torchrun, or alone as a world of one.

- command.py      arguments, the world's start, how a rank ends and what it says then
- plan.py         what a run file asks for, refused whole before any process group starts; the dry run
- loop.py         steps, validation, checkpoints, until the run is complete or has to stop
- checkpoints.py  the run's state to and from checkpoint folders
- watch.py        stop signals, dead and hung ranks, status.json
"""

from pithtrain.train.command import main
from pithtrain.train.plan import dry_run

__all__ = ["dry_run", "main"]
