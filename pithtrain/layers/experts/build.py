"""From the word for a type of experts to its class."""

from pithtrain.choices import ExpertType
from pithtrain.layers.experts.base import Experts
from pithtrain.layers.experts.clamped_swiglu import ClampedSwiGLUExperts
from pithtrain.layers.experts.gated import GatedReLU2Experts, GeGLUExperts, SwiGLUExperts
from pithtrain.layers.experts.plain import GELUExperts, ReLU2Experts


def expert_class(kind: ExpertType) -> type[Experts]:
    """Called with the type's weights by name, it gives the experts."""
    match kind:
        case "swiglu":
            return SwiGLUExperts
        case "clamped_swiglu":
            return ClampedSwiGLUExperts
        case "geglu":
            return GeGLUExperts
        case "gated_relu2":
            return GatedReLU2Experts
        case "relu2":
            return ReLU2Experts
        case "gelu":
            return GELUExperts
