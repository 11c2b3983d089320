"""Saving: copy, write aside, agree, publish by one rename, keep the last few."""

import json
import math
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from pithtrain.checkpoint import folder as files
from pithtrain.checkpoint.state import MOMENTS, ONE_RANK, WEIGHT, Family, ModelState, Ranks, TrainState, family_shapes

_ASIDE = ".tmp-"  # prefix of unfinished and of discarded folders; the next save removes what it finds

Contents = dict[str, bytes | dict[str, Tensor]]


class SaveFailed(RuntimeError):
    """A checkpoint was not published. Earlier ones are untouched and the run may go on."""


@dataclass(eq=False)
class Saver:
    """Saves a run's checkpoints under one folder; all methods are collective, on the main thread.

    With `background`, `save` returns once the copy is taken, and the `poll` or `wait` that finds every rank's files
    written publishes it. Either way a save holds this rank's share of weights and moments, fp32, in host memory until
    written, and beside it one file's bytes, twice while they are put together.
    """

    folder: Path
    ranks: Ranks
    keep: int  # whole checkpoints, the newest always among them; older ones go after each publication
    background: bool
    moments: Sequence[str] = MOMENTS  # kinds of the optimizer's tensors to save; none for plain SGD
    max_file_bytes: int = 4_000_000_000
    _pending: tuple[Path, Future[None]] | None = field(default=None, init=False)
    _writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"), init=False)

    def save(
        self, state: ModelState, family: Family, train_state: TrainState, biases: Mapping[str, Tensor]
    ) -> Path | None:
        """Save one checkpoint, after finishing the one before it; its path, or None while a thread writes it.

        biases  MoE layer's name -> fp32 [E] routing bias, equal on all ranks; empty when the run has none
        Raises SaveFailed on every rank when any could not write.
        """
        self.wait()
        final = self.folder / f"step-{train_state.step:08d}"
        self._finish(final, self._writer.submit(_clear, self.folder, self.ranks.rank))
        contents = _copy(state, family, (WEIGHT, *self.moments), self.ranks, self.max_file_bytes)
        if self.ranks.rank == 0:
            contents[files.CONFIG] = json.dumps(family.config_json(), indent=1).encode()
            contents[files.STATE] = train_state.to_json()
            if biases:
                contents[files.BIASES] = {name: _own(bias) for name, bias in biases.items()}
        self._pending = final, self._writer.submit(_write, _partial(final), contents, self.ranks.rank)
        return None if self.background else self.wait()

    def poll(self) -> Path | None:
        """Publish the save in flight if every rank has written its files; its path if so, else None."""
        if self._pending is None or not self.ranks.agree(self._pending[1].done()):
            return None
        return self.wait()

    def wait(self) -> Path | None:
        """Finish and publish the save in flight; its path, or None when there is none. Raises SaveFailed."""
        if self._pending is None:
            return None
        (final, writing), self._pending = self._pending, None
        self._finish(final, writing)
        self._finish(final, self._writer.submit(_publish, final, self.ranks, self.keep))
        return final

    def _finish(self, final: Path, work: Future[None]) -> None:
        """Wait for this rank's work; SaveFailed on every rank, without a trace of the save, if any rank's failed."""
        error = work.exception()
        if self.ranks.agree(error is None):
            return
        if self.ranks.rank == 0:
            shutil.rmtree(_partial(final), ignore_errors=True)
        reason = f"{type(error).__name__}: {error}" if error else "another rank could not write its part"
        raise SaveFailed(
            f"{final.name} was not saved in {self.folder}: {reason}. "
            "Earlier checkpoints are untouched; if the disk is full, free space"
        ) from error


