"""The dense feed-forward layer: SwiGLU between two products."""

from dataclasses import dataclass

from torch import Tensor

from pithtrain.ops.linear import Compute, linear
from pithtrain.ops.parameter import Weight
from pithtrain.ops.swiglu import swiglu


@dataclass(frozen=True, eq=False)
class DenseMLP:
    """gate_up: [2F, D], gate first. down: [D, F]."""

    gate_up: Weight
    down: Weight

    def __call__(self, hidden_states: Tensor, compute: Compute) -> Tensor:
        """hidden_states [.., D] -> [.., D]."""
        return linear(swiglu(linear(hidden_states, self.gate_up, compute)), self.down, compute)
