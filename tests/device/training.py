"""A training step of a mid-sized MoE, ours against transformers' on the same card from the same weights.

Both compute in bf16 with fp32 masters, the same AdamW and the same clipping; theirs adds micro-batches' gradients up
in bf16, ours in fp32. Rounds are interleaved.
"""

import statistics
import traceback
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from pithtrain.models.qwen3_moe import Qwen3MoE
from pithtrain.step import Trainee
from tests.device.measure import on_host, spread
from tests.device.model import (
    BETA1,
    BETA2,
    CLIP,
    EPS,
    LR,
    WEIGHT_DECAY,
    Setup,
    batches,
    flops_per_token,
    setup,
    start,
)  # fmt: skip
from tests.device.report import Place, Row, each, judged

ROUNDS, WARM_UP = 12, 3
APART = 0.02  # of the loss: two bf16 runs, each within 1% of fp32 (spec/precision.toml)

Contestant = Callable[[int], float]  # an update on the batch at a position; gives its loss


def training(place: Place) -> Iterator[Row]:
    yield from each(place, [("training step", partial(_against, place))])


def _against(place: Place) -> Iterator[Row]:
    made = setup(place.small)
    contestants, resident = dict[str, Contestant](), dict[str, int]()
    before = allocated(place)
    run = start(made, place.device, "bf16")
    weights = their_weights(run.trainee)
    contestants["pith"] = lambda position: run.step(batches(made, position, place.device)).loss
    losses: dict[str, list[float]] = {"pith": [contestants["pith"](0)]}
    resident["pith"] = allocated(place) - before
    try:
        before = allocated(place)
        other = theirs(made, place, weights)
        losses["transformers"] = [other(0)]
        resident["transformers"] = allocated(place) - before
        contestants["transformers"] = other
    except ModuleNotFoundError as error:
        yield Row("transformers", "not run", note=f"transformers not installed: {error}")
    except Exception:  # noqa: BLE001 - ours is measured all the same
        yield Row("transformers", "failed", note=traceback.format_exc())
    del weights
    yield from _measure(place, made, contestants, resident, losses)


def _measure(
    place: Place,
    made: Setup,
    contestants: dict[str, Contestant],
    resident: dict[str, int],
    losses: dict[str, list[float]],
) -> Iterator[Row]:
    """Rounds of all contestants; memory is what a contestant keeps and what its step adds."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    added = dict.fromkeys(contestants, 0)
    for position in range(1, 3 if place.small else WARM_UP + ROUNDS):
        for name, contestant in contestants.items():
            before = allocated(place)
            if place.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(place.device)
            results: list[float] = []
            taken = on_host(lambda: results.append(contestant(position)), place.device)  # noqa: B023
            losses[name] += results
            if place.device.type == "cuda":
                added[name] = max(added[name], torch.cuda.max_memory_allocated(place.device) - before)
            if place.small or position >= WARM_UP:
                seconds[name].append(taken)
    rate, flops = place.rate("bf16 product"), flops_per_token(made.arch, made.length)
    for name, times in seconds.items():
        middle, deciles = spread(times)
        figures = {"ms": middle * 1e3, "10%-90% ms": deciles, "tokens/s": made.tokens / middle}
        figures |= {"of the measured bf16 rate": None if rate is None else flops * made.tokens / middle / rate}
        figures |= {"peak GiB": (resident[name] + added[name]) / 2**30, "last loss": losses[name][-1]}
        figures |= {"ours is faster by": statistics.median(times) / statistics.median(seconds["pith"])}
        yield Row(name, "measured", figures)
    if "transformers" in contestants:
        apart = [abs(a - b) / b for a, b in zip(losses["pith"], losses["transformers"], strict=True)]
        yield judged("losses", f"{len(apart)} steps, relative", max(apart), APART)


def allocated(place: Place) -> int:
    return torch.cuda.memory_allocated(place.device) if place.device.type == "cuda" else 0


def their_weights(trainee: Trainee) -> dict[str, Tensor]:
    """Our masters under the names of transformers' module, where experts are stacked as ours are. On the CPU."""
    family, masters = Qwen3MoE.of(trainee.arch), trainee.shard.masters()
    state: dict[str, Tensor] = {}
    for name in trainee.shard.placements:
        tensor = trainee.shard.whole(masters, name)
        if ".experts." in name:
            stem, kind = name.rsplit(".", 1)
            state[f"model.{stem.replace('.experts', '.mlp.experts')}.{kind}_proj"] = tensor
        else:
            state |= family.names.to_family(name, tensor)
    return state


def theirs(made: Setup, place: Place, weights: dict[str, Tensor]) -> Contestant:
    """transformers in bf16 with grouped_mm experts, its weights' fp32 masters stepped by fused AdamW."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**Qwen3MoE.of(made.arch).config_json())
    config._experts_implementation = "grouped_mm"
    with torch.device(place.device):
        model = Qwen3MoeForCausalLM(config)
    model.load_state_dict(weights)
    for parameter in model.parameters():  # of its buffers, RoPE's frequencies stay in fp32
        parameter.data = parameter.data.to(torch.bfloat16)
    values: list[Tensor] = list(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    masters = [torch.nn.Parameter(weights[name].to(place.device)) for name in names]
    decayed, plain = ([m for m in masters if (m.ndim > 1) is matrix] for matrix in (True, False))
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(BETA1, BETA2), eps=EPS, fused=True)

    def update(position: int) -> float:
        total = torch.zeros((), device=place.device)
        for batch in batches(made, position, place.device):
            loss = model(input_ids=batch.tokens, labels=batch.labels, shift_labels=batch.labels).loss
            (loss / made.microbatches).backward()
            total += loss.detach().float() / made.microbatches
        for master, value in zip(masters, values, strict=True):
            assert value.grad is not None
            master.grad, value.grad = value.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(values, list[Tensor](masters))
        return float(total)

    return update
