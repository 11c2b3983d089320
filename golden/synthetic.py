"""Generated samples: integer arithmetic only, the same on every machine, and something to learn in them.

A sample is an arithmetic sequence modulo the vocabulary: its start is free, its step one of STEPS, and one token in
NOISE is replaced by a hash. The token before leaves a few choices for the next one; the sample's step decides among
them. No text or random number library is involved, so golden traces can be made from it anywhere.
"""

import numpy as np

from pithtrain.data import IGNORED_LABEL, Samples
from pithtrain.data.order import Int64, mix, seed_word

STEPS = np.array([1, 3, 7, 12], dtype=np.uint64)
NOISE = 8


def synthetic_tokens(indices: Int64, length: int, vocab_size: int, seed: int) -> Int64:
    """Tokens [B, length] int64 in [0, vocab_size) of the samples `indices` [B]."""
    words = mix(seed_word(seed) ^ indices.astype(np.uint64))[:, None]  # [B, 1]
    places = np.arange(length, dtype=np.uint64)[None]  # [1, length]
    V = np.uint64(vocab_size)
    steps = STEPS[(words >> np.uint64(40)) % np.uint64(len(STEPS))]
    sequence = (words % V + places * steps) % V
    noise = mix(words ^ mix(places + np.uint64(1)))  # [B, length]
    is_noise = (noise >> np.uint64(48)) % np.uint64(NOISE) == 0
    return np.where(is_noise, noise % V, sequence).astype(np.int64)


class SyntheticDataset(Samples):
    """`epoch_samples` generated samples, whatever their length, in a seeded order.

    `ignore_labels` ignores the first 0/8 to 8/8 of each sample's labels, as a hash of its index says, so that slices
    of a batch hold different numbers of labels and a sample may hold none.
    """

    def __init__(self, vocab_size: int, seed: int, *, epoch_samples: int = 256, ignore_labels: bool = False) -> None:
        super().__init__(vocab_size, seed)
        self.epoch_samples, self.ignore_labels = epoch_samples, ignore_labels

    def num_samples(self, sequence_length: int) -> int:
        return self.epoch_samples

    def read(self, indices: Int64, sequence_length: int) -> Int64:
        return synthetic_tokens(indices, sequence_length + 1, self.vocab_size, self.seed)

    def labels(self, indices: Int64, windows: Int64) -> Int64:
        labels, S = super().labels(indices, windows), windows.shape[1] - 1
        eighths = mix(seed_word(self.seed + 1) ^ indices.astype(np.uint64)) % np.uint64(9)
        num_ignored = eighths.astype(np.int64) * S // 8 * self.ignore_labels  # [B]
        return np.where(np.arange(S)[None] < num_ignored[:, None], IGNORED_LABEL, labels)
