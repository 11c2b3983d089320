"""Saving: copy, write aside, agree, publish by one rename, keep the last few."""

import json
import math
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from pithtrain.checkpoint import folder as files
from pithtrain.checkpoint.folder import Buffer, Record
from pithtrain.checkpoint.state import MOMENTS, WEIGHT, Family, ModelState, Ranks, TrainState

_ASIDE = ".tmp-"  # prefix of unfinished and of discarded folders; the next save removes what it finds


class SaveFailed(RuntimeError):
    """A checkpoint was not published. Earlier ones are untouched and the run may go on."""


@dataclass(frozen=True)
class _Pending:
    partial: Path
    final: Path
    writing: Future[None]


class Saver:
    """Saves a run's checkpoints under one folder; all methods are collective, on the main thread.

    keep        whole checkpoints to keep, at least 1; older ones are removed after each publication
    background  return from `save` once the copy is taken and write from a thread; the checkpoint is published
                by the `poll` or `wait` that finds every rank's files written
    moments     kinds of the optimizer's tensors to save; none for plain SGD or for weights only
    Either way a save holds this rank's share of the weights and moments, fp32, in host memory until written.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        *,
        keep: int,
        background: bool,
        moments: Sequence[str] = MOMENTS,
        max_file_bytes: int = 4_000_000_000,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep: got {keep}, expected at least 1; the newest checkpoint is always kept")
        self.folder = folder
        self.ranks = ranks
        self.keep = keep
        self.background = background
        self.kinds = (WEIGHT, *moments)
        self.max_file_bytes = max_file_bytes
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: _Pending | None = None

    def save(
        self, state: ModelState, family: Family, train_state: TrainState, biases: Mapping[str, Tensor]
    ) -> Path | None:
        """Save one checkpoint, after finishing the one before it; its path, or None while a thread writes it.

        biases  MoE layer's name -> fp32 [E] routing bias, equal on all ranks; empty when the run has none
        Raises SaveFailed on every rank when any could not write.
        """
        self.wait()
        final = self.folder / f"step-{train_state.step:08d}"
        partial = self.folder / f"{_ASIDE}{final.name}"
        self._make_partial(partial)
        contents = _copy(state, family, self.kinds, self.ranks, self.max_file_bytes)
        if self.ranks.rank == 0:
            contents |= _small_files(family, train_state, biases)
        writing = self._writer.submit(_write, partial, contents, self.ranks.rank)
        self._pending = _Pending(partial, final, writing)
        return None if self.background else self.wait()

    def poll(self) -> Path | None:
        """Publish the save in flight if every rank has written its files; its path if so, else None."""
        if self._pending is None or not self.ranks.agree(self._pending.writing.done()):
            return None
        return self.wait()

    def wait(self) -> Path | None:
        """Finish and publish the save in flight; its path, or None when there is none. Raises SaveFailed."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        error = pending.writing.exception()
        if self.ranks.agree(error is None):
            if self.ranks.rank == 0:
                error = _publish(pending.partial, pending.final, self.ranks.world)
            if self.ranks.agree(error is None):
                if self.ranks.rank == 0:
                    _prune(self.folder, pending.final, self.keep)
                return pending.final
        self._give_up(pending.partial, error)

    def _make_partial(self, partial: Path) -> None:
        """Rank 0 removes what killed saves left and makes the new temporary folder."""
        error = None
        if self.ranks.rank == 0:
            try:
                for left in self.folder.glob(f"{_ASIDE}*"):
                    shutil.rmtree(left)
                (partial / "pith").mkdir(parents=True)
                (partial / "optimizer").mkdir()
            except OSError as problem:
                error = problem
        if not self.ranks.agree(error is None):
            self._give_up(partial, error)

    def _give_up(self, partial: Path, error: BaseException | None) -> NoReturn:
        if self.ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        reason = f"{type(error).__name__}: {error}" if error else "another rank could not write its part"
        raise SaveFailed(
            f"{partial.name.removeprefix(_ASIDE)} was not saved in {self.folder}: {reason}. "
            "Earlier checkpoints are untouched; if the disk is full, free space"
        ) from error


