"""Samples and batches: `Samples` says which samples a batch holds, `Dataset` reads their tokens from shards.

A sample is a window of S + 1 tokens; windows start every S tokens, so each token is predicted once an epoch and a
document's end is one token among others: windows run over it (packed training), labels and attention included. The
position in the data is one integer, the number of samples taken since the start over all epochs: it does not depend
on batch size, micro-batches or mesh.

B sequences of a global batch, b of a micro-batch on one data rank, S sequence length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pithtrain.data.index import check_shards, read_index
from pithtrain.data.order import Int64, sample_indices

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
        """Tokens [b, S + 1] of the samples `indices` [b]."""

    def labels(self, indices: Int64, windows: Int64) -> Int64:
        """Labels [b, S] of the samples `indices` [b] whose tokens are `windows` [b, S + 1]."""
        return windows[:, 1:]

    def take(self, indices: Int64, sequence_length: int) -> Batch:
        """The samples `indices` [b] as a batch."""
        import torch

        windows = self.read(indices, sequence_length)
        return Batch(torch.tensor(windows[:, :-1]), torch.tensor(self.labels(indices, windows)))

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
        """Of the global batch at `position` the i-th of `num_microbatches` slices, of it the data_rank-th of
        `data_ranks`.
        """
        assert 0 <= i < num_microbatches and 0 <= data_rank < data_ranks, (i, data_rank)
        size, rest = divmod(global_batch_size, num_microbatches * data_ranks)
        assert not rest, f"{global_batch_size} sequences in {num_microbatches} micro-batches on {data_ranks} data ranks"
        positions = position + (i * data_ranks + data_rank) * size + np.arange(size)
        return self.take(sample_indices(positions, self.num_samples(sequence_length), self.seed), sequence_length)


class Dataset(Samples):
    """One split of a prepared folder, mapped into memory and never written: any number of jobs may share it."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        """Raises ValueError, naming the file and the remedy, where the folder's index or a shard's size is wrong."""
        self.folder, self.index = folder, read_index(folder)
        check_shards(folder, self.index)
        super().__init__(self.index.vocab_size, seed)
        self.num_tokens, dtype = self.index.num_tokens, np.dtype(self.index.dtype).newbyteorder("<")
        self._shards = [np.memmap(folder / shard.file, dtype=dtype, mode="r") for shard in self.index.shards]
        self._starts = [0, *accumulate(shard.num_tokens for shard in self.index.shards)]

    def num_samples(self, sequence_length: int) -> int:
        """Windows of S + 1 tokens at stride S; up to S tokens at the end are in none."""
        return (self.num_tokens - 1) // sequence_length

    def read(self, indices: Int64, sequence_length: int) -> Int64:
        starts = (indices * sequence_length).tolist()
        return np.stack([self.token_range(start, start + sequence_length + 1) for start in starts])

    def token_range(self, start: int, stop: int) -> Int64:
        """Tokens [stop - start] int64 in the order of the files, whichever shards hold them."""
        assert 0 <= start < stop <= self.num_tokens, (start, stop, self.num_tokens)
        shards = range(bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop))
        firsts = [self._starts[k] for k in shards]
        parts = [self._shards[k][max(start - first, 0) : stop - first] for k, first in zip(shards, firsts, strict=True)]
        return np.concatenate(parts, dtype=np.int64)


def validation_batches(
    dataset: Samples,
    sequence_length: int,
    batch_size: int,
    limit: int | None = None,
    data_rank: int = 0,
    data_ranks: int = 1,
) -> Iterator[Batch]:
    """The first `limit` samples (all by default) in the order of the data, never shuffled. Batch k is samples
    [k B, (k + 1) B), of which `data_rank` gets its slice of B / data_ranks. The last batch is filled up with padding
    whose labels are ignored, so every rank gets equally many batches of equal shape.
    """
    import torch

    size, rest = divmod(batch_size, data_ranks)
    total = dataset.num_samples(sequence_length)
    total = total if limit is None else min(limit, total)
    assert not rest and total > 0, f"{total} samples in batches of {batch_size} on {data_ranks} data ranks"
    for first in range(data_rank * size, data_rank * size + total + -total % batch_size, batch_size):
        indices = np.arange(first, first + size)
        batch = dataset.take(np.minimum(indices, total - 1), sequence_length)
        absent = torch.from_numpy(indices >= total)
        if absent.any():
            batch.labels[absent] = IGNORED_LABEL
            batch = replace(batch, padding=absent[:, None].expand(batch.tokens.shape).clone())
        yield batch


def bigram_entropy(dataset: Dataset) -> float:
    """H(next | current) of the dataset's own tokens in nats per token, unsmoothed, for at most 1,024 ids: the best that
    a model that sees only one token can reach on them.
    """
    V, num_pairs = dataset.vocab_size, dataset.num_tokens - 1
    assert V <= 1024 and num_pairs > 0, f"{V} ids, {num_pairs} pairs"
    counts: Int64 = np.zeros(V * V, dtype=np.int64)
    for start in range(0, num_pairs, CHUNK_TOKENS):
        tokens = dataset.token_range(start, min(start + CHUNK_TOKENS, num_pairs) + 1)
        counts += np.bincount(tokens[:-1] * V + tokens[1:], minlength=V * V)
    firsts = counts.reshape(V, V).sum(axis=1)
    pairs, firsts = counts[counts > 0], firsts[firsts > 0]
    return float((firsts @ np.log(firsts) - pairs @ np.log(pairs)) / num_pairs)
