"""What every type of experts is. Its formula stands in spec/experts.toml.

N rows sorted by local expert, L local experts, D hidden, F expert hidden.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from pithtrain.ops.linear import Compute, Groups

Shapes = dict[str, dict[str, tuple[int, ...]]]  # our tensors, each one or more of the formula's weights, by name


class Experts(ABC):
    """The experts of one type that a rank holds: a frozen dataclass of their weights, [L, ..]."""

    @staticmethod
    @abstractmethod
    def shapes(hidden: int, wide: int) -> Shapes:
        """Of one expert, in the order in which a token meets them; a tensor's parts lie one below the other."""

    @abstractmethod
    def __call__(self, x: Tensor, groups: Groups, compute: Compute) -> Tensor:
        """x [N, D] -> [N, D]."""
