"""The golden cases: which runs have a trace, and which meshes must follow it.

A case is a whole run on generated data: model, objective, optimizer, schedule, seed. Layouts are other ways to run the
same case that change nothing but the order of summation; they have no trace of their own. Seeds were chosen so that no
choice of experts in the run is close: a trace records its smallest top-k gap.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from pithtrain.choices import ExpertType
from pithtrain.layers.balance import Objective
from pithtrain.models.architecture import Architecture
from pithtrain.ops.linear import Precision
from pithtrain.optim import LearningRate
from pithtrain.step import Execution

STEPS = 50
EXPERT_STEPS = 12  # of a case for a type of experts
LAYOUT_STEPS = 5  # of a trace that layouts are compared with


@dataclass(frozen=True)
class Layout:
    """A mesh pp x dp x ep, n, the number of micro-batches, how a step's work is laid out, and in which precision.

    Below fp32, experts are chosen as in fp32.
    resumes_after: steps after which the run is saved and goes on from its checkpoint in a new model; 0 for never.
    resumes_as: the mesh and execution it then has, None for the same.
    """

    dp: int = 1
    ep: int = 1
    num_microbatches: int = 1
    pp: int = 1
    execution: Execution = field(default_factory=Execution)
    precision: Precision = "fp32"
    resumes_after: int = 0
    resumes_as: "Layout | None" = None

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.ep

    @property
    def mesh(self) -> str:
        axes = (("PP", self.pp), ("EP", self.ep), ("DP", self.dp))
        sizes = [f"{name}{size}" for name, size in axes if size > 1]
        return " x ".join(sizes) or "1 rank"

    def __str__(self) -> str:
        schedule, recompute = self.execution.schedule, self.execution.recompute
        words = [f"{self.mesh}, n={self.num_microbatches}"]
        words += [self.precision] if self.precision != "fp32" else []
        words += [schedule] if (schedule, self.pp) != ("1f1b", 1) else []
        words += [f"recompute {recompute}"] if recompute != "none" else []
        words += [f"resumed at {self.resumes_after}"] if self.resumes_after else []
        words += [f"as {self.resumes_as}"] if self.resumes_as else []
        return ", ".join(words)


@dataclass(frozen=True)
class OptimizerSpec:
    """kind and what it takes; beta1, beta2, eps are AdamW's. clip_norm None: no clipping."""

    kind: Literal["adamw", "sgd"]
    rate: LearningRate
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float | None = 1.0


@dataclass(frozen=True)
class Case:
    """One run. bias_rate above 0 balances by routing biases. layouts: besides one rank with num_microbatches."""

    name: str
    arch: Architecture
    objective: Objective
    optimizer: OptimizerSpec
    layouts: tuple[Layout, ...]
    bias_rate: float = 0.0
    num_microbatches: int = 1
    sequence_length: int = 16
    global_batch_size: int = 8
    ignore_labels: bool = True
    steps: int = STEPS
    seed: int = 0

    @property
    def one_rank(self) -> Layout:
        return Layout(num_microbatches=self.num_microbatches)

    def config(self) -> dict[str, Any]:
        """Everything that determines the run's numbers, as JSON values."""
        values = {key: value for key, value in asdict(self).items() if key not in ("name", "layouts")}
        config: dict[str, Any] = json.loads(json.dumps(values))
        return config

    def fingerprint(self) -> str:
        """sha256 (hex) of `config`."""
        return hashlib.sha256(json.dumps(self.config(), sort_keys=True).encode()).hexdigest()


TINY = Architecture(
    vocab_size=96,
    hidden_size=32,
    num_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    intermediate_size=40,
    moe_intermediate_size=20,
    num_experts=8,
    top_k=2,
    norm_topk_prob=True,
    sparse_layers=(True, True, True),
    tie_word_embeddings=False,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=128,
    initializer_range=0.2,
)
DENSE_TIED = replace(
    TINY,
    num_key_value_heads=1,
    num_experts=12,
    top_k=3,
    norm_topk_prob=False,
    sparse_layers=(True, False, True),
    tie_word_embeddings=True,
)
DEEP_TIED = replace(
    TINY,
    hidden_size=24,
    num_layers=8,
    head_dim=8,
    sparse_layers=(True, False, True, False, False, True, False, True),
    tie_word_embeddings=True,
)

EXPERT_TYPES: tuple[tuple[ExpertType, int], ...] = (  # and the case's seed
    ("clamped_swiglu", 4),
    ("geglu", 4),
    ("gated_relu2", 6),
    ("relu2", 3),
    ("gelu", 1),
)


