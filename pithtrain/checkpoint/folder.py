"""The files of one checkpoint: layout, writing with checksums, the manifest, verifying."""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pithtrain.checkpoint.state import Ranks

CONFIG = "config.json"
STATE = "pith/state.json"
BIASES = "pith/routing_bias.safetensors"
MANIFEST = "pith/manifest.json"
FORMAT = "pith checkpoint 1"

# "step-00000050.old" is a checkpoint set aside while another of the same step takes its name
_STEP = re.compile(r"step-\d{8,}(\.old)?")


class Record(NamedTuple):
    """What the manifest holds of a file: its size in bytes and its sha256 in hex."""

    size: int
    sha256: str


def step_folders(folder: Path) -> list[Path]:
    """Published checkpoints under `folder`, the newest step first, whole or not."""
    found = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name)]
    return sorted(found, key=lambda path: (int(path.stem[5:]), path.suffix == ""), reverse=True)


def stem_of(kind: str) -> str:
    """Path of a kind's files without number and ending: "weight" -> "model", moments under optimizer/."""
    return "model" if kind == "weight" else f"optimizer/{kind}"


def index_name(kind: str) -> str:
    return f"{stem_of(kind)}.safetensors.index.json"


def plan_files(shapes: Mapping[str, tuple[int, ...]], max_bytes: int) -> list[list[str]]:
    """Tensor names per file: in order, a new file when the next fp32 tensor, never cut, would pass `max_bytes`."""
    files: list[list[str]] = []
    room = 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        if size > room:
            files.append([])
            room = max_bytes
        files[-1].append(name)
        room -= size
    return files


def write_file(path: Path, content: bytes) -> Record:
    """Write a new file through to the disk. Raises OSError, also when the file is already there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return Record(len(content), hashlib.sha256(content).hexdigest())


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def manifest_json(records: Mapping[str, Record]) -> bytes:
    files = {name: records[name]._asdict() for name in sorted(records)}
    return json.dumps({"format": FORMAT, "files": files}, indent=1).encode()


def read_manifest(checkpoint: Path) -> dict[str, Record]:
    """The manifest's records by file name. Raises ValueError when it is no manifest of ours."""
    path = checkpoint / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"{path} is missing: {checkpoint} is not a whole pith checkpoint; "
            "choose another one, or import the folder's weights if it is a released model"
        )
    try:
        raw = json.loads(path.read_bytes())
        found = raw["format"]
        records = {name: Record(int(r["size"]), str(r["sha256"])) for name, r in raw["files"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: not a manifest ({error!r}); choose another checkpoint") from error
    if found != FORMAT:
        raise ValueError(f"{path}: format {found!r}, expected {FORMAT!r}; load it with the version that wrote it")
    missing = {CONFIG, STATE, index_name("weight")} - set(records)
    if missing:
        raise ValueError(f"{path}: does not list {sorted(missing)}; choose another checkpoint")
    return records


def _problem(path: Path, record: Record, read: bool) -> str | None:
    """What is wrong with a file by its size and, with `read`, its checksum."""
    try:
        size, digest = path.stat().st_size, record.sha256
        if read and size == record.size:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error}"
    if size != record.size:
        return f"{path} has {size} bytes, expected {record.size}"
    return None if digest == record.sha256 else f"{path} has sha256 {digest}, expected {record.sha256}"


def verify(checkpoint: Path, ranks: Ranks, *, checksums: bool = True) -> dict[str, Record]:
    """Collective. The manifest's records, or ValueError naming the same files on every rank if any is not as recorded;
    sizes are compared by every rank, each file is read and summed by one.
    """
    records = ranks.together(checkpoint / MANIFEST, lambda: read_manifest(checkpoint))
    found = {
        name: _problem(checkpoint / name, record, read=checksums and i % ranks.world == ranks.rank)
        for i, (name, record) in enumerate(records.items())
    }
    bad = [name for name, problem in found.items() if not ranks.agree(problem is None)]
    if not bad:
        return records
    problems = [found[name] or f"{checkpoint / name} differs from {MANIFEST}" for name in bad[:3]]
    problems += [f"and {len(bad) - 3} more files"] if len(bad) > 3 else []
    raise ValueError(f'{"; ".join(problems)}; choose another checkpoint, as resume = "latest" does')
