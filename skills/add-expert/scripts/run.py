"""Adds a type of experts: `python skills/add-expert/scripts/run.py NAME FORMULA --weights "..."`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from skills.frame.running import main

if __name__ == "__main__":
    sys.exit(main("add-expert", sys.argv[1:]))
