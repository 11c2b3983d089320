"""A mid-sized MoE, its trainee, and what it is trained on: arithmetic sequences, made where the script runs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pithtrain import step
from pithtrain.data import Batch
from pithtrain.layers.balance import Objective
from pithtrain.models.architecture import Architecture, parameter_specs
from pithtrain.ops.linear import Precision
from pithtrain.optim import AdamW
from pithtrain.parallel.mesh import make_mesh
from pithtrain.parallel.transport import Transport

LR, BETA1, BETA2, EPS, WEIGHT_DECAY, CLIP = 3e-4, 0.9, 0.95, 1e-8, 0.1, 1.0


@dataclass(frozen=True)
class Setup:
    """A model and its batch: `microbatches` of `sequences` of `length` tokens."""

    arch: Architecture
    microbatches: int
    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        return self.microbatches * self.sequences * self.length


def setup(small: bool) -> Setup:
    """About 390 million parameters in bf16, or a few thousand."""
    hidden, layers, heads, experts, width = (64, 2, 2, 4, 32) if small else (1024, 8, 16, 32, 384)
    arch = Architecture(
        vocab_size=128 if small else 32768,
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        intermediate_size=2 * hidden,
        moe_intermediate_size=width,
        num_experts=experts,
        top_k=2 if small else 4,
        norm_topk_prob=True,
        sparse_layers=(True,) * layers,
        tie_word_embeddings=False,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=2048,
        initializer_range=0.02,
    )
    return Setup(arch, 2, 2, 16) if small else Setup(arch, 2, 8, 1024)


def flops_per_token(arch: Architecture, length: int) -> float:
    """As pithtrain.metrics counts them, which cannot be imported without rich; a test holds the two together."""
    sizes = [(spec, torch.Size(spec.shape).numel()) for spec in parameter_specs(arch)]
    active = sum(size * arch.top_k // arch.num_experts if spec.expert else size for spec, size in sizes)
    lookup = 0 if arch.tie_word_embeddings else arch.vocab_size * arch.hidden_size
    return 6 * (active - lookup) + 6 * arch.num_layers * length * arch.num_attention_heads * arch.head_dim


def batches(made: Setup, position: int, device: torch.device) -> list[Batch]:
    """The micro-batches of one step: each sequence counts up by a step of its own, modulo the vocabulary."""
    generator = torch.Generator().manual_seed(position)
    size = made.microbatches * made.sequences, 1
    start = torch.randint(made.arch.vocab_size, size, generator=generator)
    stride = torch.randint(1, 8, size, generator=generator)
    rows = ((start + stride * torch.arange(made.length + 1)) % made.arch.vocab_size).to(device)
    return [Batch(part[:, :-1], part[:, 1:].contiguous()) for part in rows.split(made.sequences)]


@dataclass(eq=False)
class Run:
    """A trainee and its optimizer, a step at a time."""

    trainee: step.Trainee
    optimizer: AdamW
    updates: int = 0

    def step(self, batches: list[Batch], choices: step.Choices | None = None) -> step.Gradients:
        """One update. RuntimeError where it is not finite."""
        done = step.train_step(
            self.trainee, self.optimizer, batches, Objective(), lr=LR, updates=self.updates, clip_norm=CLIP,
            choices=choices,
        )  # fmt: skip
        if not done.applied:
            raise RuntimeError(f"step {self.updates}: loss {done.gradients.loss}, norm {done.gradients.norm}")
        self.updates += 1
        return done.gradients


def start(made: Setup, device: torch.device, precision: Precision) -> Run:
    """One rank, the same weights whatever the precision."""
    trainee = step.build(made.arch, make_mesh(), Transport(), made.length, device, precision=precision)
    fill(trainee)
    return Run(trainee, AdamW.create(trainee.shard, BETA1, BETA2, EPS, WEIGHT_DECAY))


def fill(trainee: step.Trainee) -> None:
    """Weights drawn on the device; norms are ones."""
    generator = torch.Generator(trainee.device).manual_seed(0)
    masters = trainee.shard.masters()
    for name, place in trainee.shard.placements.items():
        tensor: Tensor = torch.ones(place.shape, device=trainee.device)
        if place.spec.std:
            tensor.normal_(0.0, place.spec.std, generator=generator)
        trainee.shard.keep(masters, name, tensor)
    trainee.shard.gather()
