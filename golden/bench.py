"""Our training step against transformers' near its default, on one config, from the same weights and batches.

Contestants take turns, a step each, so that whatever else the machine does meets both alike. The figure to trust is
the ratio of medians; times are shown with their spread.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from golden.synthetic import SyntheticDataset
from pithtrain import step
from pithtrain.data import Batch
from pithtrain.layers.balance import Objective
from pithtrain.models.architecture import Architecture
from pithtrain.models.qwen3_moe import Qwen3MoE
from pithtrain.optim import AdamW
from pithtrain.parallel.mesh import make_mesh
from pithtrain.parallel.transport import Transport

ARCH = Architecture(
    vocab_size=4096,
    hidden_size=256,
    num_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    intermediate_size=512,
    moe_intermediate_size=128,
    num_experts=16,
    top_k=2,
    norm_topk_prob=True,
    sparse_layers=(True,) * 4,
    tie_word_embeddings=False,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
    initializer_range=0.02,
)
BATCH, LENGTH = 8, 256
LR, BETA1, BETA2, EPS, WEIGHT_DECAY = 1e-3, 0.9, 0.95, 1e-8, 0.1
TOLERANCE = 1e-4  # of the loss between contestants, at every step

Contestant = Callable[[Batch], float]  # one update on a batch; gives its loss


def ours(seed: int) -> tuple[Contestant, step.Trainee]:
    """Our production step, one rank."""
    trainee = step.build(ARCH, make_mesh(), Transport(), LENGTH, torch.device("cpu"))
    trainee.shard.initialise(seed)
    optimizer = AdamW.create(trainee.shard, BETA1, BETA2, EPS, WEIGHT_DECAY)
    updates = 0

    def update(batch: Batch) -> float:
        nonlocal updates
        done = step.train_step(trainee, optimizer, [batch], Objective(), lr=LR, updates=updates, clip_norm=1.0)
        updates += 1
        return done.gradients.loss

    return update, trainee


def theirs(trainee: step.Trainee) -> Contestant:
    """transformers from the same weights: grouped_mm experts, fused AdamW, the same decay and clipping."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    family = Qwen3MoE.of(ARCH)
    config = Qwen3MoeConfig(**family.config_json())
    config._experts_implementation = "grouped_mm"
    model = Qwen3MoeForCausalLM(config)
    model.load_state_dict(_their_state(trainee, family))
    decays: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        decays[parameter.ndim > 1].append(parameter)
    groups = [{"params": decays[True], "weight_decay": WEIGHT_DECAY}, {"params": decays[False], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(BETA1, BETA2), eps=EPS, fused=True)

    def update(batch: Batch) -> float:
        optimizer.zero_grad()
        loss = model(input_ids=batch.tokens, labels=batch.labels, shift_labels=batch.labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return update


def _their_state(trainee: step.Trainee, family: Qwen3MoE) -> dict[str, torch.Tensor]:
    """Our weights under the names of transformers' module, where experts are stacked as ours are."""
    state: dict[str, torch.Tensor] = {}
    masters = trainee.shard.masters()
    for name in trainee.shard.placements:
        tensor = trainee.shard.whole(masters, name)
        if ".experts." in name:
            stem, kind = name.rsplit(".", 1)
            state[f"model.{stem.replace('.experts', '.mlp.experts')}.{kind}_proj"] = tensor
        else:
            state |= family.names.to_family(name, tensor)
    return state


@dataclass(frozen=True)
class Times:
    """Seconds of every round by contestant, at one number of threads."""

    threads: int
    ours: list[float]
    theirs: list[float]

    @property
    def ratio(self) -> float:
        """How many times as fast ours is: above 1 is faster."""
        return statistics.median(self.theirs) / statistics.median(self.ours)


def measure(rounds: int, threads: int) -> Times:
    """`rounds` interleaved steps after two warm-up rounds. ValueError when the losses part ways."""
    torch.set_num_threads(threads)
    mine, trainee = ours(seed=0)
    other = theirs(trainee)
    data = SyntheticDataset(ARCH.vocab_size, seed=0)
    seconds: tuple[list[float], list[float]] = ([], [])
    for position in range(rounds + 2):
        batch = data.microbatch(position * BATCH, BATCH, 1, 0, 0, 1, LENGTH)
        losses = []
        for contestant, kept in zip((mine, other), seconds, strict=True):
            start = time.perf_counter()
            losses.append(contestant(batch))
            kept.append(time.perf_counter() - start)
        if abs(losses[0] - losses[1]) > TOLERANCE:
            raise ValueError(
                f"step {position}: our loss is {losses[0]:.6f}, transformers' {losses[1]:.6f}; "
                f"expected them within {TOLERANCE}: the two do not train the same model, so no time is reported"
            )
    return Times(threads, seconds[0][2:], seconds[1][2:])


def run(rounds: int, threads: Sequence[int]) -> int:
    """Measures, prints the table, and returns the exit code."""
    tokens = BATCH * LENGTH
    table = Table(title=f"{rounds} interleaved rounds, {tokens} tokens a step, fp32, CPU")
    for column in ("threads", "trainer", "median ms", "10%-90% ms", "tokens/s", "ratio"):
        table.add_column(column, justify="left" if column == "trainer" else "right")
    for count in threads:
        times = measure(rounds, count)
        for name, kept, ratio in (("pith", times.ours, f"{times.ratio:.2f}"), ("transformers", times.theirs, "1.00")):
            middle = statistics.median(kept)
            low, *_, high = statistics.quantiles(kept, n=10) if len(kept) > 1 else (middle, middle)
            spread = f"{low * 1e3:.0f}-{high * 1e3:.0f}"
            table.add_row(str(count), name, f"{middle * 1e3:.0f}", spread, f"{tokens / middle:.0f}", ratio)
    Console().print(table)
    return 0