def _partial(final: Path) -> Path:
    return final.with_name(f"{_ASIDE}{final.name}")


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _copy(state: ModelState, family: Family, kinds: Sequence[str], ranks: Ranks, max_bytes: int) -> Contents:
    """Collective. This rank's files of tensors, copied, by name, one whole parameter held beside them; on rank 0 the
    indexes too.
    """
    shapes = family_shapes(state, family)
    plan = files.plan_files(shapes, max_bytes)
    contents: Contents = {}
    for k, kind in enumerate(kinds):
        stem = files.stem_of(kind)
        names = [f"{stem}-{i + 1:05d}-of-{len(plan):05d}.safetensors" for i in range(len(plan))]
        places = {theirs: file for file, tensors in zip(names, plan, strict=True) for theirs in tensors}
        first = (ranks.rank - k * len(plan)) % ranks.world  # file i of all kinds together is rank i % world's
        mine: dict[str, dict[str, Tensor]] = {file: {} for file in names[first :: ranks.world]}
        for name in state.names():
            for theirs, tensor in family.names.to_family(name, state.gather(kind, name)).items():
                if places[theirs] in mine:
                    mine[places[theirs]][theirs] = _own(tensor)
        contents |= mine
        if ranks.rank == 0:
            weight_map = {theirs: Path(file).name for theirs, file in places.items()}
            size = 4 * sum(map(math.prod, shapes.values()))
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            contents[files.index_name(kind)] = json.dumps(index, indent=1).encode()
    return contents


def _clear(folder: Path, rank: int) -> None:
    """Rank 0 removes what killed saves left."""
    if rank == 0:
        for left in folder.glob(f"{_ASIDE}*"):
            shutil.rmtree(left)


def _write(partial: Path, contents: Contents, rank: int) -> None:
    """Write this rank's files, then the record that says which, for rank 0's manifest."""
    records = {}
    for name, content in contents.items():
        data = content if isinstance(content, bytes) else save(content, {"format": "pt"})
        records[name] = files.write_file(partial / name, data)
    files.write_file(partial / f"pith/written-{rank:05d}.json", json.dumps(records).encode())


def _publish(final: Path, ranks: Ranks, keep: int) -> None:
    """Rank 0 writes the manifest, makes everything durable, gives the folder its name, removes old checkpoints. An
    earlier one of the same step is set aside, under a name that `latest` knows, until the new one stands.
    """
    if ranks.rank != 0:
        return
    partial, old = _partial(final), final.with_name(f"{final.name}.old")
    records: dict[str, files.Record] = {}
    for rank in range(ranks.world):
        written = partial / f"pith/written-{rank:05d}.json"
        records |= {name: files.Record(*record) for name, record in json.loads(written.read_bytes()).items()}
        written.unlink()
    files.write_file(partial / files.MANIFEST, files.manifest_json(records))
    for folder in {(partial / name).parent for name in records}:
        files.sync_folder(folder)
    if final.exists():
        _discard(old)
        os.rename(final, old)
    os.rename(partial, final)
    files.sync_folder(final.parent)
    _discard(old)
    _prune(final, keep)


def _prune(published: Path, keep: int) -> None:
    """Remove checkpoints older than the newest `keep` whole ones, counted back from the one just published. Later
    steps, left by a run that was resumed from an earlier one, stay until the run has passed them.
    """
    folders = files.step_folders(published.parent)
    kept = 1
    for path in folders[folders.index(published) + 1 :]:
        if kept >= keep:
            _discard(path)
            continue
        with suppress(ValueError):
            files.verify(path, ONE_RANK, checksums=False)
            kept += 1


def _discard(checkpoint: Path) -> None:
    """Remove a checkpoint, if it is there, so that a kill half-way leaves none that is partial under its name."""
    aside = checkpoint.with_name(f"{_ASIDE}discarded-{checkpoint.name}")
    try:
        if checkpoint.exists():
            os.rename(checkpoint, aside)
            shutil.rmtree(aside)
    except OSError as error:
        warnings.warn(f"{checkpoint} is no longer needed but cannot be removed: {error}", stacklevel=2)
