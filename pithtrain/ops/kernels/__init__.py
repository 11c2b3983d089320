"""Triton kernels, one file an operator, beside their launch parameters. Nothing imports one before it runs on a GPU.

No autotuning: a launch is what its file's table says, on every architecture, and the table is what is compiled ahead
of time for Hopper (sm_90) and Blackwell (sm_100) by `spec.kernels`.
"""

from torch import Tensor


def use_triton(x: Tensor) -> bool:
    """Whether an operator on `x` runs its Triton kernel rather than its reference."""
    return x.is_cuda
