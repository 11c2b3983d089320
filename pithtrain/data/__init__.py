"""Token data: text becomes a folder of shards (`prepare`), a folder becomes batches (`Dataset`).

Importing this package does not import torch: it is loaded when the first batch becomes tensors.
"""

from pithtrain.data.dataset import IGNORED_LABEL, Batch, Dataset, Samples, bigram_entropy, validation_batches
from pithtrain.data.preparation import prepare
from pithtrain.data.synthetic import SyntheticDataset, synthetic_tokens

__all__ = [
    "IGNORED_LABEL",
    "Batch",
    "Dataset",
    "Samples",
    "SyntheticDataset",
    "bigram_entropy",
    "prepare",
    "synthetic_tokens",
    "validation_batches",
]
