"""Token data: text becomes a folder of shards (`prepare`), a folder becomes batches (`Dataset`).

- index.py        what a prepared folder looks like on disk
- tokenizer.py    bytes, or a Hugging Face tokenizer.json
- sources.py      files found, cut into pieces, decoded into documents
- preparation.py  pieces tokenized in processes, the folder published in one rename
- writing.py      a split's tokens cut into shards, and its index
- order.py        a seeded permutation of the samples of an epoch, computed one position at a time
- dataset.py      samples, global batches and micro-batches from a prepared folder
- synthetic.py    the same reading interface over generated tokens

Importing this package does not import torch: it is loaded when the first batch becomes tensors.
"""

from pithtrain.data.dataset import IGNORED_LABEL, Batch, Dataset, Samples, bigram_entropy, validation_batches
from pithtrain.data.preparation import DatasetInfo, prepare
from pithtrain.data.synthetic import SyntheticDataset, synthetic_tokens

__all__ = [
    "IGNORED_LABEL",
    "Batch",
    "Dataset",
    "DatasetInfo",
    "Samples",
    "SyntheticDataset",
    "bigram_entropy",
    "prepare",
    "synthetic_tokens",
    "validation_batches",
]
