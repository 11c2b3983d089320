"""Token data: text becomes a folder of shards (`prepare`), a folder becomes batches (`Dataset`).

Importing this package does not import torch: it is loaded when the first batch becomes tensors.
"""

from pithtrain.data.dataset import IGNORED_LABEL, Batch, Dataset, Samples, bigram_entropy, validation_batches
from pithtrain.data.preparation import prepare

__all__ = ["IGNORED_LABEL", "Batch", "Dataset", "Samples", "bigram_entropy", "prepare", "validation_batches"]
