"""The only way a device value reaches the host. Each call waits for the device, so each is counted by name."""

from torch import Tensor


def read_ints(tensor: Tensor) -> list[int]:
    """A 1-d integer tensor as a list of ints. Waits for the device."""
    values: list[int] = tensor.tolist()
    return values


def read_floats(tensor: Tensor) -> list[float]:
    """A 1-d floating tensor as a list of floats. Waits for the device."""
    values: list[float] = tensor.tolist()
    return values


def to_host(tensor: Tensor) -> Tensor:
    """A copy of the tensor on the CPU. Waits for the device."""
    return tensor.cpu()
