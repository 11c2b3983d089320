"""The files of one checkpoint: layout, writing with checksums, the manifest, verifying."""

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pithtrain.checkpoint.state import Ranks

CONFIG = "config.json"
STATE = "pith/state.json"
BIASES = "pith/routing_bias.safetensors"
MANIFEST = "pith/manifest.json"
FORMAT = "pith checkpoint 1"

# "step-00000050.old" is a checkpoint set aside while another of the same step takes its name
_STEP = re.compile(r"step-(\d{8,})(\.old)?")

Buffer = bytes | memoryview


class Record(NamedTuple):
    """What the manifest holds of a file: its size in bytes and its sha256 in hex."""

    size: int
    sha256: str


def step_folders(folder: Path) -> list[Path]:
    """Published checkpoints under `folder`, the newest step first, whole or not."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))]
    found.sort(key=lambda item: (-int(item[0][1]), item[0][2] is not None))
    return [path for _, path in found]


def stem_of(kind: str) -> str:
    """Path of a kind's files without number and ending: "weight" -> "model", moments under optimizer/."""
    return "model" if kind == "weight" else f"optimizer/{kind}"


def index_name(kind: str) -> str:
    return f"{stem_of(kind)}.safetensors.index.json"


def plan_files(shapes: Mapping[str, tuple[int, ...]], max_bytes: int) -> list[list[str]]:
    """Tensor names per file: in order, a new file when the next fp32 tensor would pass `max_bytes`.

    A tensor is never cut, so one larger than `max_bytes` has a file of its own.
    """
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


def file_names(kind: str, count: int) -> list[str]:
    """Names of a kind's files, relative to the checkpoint, numbered from 1 as the field does."""
    return [f"{stem_of(kind)}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def index_json(kind: str, files: Sequence[Sequence[str]], total_size: int) -> bytes:
    """The index that says which of a kind's files holds each tensor; file names are relative to the index."""
    names = [Path(name).name for name in file_names(kind, len(files))]
    weight_map = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
    return json.dumps({"metadata": {"total_size": total_size}, "weight_map": weight_map}, indent=1).encode()


def encode_safetensors(tensors: Mapping[str, Tensor]) -> list[Buffer]:
    """A safetensors file of contiguous fp32 CPU tensors, as buffers that share the tensors' memory.

    Format: 8 bytes header length, little endian; a JSON header padded with spaces to 8 bytes; the data
    without gaps (github.com/huggingface/safetensors, "Format").
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32 and tensor.is_contiguous(), name
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return [struct.pack("<Q", len(head)), head, *(_bytes_of(tensor) for tensor in tensors.values())]


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def write_file(path: Path, buffers: Iterable[Buffer]) -> Record:
    """Write a new file through to the disk. Raises OSError, also when the file is already there."""
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        for buffer in buffers:
            file.write(buffer)
            digest.update(buffer)
        file.flush()
        os.fsync(file.fileno())
        return Record(file.tell(), digest.hexdigest())


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


def size_problem(checkpoint: Path, name: str, record: Record) -> str | None:
    """What is wrong with a file by its size alone, or None."""
    path = checkpoint / name
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    return None if size == record.size else f"{path} has {size} bytes, expected {record.size}"


def looks_whole(checkpoint: Path) -> bool:
    """Whether every file is there at its size; checksums are not read."""
    try:
        return not any(size_problem(checkpoint, *item) for item in read_manifest(checkpoint).items())
    except (ValueError, OSError):
        return False


def _file_problem(checkpoint: Path, name: str, record: Record, read: bool) -> str | None:
    try:
        problem = size_problem(checkpoint, name, record)
        if problem or not read:
            return problem
        with open(checkpoint / name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{checkpoint / name} cannot be read: {error}"
    return None if digest == record.sha256 else f"{checkpoint / name} has sha256 {digest}, expected {record.sha256}"


def verify(checkpoint: Path, ranks: Ranks) -> list[str]:
    """Collective. What is wrong with a checkpoint, file by file: the same files on every rank.

    Sizes are compared by every rank; each file is read and summed by one.
    """
    records: dict[str, Record] = {}
    reason = ""
    try:
        records = read_manifest(checkpoint)
    except (ValueError, OSError) as error:
        reason = str(error)
    if not ranks.agree(not reason):
        return [reason or f"{checkpoint / MANIFEST} cannot be read by another rank"]
    found: dict[str, str] = {}
    for i, (name, record) in enumerate(records.items()):
        if problem := _file_problem(checkpoint, name, record, read=i % ranks.world == ranks.rank):
            found[name] = problem
    if ranks.agree(not found):
        return []
    bad = [name for name in records if not ranks.agree(name not in found)]
    return [found.get(name, f"{checkpoint / name} differs from {MANIFEST}") for name in bad]
