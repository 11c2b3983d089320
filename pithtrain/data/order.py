"""The order of samples: a seeded permutation an epoch, computed for one position at a time.

Swap-or-not (Hoang, Morris and Rogaway, "An Enciphering Scheme Based on a Card Shuffle", CRYPTO 2012): each
round pairs x with (k - x) mod n and a pseudo-random bit of the pair says whether to swap them. A round is its
own inverse, so any number of rounds is a bijection of [0, n) for every n, with no table and no walking.
"""

import numpy as np
from numpy.typing import NDArray

ROUNDS = 48

Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]


def mix(values: UInt64) -> UInt64:
    """The finaliser of splitmix64: a bijection of 64-bit words in which every bit depends on every bit."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def seed_word(seed: int) -> UInt64:
    """Any integer seed as one mixed 64-bit word [1]."""
    return mix(np.array([seed % 2**64], dtype=np.uint64))


def sample_indices(positions: Int64, num_samples: int, seed: int) -> Int64:
    """Which samples stand at `positions` [B] of the endless sequence of epochs.

    Position p is in epoch p // num_samples; every epoch holds each index of [0, num_samples) once, in an
    order of its own. Pure integer arithmetic: the same on every machine, and no random stream is drawn from.
    """
    assert num_samples >= 1 and (positions >= 0).all(), (positions, num_samples)
    n = np.uint64(num_samples)
    epochs, x = np.divmod(positions.astype(np.uint64), n)
    keys = mix(seed_word(seed) + epochs)
    for _ in range(ROUNDS):
        keys = mix(keys)
        partner = (keys % n + (n - x)) % n
        swap = mix(keys ^ np.maximum(x, partner)) & np.uint64(1)
        x = np.where(swap == 1, partner, x)
    return x.astype(np.int64)
