"""Measures pith on a card: `python -m tests.device OUT.json`, within six minutes; nothing is downloaded.

Needs torch, Triton and numpy. `--device cpu --small` runs what a CPU can, on tiny sizes, to try the script itself. The
exit code is 1 if a check failed, 0 otherwise; what did not run is said, and never counts as passed.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from tests.device import exact
from tests.device.card import card
from tests.device.precision import precision
from tests.device.report import Row, Section, run_section, table
from tests.device.speed import speed
from tests.device.training import training
from tests.device.world import world

SECTIONS = (
    Section("card", 30, card),
    Section("quantisation", 40, exact.quantisation),
    Section("products", 50, exact.products),
    Section("elementwise", 25, exact.elementwise),
    Section("copies", 25, exact.copies),
    Section("world", 30, world),
    Section("precision", 45, precision),
    Section("training", 45, training),
    Section("speed", 65, speed),
)  # seconds of all: 355


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.device", description=__doc__)
    parser.add_argument("out", type=Path, help="the JSON file to write")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, two rounds")
    parser.add_argument("--only", nargs="*", choices=[section.name for section in SECTIONS], help="these sections")
    args = parser.parse_args(argv)
    found: dict[str, list[Row]] = {}
    seconds: dict[str, float] = {}
    for section in SECTIONS:
        if args.only and section.name not in args.only:
            continue
        start = time.monotonic()
        found[section.name] = run_section(section, torch.device(args.device), args.small, found)
        seconds[section.name] = round(time.monotonic() - start, 1)
        write(args.out, args.device, args.small, found, seconds)
        print(table({section.name: found[section.name]}), f"\n{section.name}: {seconds[section.name]} s\n", flush=True)
    return verdict(found)


def write(
    out: Path, device: str, small: bool, found: Mapping[str, Sequence[Row]], seconds: Mapping[str, float]
) -> None:
    """All there is so far, after every section: an interrupted run keeps its results."""
    sections = {name: [asdict(row) for row in rows] for name, rows in found.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"device": device, "small": small, "seconds": seconds, "sections": sections}, indent=1))


def verdict(found: Mapping[str, Sequence[Row]]) -> int:
    """Prints what failed and what did not run; 1 if anything failed."""
    rows = [(section, row) for section, rows in found.items() for row in rows]
    for section, row in rows:
        if row.status in ("failed", "not run"):
            print(f"{row.status}: {section}: {row.name} {row.figures.get('case', '')}\n{row.note}")
    counts = Counter(row.status for _, row in rows)
    print(", ".join(f"{counts[status]} {status}" for status in ("ok", "failed", "measured", "not run")))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
