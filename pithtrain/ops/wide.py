"""The dtype that operators compute in: fp32, whatever narrower dtype they are given."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """x in fp32, or as it is where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