def _experts_case(kind: ExpertType, seed: int) -> Case:
    """A short run of a shallow model with experts of one type."""
    return Case(
        name=f"experts-{kind.replace('_', '-')}",
        arch=replace(TINY, num_layers=2, sparse_layers=(True, True), expert_type=kind),
        objective=Objective(),
        optimizer=OptimizerSpec("adamw", LearningRate("constant", 3e-3, EXPERT_STEPS)),
        layouts=(
            Layout(
                dp=2,
                ep=2,
                execution=Execution("zbv", recompute="experts"),
                resumes_after=3,
                resumes_as=Layout(pp=2, ep=2, num_microbatches=2),
            ),
            Layout(ep=2, precision="fp8"),
        ),
        steps=EXPERT_STEPS,
        seed=seed,
    )


CASES = (
    Case(
        name="base",
        arch=TINY,
        objective=Objective(),
        optimizer=OptimizerSpec("adamw", LearningRate("wsd", 3e-3, STEPS, warmup_steps=5, decay_steps=15)),
        layouts=(
            *(Layout(ep=2), Layout(dp=2), Layout(dp=2, ep=2), Layout(ep=4), Layout(num_microbatches=2)),
            Layout(precision="fp8"),
            Layout(dp=2, num_microbatches=2, execution=Execution("zbv", recompute="experts"), precision="fp8"),
            Layout(ep=2, num_microbatches=2, execution=Execution("dualpipev"), precision="fp8"),
        ),
        seed=4,
    ),
    Case(
        name="sequence-balance",
        arch=TINY,
        objective=Objective("sequence", 0.02, 0.002),
        optimizer=OptimizerSpec("adamw", LearningRate("constant", 2e-3, STEPS, warmup_steps=3), clip_norm=2.0),
        layouts=(Layout(num_microbatches=4), Layout(ep=2, num_microbatches=4), Layout(dp=2, ep=2, num_microbatches=2)),
        seed=7,
    ),
    Case(
        name="bias-balance",
        arch=TINY,
        objective=Objective("global_batch", 0.01),
        optimizer=OptimizerSpec("adamw", LearningRate("wsd", 3e-3, STEPS, decay_steps=10, min_lr_ratio=0.1)),
        layouts=(
            Layout(ep=4, num_microbatches=2),
            Layout(dp=2, num_microbatches=2),
            Layout(dp=2, ep=2, num_microbatches=2, resumes_after=3),
            Layout(pp=2, ep=2, num_microbatches=2, execution=Execution(recompute="experts")),
        ),
        bias_rate=0.002,
        num_microbatches=2,
        seed=19,
    ),
    Case(
        name="dense-tied-sgd",
        arch=DENSE_TIED,
        objective=Objective("micro_batch", 0.02),
        optimizer=OptimizerSpec("sgd", LearningRate("cosine", 0.3, STEPS, warmup_steps=4, min_lr_ratio=0.2), 0.01),
        layouts=(
            *(Layout(dp=2, ep=2), Layout(ep=4), Layout(precision="bf16"), Layout(precision="fp8")),
            *(Layout(pp=2, precision="bf16"), Layout(ep=2, precision="bf16")),
        ),
        seed=1,
    ),
    Case(
        name="pipeline",
        arch=DEEP_TIED,
        objective=Objective("sequence", 0.02, 0.001),
        optimizer=OptimizerSpec("adamw", LearningRate("cosine", 1e-3, STEPS, warmup_steps=2)),
        layouts=(
            Layout(pp=2, num_microbatches=4),
            Layout(pp=2, num_microbatches=4, execution=Execution("interleaved", 2, "experts")),
            Layout(pp=4, num_microbatches=8, execution=Execution(recompute="layer")),
            Layout(pp=4, num_microbatches=8, execution=Execution("zbv")),
            Layout(
                pp=4,
                num_microbatches=8,
                execution=Execution("dualpipev"),
                resumes_after=3,
                resumes_as=Layout(pp=2, ep=2, execution=Execution("zbv"), num_microbatches=2),
            ),
            Layout(pp=2, ep=2, num_microbatches=4, execution=Execution("dualpipev", recompute="experts")),
            Layout(pp=2, dp=2, num_microbatches=2, execution=Execution("zbv", recompute="layer")),
            Layout(ep=2, num_microbatches=4, execution=Execution("dualpipev")),
        ),
        bias_rate=0.002,
        seed=4,
    ),
    *(_experts_case(kind, seed) for kind, seed in EXPERT_TYPES),
)


def select(names: list[str]) -> tuple[Case, ...]:
    """The cases of these names, all when there are none. ValueError names what is unknown and what is known."""
    known = {case.name: case for case in CASES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no golden case {', '.join(map(repr, unknown))}; the cases are: {', '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(names)) or CASES
