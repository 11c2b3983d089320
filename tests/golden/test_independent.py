"""The golden traces by an independent loop: transformers' model, torch's optimizer, the same weights and batches.

Nothing of the trainer computes here: it gives the initial weights and the batches, spec.reference the balance losses
and the schedule. Routing biases and types of experts that transformers does not have in this family are left out.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from golden.cases import CASES, Case
from golden.replay import make_dataset
from golden.trace import Step, read
from pithtrain import step
from pithtrain.models.qwen3_moe import Qwen3MoE, to_hf_config
from pithtrain.parallel.mesh import make_mesh
from pithtrain.parallel.transport import Transport
from spec.reference import losses, schedule
from spec.reference.router import count_tokens_per_expert
from tests.models import hf

NUM_STEPS = 10
ROOMS = {"embed_tokens": "embedding", "self_attn": "attention", "experts": "experts", "gate.weight": "router"}
COVERED = [case for case in CASES if not case.bias_rate and to_hf_config(case.arch)["model_type"] == "qwen3_moe"]


def initial_model(case: Case) -> Qwen3MoeForCausalLM:
    """transformers' model holding the initial weights of the case."""
    model = Qwen3MoeForCausalLM._from_config(
        Qwen3MoeConfig(**to_hf_config(case.arch)), experts_implementation="eager", attn_implementation="eager"
    )
    trainee = step.build(case.arch, make_mesh(), Transport(), case.sequence_length, torch.device("cpu"))
    trainee.shard.initialise(case.seed)
    names, masters = Qwen3MoE.of(case.arch).names, trainee.shard.masters()
    ours: dict[str, Tensor] = {}
    for name in trainee.shard.placements:
        ours |= names.to_family(name, trainee.shard.whole(masters, name))
    for name, tensor in hf.released_names(model.state_dict()).items():
        if name in ours or not case.arch.tie_word_embeddings:
            tensor.copy_(ours[name])
    return model


def rate_at(case: Case, index: int) -> float:
    rate = case.optimizer.rate
    match rate.kind:
        case "constant":
            return schedule.constant(index, rate.lr, rate.warmup_steps)
        case "cosine":
            return schedule.cosine(index, rate.lr, rate.total_steps, rate.warmup_steps, rate.min_lr_ratio)
        case "wsd":
            return schedule.warmup_stable_decay(
                index, rate.lr, rate.total_steps, rate.warmup_steps, rate.decay_steps, rate.min_lr_ratio
            )


def balance(case: Case, logits: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, list[list[int]]]:
    """(balance loss, z-loss, counts) of every layer's router logits [T, E], for one micro-batch."""
    objective, arch = case.objective, case.arch
    total, z_total, counts = torch.zeros(()), torch.zeros(()), []
    for layer in logits:
        layer = layer.view(case.global_batch_size, case.sequence_length, arch.num_experts)
        probs = layer.softmax(-1)
        ids = probs.topk(arch.top_k).indices
        counts.append(count_tokens_per_expert(ids, arch.num_experts).tolist())
        match objective.balance:
            case "sequence":
                total = total + losses.sequence_balance_loss(probs, ids, objective.balance_coef)
            case "micro_batch":
                total = total + losses.micro_batch_balance_loss(probs, ids, objective.balance_coef, 1)
            case other:
                assert other == "none", "only this loop's losses can be reproduced"
        z_total = z_total + losses.z_loss(layer.logsumexp(-1), objective.z_coef)
    return total, z_total, counts


def room_of(name: str) -> str:
    if name.endswith("norm.weight") and "self_attn" not in name:
        return "norm"
    return next((room for part, room in ROOMS.items() if part in name), "head" if "lm_head" in name else "mlp")


def norms_by_room(model: Qwen3MoeForCausalLM) -> dict[str, float]:
    squares: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        square = float(parameter.grad.double().square().sum())
        squares[room_of(name)] = squares.get(room_of(name), 0.0) + square
    return {room: square**0.5 for room, square in squares.items()}


def make_optimizer(case: Case, model: Qwen3MoeForCausalLM) -> torch.optim.Optimizer:
    """torch's own; matrices decay, vectors do not. torch's SGD has no decoupled decay, so `decay` does it."""
    spec, parameters = case.optimizer, list(model.parameters())
    if spec.kind == "sgd":
        return torch.optim.SGD(parameters, lr=1.0)
    matrices, vectors = ([p for p in parameters if (p.ndim > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(spec.beta1, spec.beta2), eps=spec.eps, weight_decay=spec.weight_decay)


def take(case: Case, model: Qwen3MoeForCausalLM, optimizer: torch.optim.Optimizer, index: int) -> Step:
    """One step of the loop, and what a trace says of it."""
    size, lr = case.global_batch_size, rate_at(case, index)
    batch = make_dataset(case).microbatch(index * size, size, 1, 0, 0, 1, case.sequence_length)
    output = model(input_ids=batch.tokens, output_router_logits=True)
    loss = F.cross_entropy(output.logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
    balance_loss, z_loss, counts = balance(case, output.router_logits)
    optimizer.zero_grad()
    (loss + balance_loss + z_loss).backward()
    rooms = norms_by_room(model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.optimizer.clip_norm or float("inf"))
    if case.optimizer.kind == "sgd":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1 - lr * case.optimizer.weight_decay if parameter.ndim > 1 else 1
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return Step(loss.item(), balance_loss.item(), z_loss.item(), norm.item(), rooms, lr, counts)


@pytest.mark.parametrize("case", COVERED, ids=lambda case: case.name)
def test_traces_are_those_of_an_independent_loop(case: Case) -> None:
    model, golden = initial_model(case), read(case.name).trace
    optimizer = make_optimizer(case, model)
    for index in range(NUM_STEPS):
        got, expected = take(case, model, optimizer, index), golden.steps[index]
        where = f"{case.name}, step {index}"
        assert got.num_tokens_per_expert == expected.num_tokens_per_expert, where
        assert got.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5), where
        for field in ("loss", "balance_loss", "z_loss", "grad_norm"):
            assert getattr(got, field) == pytest.approx(getattr(expected, field), rel=1e-5), f"{where}: {field}"
        assert got.learning_rate == pytest.approx(expected.learning_rate, rel=1e-12), where


def test_the_loop_covers_what_it_can() -> None:
    left_out = [case.name for case in CASES if case not in COVERED and case.arch.expert_type == "swiglu"]
    assert left_out == ["bias-balance", "pipeline"]
    assert {case.arch.expert_type for case in COVERED} == {"swiglu", "geglu", "gated_relu2"}
    assert all(case.num_microbatches == 1 for case in COVERED)
    assert replace(COVERED[0], seed=9).fingerprint() != COVERED[0].fingerprint()
