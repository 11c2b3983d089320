"""A run's state to and from checkpoint folders: what the checkpoint room asks of the model, and where a run starts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pithtrain.checkpoint import Ranks, SaveFailed, Saver, TrainState, import_weights, latest, load
from pithtrain.checkpoint.folder import index_name, step_folders
from pithtrain.checkpoint.state import MOMENTS, WEIGHT
from pithtrain.models.architecture import Architecture
from pithtrain.models.qwen3_moe import Qwen3MoE
from pithtrain.optim import AdamW, Optimizer
from pithtrain.parallel.shard import Flat, Shard
from pithtrain.train.plan import Plan

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, eq=False)
class ShardState:
    """The checkpoint room's view of this rank's master shards and moments (`ModelState`)."""

    shard: Shard
    optimizer: Optimizer

    def names(self) -> list[str]:
        return list(self.shard.placements)

    def gather(self, kind: str, name: str) -> Tensor:
        return self.shard.whole(self._flat(kind), name)

    def scatter(self, kind: str, name: str, expert: slice | None, tensor: Tensor) -> None:
        self.shard.keep(self._flat(kind), name, tensor)

    def local_experts(self, name: str) -> range | None:
        return self.shard.local_experts(name)

    def _flat(self, kind: str) -> Flat:
        return self.shard.masters() if kind == WEIGHT else self.optimizer.state()[kind]


def _sparse_layers(arch: Architecture) -> list[str]:
    return [f"layers.{index}" for index, sparse in enumerate(arch.sparse_layers) if sparse]


class Checkpoints:
    """A run's checkpoints. Every method is collective; a save that fails is told by `say`, and the run goes on."""

    def __init__(
        self, plan: Plan, shard: Shard, optimizer: Optimizer, ranks: Ranks, say: Callable[[str], None]
    ) -> None:
        self.plan, self.ranks, self.say = plan, ranks, say
        self.folder = plan.cfg.run.folder / CHECKPOINTS
        self.problem = ""  # why the newest save failed
        self._state, self._family = ShardState(shard, optimizer), Qwen3MoE.of(plan.arch)
        options = plan.cfg.checkpoint
        moments = MOMENTS if options.optimizer and isinstance(optimizer, AdamW) else ()
        self._saver = Saver(self.folder, ranks, keep=options.keep, background=options.background, moments=moments)

    def save(self, state: TrainState, expert_bias: Tensor | None) -> None:
        """Saves, or has a copy saved in the background. expert_bias: [M, E]."""
        self.finish()
        rows = [] if expert_bias is None else list(expert_bias)
        biases = dict(zip(_sparse_layers(self.plan.arch), rows, strict=False))
        self._try(lambda: self._saver.save(self._state, self._family, state, biases))

    def poll(self) -> None:
        """Publishes a background save that is written."""
        self._try(self._saver.poll)

    def finish(self) -> str:
        """Waits for the save in flight; why the newest failed, "" if it did not."""
        self._try(self._saver.wait)
        return self.problem

    def _try(self, action: Callable[[], Path | None]) -> None:
        try:
            if action() is not None:
                self.problem = ""
        except SaveFailed as error:
            self.problem = str(error)
            self.say(f"checkpoint: {error}")

    def restore(self) -> tuple[TrainState, Tensor | None]:
        """The state to go on from, weights and moments in place, and the routing biases if there are any."""
        cfg, shard = self.plan.cfg, self._state.shard
        path = self._find()
        if path is not None:
            state, biases = self._load(path)
        else:
            state, biases = TrainState(0, 0, 0, 0), {}
            if cfg.model.weights is None:
                shard.initialise(cfg.train.seed)
            else:
                biases = import_weights(cfg.model.weights, self._state, self._family, self.ranks)
        shard.gather()
        mesh = self.plan.shape._asdict()
        return replace(state, config_fingerprint=self.plan.fingerprint, mesh=mesh), self._expert_bias(biases)

    def _find(self) -> Path | None:
        match self.plan.cfg.checkpoint.resume:
            case "never":
                if step_folders(self.folder):
                    raise ValueError(
                        f'checkpoint.resume = "never", but {self.folder} holds the checkpoints of another run; '
                        "name a new run.folder, or remove them"
                    )
                return None
            case "latest":
                path, skipped = latest(self.folder, self.ranks)
                for reason in skipped:
                    self.say(f"checkpoint skipped: {reason}")
                return path
            case path:
                return path

    def _load(self, path: Path) -> tuple[TrainState, dict[str, Tensor]]:
        cfg, optimizer = self.plan.cfg, self._state.optimizer
        wanted = MOMENTS if isinstance(optimizer, AdamW) else ()
        moments = [kind for kind in wanted if (path / index_name(kind)).is_file()]
        verified = cfg.checkpoint.resume == "latest"
        state, biases = load(path, self._state, self._family, self.ranks, moments=moments, verified=verified)
        self.say(f"resumed from {path}")
        if len(moments) < len(wanted):
            self.say("the checkpoint has no moments of the optimizer: they start from zero, so the run differs")
            state = replace(state, optimizer_steps=0)
        if state.config_fingerprint != self.plan.fingerprint:
            was, now = state.config_fingerprint[:12], self.plan.fingerprint[:12]
            self.say(
                f"the run's config is not the checkpoint's (fingerprint {now}, was {was}): it goes on with the new one"
            )
        if state.nonfinite_in_a_row >= cfg.train.max_nonfinite_steps:
            state = replace(state, nonfinite_in_a_row=0)
        return state, biases

    def _expert_bias(self, biases: dict[str, Tensor]) -> Tensor | None:
        """[M, E] fp32 on the model's device: those of the checkpoint, else zeros where balancing changes them."""
        arch = self.plan.arch
        if not biases and not self.plan.cfg.balance.bias_update_rate:
            return None
        zeros = torch.zeros(arch.num_experts)
        rows = [biases.get(name, zeros) for name in _sparse_layers(arch)]
        return torch.stack(rows).to(self._state.shard.buckets["dense"].values.device)
