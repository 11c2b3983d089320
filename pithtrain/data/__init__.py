"""Token data: a folder of shards, as `pith data prepare` writes it, becomes batches (`Dataset`).

Importing this package does not import torch: it is loaded when the first batch becomes tensors.
"""

from pithtrain.data.dataset import IGNORED_LABEL, Batch, Dataset, Samples, bigram_entropy, validation_batches

__all__ = ["IGNORED_LABEL", "Batch", "Dataset", "Samples", "bigram_entropy", "validation_batches"]