def _copy(
    state: ModelState, family: Family, kinds: Sequence[str], ranks: Ranks, max_bytes: int
) -> dict[str, list[Buffer]]:
    """Collective. This rank's tensor files, name -> contents in memory of their own; rank 0's indexes too."""
    parts = {name: dict(family.names.family_names(name)) for name in state.names()}
    shapes = {theirs: shape for part in parts.values() for theirs, shape in part.items()}
    assert len(shapes) == sum(len(part) for part in parts.values()), "two parameters share a family name"
    plan = files.plan_files(shapes, max_bytes)
    every = [(kind, *item) for kind in kinds for item in zip(files.file_names(kind, len(plan)), plan, strict=True)]
    mine = every[ranks.rank :: ranks.world]
    contents: dict[str, list[Buffer]] = {}
    for kind in kinds:
        held = {file: tensors for k, file, tensors in mine if k == kind}
        copies = _gather(state, family, kind, parts, {theirs for tensors in held.values() for theirs in tensors})
        for file, tensors in held.items():
            contents[file] = files.encode_safetensors({theirs: copies[theirs] for theirs in tensors})
        if ranks.rank == 0:
            size = 4 * sum(math.prod(shape) for shape in shapes.values())
            contents[files.index_name(kind)] = [files.index_json(kind, plan, size)]
    return contents


def _small_files(family: Family, train_state: TrainState, biases: Mapping[str, Tensor]) -> dict[str, list[Buffer]]:
    """Config, state and, where there are any, routing biases."""
    contents: dict[str, list[Buffer]] = {
        files.CONFIG: [json.dumps(family.config_json(), indent=1).encode()],
        files.STATE: [train_state.to_json()],
    }
    if biases:
        contents[files.BIASES] = files.encode_safetensors({name: _own(bias) for name, bias in biases.items()})
    return contents


def _gather(
    state: ModelState, family: Family, kind: str, parts: Mapping[str, Mapping[str, object]], wanted: set[str]
) -> dict[str, Tensor]:
    """Collective. Copies of the wanted family tensors; one whole parameter is held at a time."""
    copies: dict[str, Tensor] = {}
    for name, part in parts.items():
        whole = state.gather(kind, name)
        if wanted.isdisjoint(part):
            continue
        for theirs, tensor in family.names.to_family(name, whole).items():
            if theirs in wanted:
                copies[theirs] = _own(tensor)
    return copies


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _record_name(rank: int) -> str:
    return f"pith/written-{rank:05d}.json"


def _write(partial: Path, contents: Mapping[str, list[Buffer]], rank: int) -> None:
    """In the thread: write this rank's files, then the record that says which, for rank 0's manifest."""
    records = {name: files.write_file(partial / name, buffers) for name, buffers in contents.items()}
    files.write_file(partial / _record_name(rank), [json.dumps(records).encode()])


def _publish(partial: Path, final: Path, world: int) -> OSError | None:
    """On rank 0: write the manifest, make everything durable, give the folder its name. Returns what failed.

    An earlier one of the same step is set aside, under a name that `latest` knows, until the new one stands.
    """
    old = final.with_name(f"{final.name}.old")
    try:
        records: dict[str, Record] = {}
        for rank in range(world):
            written = partial / _record_name(rank)
            records |= {name: Record(*record) for name, record in json.loads(written.read_bytes()).items()}
            written.unlink()
        files.write_file(partial / files.MANIFEST, [files.manifest_json(records)])
        for folder in (partial / "pith", partial / "optimizer", partial):
            files.sync_folder(folder)
        if final.exists():
            _discard(old)
            os.rename(final, old)
        os.rename(partial, final)
        files.sync_folder(final.parent)
        return None
    except OSError as error:
        return error


def _prune(folder: Path, published: Path, keep: int) -> None:
    """Remove checkpoints older than the newest `keep` whole ones, counted back from the one just published.

    Later steps, left by a run that was resumed from an earlier one, stay until the run has passed them.
    """
    folders = files.step_folders(folder)
    kept = 1
    for path in folders[folders.index(published) + 1 :]:
        if kept < keep and path.suffix != ".old" and files.looks_whole(path):
            kept += 1
        elif kept >= keep or path.stem == published.name:
            try:
                _discard(path)
            except OSError as error:
                warnings.warn(f"{path} is no longer needed but cannot be removed: {error}", stacklevel=2)


def _discard(checkpoint: Path) -> None:
    """Remove a checkpoint so that a kill half-way leaves no partial folder under a checkpoint's name."""
    if checkpoint.exists():
        aside = checkpoint.with_name(f"{_ASIDE}discarded-{checkpoint.name}")
        os.rename(checkpoint, aside)
        shutil.rmtree(aside, ignore_errors=True)
