"""Samples and batches: `Samples` says which samples a batch holds, `Dataset` reads their tokens from shards.

A sample is a window of S + 1 tokens; windows start every S tokens, so each token is predicted once an epoch
and a document's end is one token among others: windows run over it (packed training), labels and attention
included. The position in the data is one integer, the number of samples taken since the start over all
epochs: it does not depend on batch size, micro-batches or mesh.

B sequences of a global batch, b of a micro-batch on one data rank, S sequence length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pithtrain.data.index import Index, check_shards, read_index
from pithtrain.data.order import Int64, sample_indices
from pithtrain.data.tokenizer import Tokens

if TYPE_CHECKING:
    from torch import Tensor

IGNORED_LABEL = -100
CHUNK_TOKENS = 2**22


@dataclass(frozen=True)
class Batch:
    """What one data rank reads in one micro-batch."""

    tokens: Tensor  # [b, S] int64
    labels: Tensor  # [b, S] int64: the next token, IGNORED_LABEL where there is nothing to learn
    padding: Tensor | None = None  # [b, S] bool, True where the token only fills up the shape


class Samples(ABC):
    """A finite set of samples in a seeded order that differs from epoch to epoch."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.vocab_size, self.seed = vocab_size, seed

    @abstractmethod
    def num_samples(self, sequence_length: int) -> int:
        """Samples in one epoch; 0 where the data is shorter than one sample."""

    @abstractmethod
    def read(self, indices: Int64, sequence_length: int) -> Int64:
        """Tokens [B, S + 1] of the samples `indices` [B]."""

    def labels(self, indices: Int64, windows: Int64) -> Int64:
        """Labels [B, S] of the samples `indices` [B] whose tokens are `windows` [B, S + 1]."""
        return windows[:, 1:]

    def sample_at(self, position: int, sequence_length: int) -> int:
        """The index of the sample at `position`, counted in samples since the start over all epochs."""
        return int(self._indices(position, 1, sequence_length)[0])

    def global_batch(self, position: int, batch_size: int, sequence_length: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels [B, S] int64 of the `batch_size` samples from `position` on."""
        batch = self._batch(self._indices(position, batch_size, sequence_length), sequence_length)
        return batch.tokens, batch.labels

    def microbatch(
        self,
        position: int,
        global_batch_size: int,
        num_microbatches: int,
        i: int,
        data_rank: int,
        data_ranks: int,
        sequence_length: int,
    ) -> Batch:
        """Micro-batch `i` of the global batch at `position`, as `data_rank` of `data_ranks` holds it.

        That is the i-th of `num_microbatches` slices of the global batch, and of it the data_rank-th of
        `data_ranks` slices.
        """
        size, rest = divmod(global_batch_size, num_microbatches * data_ranks)
        if size == 0 or rest:
            raise ValueError(
                f"global batch of {global_batch_size} sequences is not divisible by {num_microbatches} "
                f"micro-batches x {data_ranks} data ranks; use a multiple of {num_microbatches * data_ranks}"
            )
        assert 0 <= i < num_microbatches and 0 <= data_rank < data_ranks, (i, data_rank)
        first = position + (i * data_ranks + data_rank) * size
        return self._batch(self._indices(first, size, sequence_length), sequence_length)

    def _indices(self, position: int, count: int, sequence_length: int) -> Int64:
        num_samples = self.num_samples(sequence_length)
        if num_samples < 1:
            raise ValueError(f"{self} is shorter than one sample of {sequence_length} + 1 tokens; use a shorter one")
        return sample_indices(position + np.arange(count), num_samples, self.seed)

    def _batch(self, indices: Int64, sequence_length: int) -> Batch:
        import torch

        windows = self.read(indices, sequence_length)
        labels = self.labels(indices, windows)
        return Batch(torch.tensor(windows[:, :-1]), torch.tensor(labels))


class Dataset(Samples):
    """One split of a prepared folder, mapped into memory and never written: any number of jobs may share it."""

    def __init__(self, folder: Path, index: Index, seed: int) -> None:
        super().__init__(index.vocab_size, seed)
        self.folder, self.index, self.num_tokens = folder, index, index.num_tokens
        dtype = np.dtype(index.dtype).newbyteorder("<")
        self._shards = [np.memmap(folder / shard.file, dtype=dtype, mode="r") for shard in index.shards]
        self._starts = np.cumsum([0, *(shard.num_tokens for shard in index.shards)])

    @classmethod
    def open(cls, folder: Path, seed: int = 0) -> Dataset:
        """Opens `folder`, which holds index.json, checking that file and every shard's size.

        Raises ValueError naming the file and the remedy; `verify` checks the shards' content as well.
        """
        index = read_index(folder)
        check_shards(folder, index)
        return cls(folder, index, seed)

    def __str__(self) -> str:
        return f"dataset {self.folder} ({self.num_tokens:,} tokens)"

    def verify(self) -> None:
        """Reads every shard; raises ValueError naming the first whose checksum is not the index's."""
        check_shards(self.folder, self.index, content=True)

    def num_samples(self, sequence_length: int) -> int:
        """Windows of S + 1 tokens at stride S; up to S tokens at the end are in none."""
        return max(self.num_tokens - 1, 0) // sequence_length

    def read(self, indices: Int64, sequence_length: int) -> Int64:
        """Tokens [B, S + 1] int64 of the windows `indices` [B]."""
        starts = (indices * sequence_length).tolist()
        return np.stack([self.token_range(start, start + sequence_length + 1) for start in starts])

    def token_range(self, start: int, stop: int) -> Int64:
        """Tokens [stop - start] int64 in the order of the files, whichever shards hold them."""
        assert 0 <= start < stop <= self.num_tokens, (start, stop, self.num_tokens)
        parts: list[Tokens] = []
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            first = int(self._starts[shard])
            parts.append(self._shards[shard][start - first : stop - first])
            start += len(parts[-1])
            shard += 1
        return np.concatenate(parts, dtype=np.int64)


def validation_batches(
    dataset: Samples,
    sequence_length: int,
    batch_size: int,
    limit: int | None = None,
    data_rank: int = 0,
    data_ranks: int = 1,
) -> Iterator[Batch]:
    """The first `limit` samples (all by default) in the order of the data, never shuffled.

    Batch k is samples [k B, (k + 1) B), of which `data_rank` gets its slice of B / data_ranks. The last batch
    is filled up with padding whose labels are ignored, so every rank gets equally many batches of equal
    shape.
    """
    if batch_size % data_ranks:
        raise ValueError(f"validation batch of {batch_size} is not divisible by {data_ranks} data ranks; change one")
    total = dataset.num_samples(sequence_length)
    total = total if limit is None else min(limit, total)
    if total < 1:
        raise ValueError(f"{dataset} has no sample of {sequence_length} + 1 tokens to validate on; hold out more text")
    size = batch_size // data_ranks
    for first in range(data_rank * size, data_rank * size + total + -total % batch_size, batch_size):
        yield _padded(dataset, np.arange(first, first + size), total, sequence_length)


def _padded(dataset: Samples, indices: Int64, total: int, sequence_length: int) -> Batch:
    """The samples `indices`; those from `total` on stand for nothing and become padding."""
    import torch

    batch = dataset._batch(np.minimum(indices, total - 1), sequence_length)
    absent = torch.from_numpy(indices >= total)
    if not absent.any():
        return batch
    batch.labels[absent] = IGNORED_LABEL
    return Batch(batch.tokens, batch.labels, absent[:, None].expand(batch.tokens.shape).clone())


def bigram_entropy(dataset: Dataset) -> float:
    """H(next | current) of the dataset's own tokens in nats per token, from pair counts, unsmoothed.

    What a model that sees only one token can reach on these tokens at best. Raises ValueError over 1,024 ids.
    """
    V, num_pairs = dataset.vocab_size, dataset.num_tokens - 1
    if V > 1024 or num_pairs < 1:
        raise ValueError(f"{dataset}: bigram entropy needs 2 tokens and a vocabulary of at most 1024, got {V}")
    counts: NDArray[np.int64] = np.zeros(V * V, dtype=np.int64)
    for start in range(0, num_pairs, CHUNK_TOKENS):
        tokens = dataset.token_range(start, min(start + CHUNK_TOKENS, num_pairs) + 1)
        counts += np.bincount(tokens[:-1] * V + tokens[1:], minlength=V * V)
    pairs = counts.reshape(V, V)
    firsts = np.broadcast_to(pairs.sum(axis=1, keepdims=True), pairs.shape)
    seen = pairs > 0
    return float(-(pairs[seen] * np.log(pairs[seen] / firsts[seen])).sum() / num_pairs)
