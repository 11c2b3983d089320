"""Words that a run's config and the code it chooses share. They import nothing, so both may import them."""

from typing import Literal

ExpertType = Literal["swiglu", "clamped_swiglu", "geglu", "gated_relu2", "relu2", "gelu"]
