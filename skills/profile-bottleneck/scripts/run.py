"""Profiles a run: `python skills/profile-bottleneck/scripts/run.py RUN`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from skills.frame.running import main

if __name__ == "__main__":
    sys.exit(main("profile-bottleneck", sys.argv[1:]))
