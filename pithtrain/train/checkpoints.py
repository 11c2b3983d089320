"""A run's state to and from checkpoint folders: what the checkpoint room asks of the model, and where a run starts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pithtrain.checkpoint import Ranks, SaveFailed, Saver, TrainState, import_weights, latest, load
from pithtrain.checkpoint.folder import index_name
from pithtrain.checkpoint.state import WEIGHT
from pithtrain.models.qwen3_moe import Qwen3MoE
from pithtrain.optim import Optimizer
from pithtrain.parallel.shard import Flat, Shard
from pithtrain.train.plan import CHECKPOINTS, Plan


@dataclass(frozen=True, eq=False)
class ShardState:
    """The checkpoint room's view of this rank's master shards and moments (`ModelState`)."""

    shard: Shard
    optimizer: Optimizer

    def names(self) -> list[str]:
        return [spec.name for spec in self.shard.specs]

    def holds(self, name: str) -> bool:
        return self.shard.holds(name)

    def gather(self, kind: str, name: str) -> Tensor:
        return self.shard.whole(self._flat(kind), name)

    def scatter(self, kind: str, name: str, tensor: Tensor) -> None:
        self.shard.keep(self._flat(kind), name, tensor)

    def local_experts(self, name: str) -> range | None:
        return self.shard.local_experts(name)

    def _flat(self, kind: str) -> Flat:
        return self.shard.masters() if kind == WEIGHT else self.optimizer.state()[kind]


class Checkpoints:
    """A run's checkpoints. Every method is collective; a save that fails is told by rank 0, and the run goes on."""

    def __init__(self, plan: Plan, shard: Shard, optimizer: Optimizer, ranks: Ranks) -> None:
        self._plan, self._ranks = plan, ranks
        self._state, self._family = ShardState(shard, optimizer), Qwen3MoE.of(plan.arch)
        self._sparse_layers = [f"layers.{i}" for i, sparse in enumerate(plan.arch.sparse_layers) if sparse]
        self._problem = ""  # why the newest save failed
        options, self._folder = plan.cfg.checkpoint, plan.cfg.run.folder / CHECKPOINTS
        moments = tuple(optimizer.state()) if options.optimizer else ()
        self._saver = Saver(self._folder, ranks, keep=options.keep, background=options.background, moments=moments)

    def save(self, state: TrainState, expert_bias: Tensor | None) -> None:
        """Saves, or has a copy saved in the background. expert_bias: [M, E]."""
        self.finish()
        biases = {} if expert_bias is None else dict(zip(self._sparse_layers, expert_bias, strict=True))
        self._try(lambda: self._saver.save(self._state, self._family, state, biases))

    def poll(self) -> None:
        """Publishes a background save that is written."""
        self._try(self._saver.poll)

    def finish(self) -> str:
        """Waits for the save in flight; why the newest failed, "" if it did not."""
        self._try(self._saver.wait)
        return self._problem

    def _try(self, action: Callable[[], Path | None]) -> None:
        try:
            if action() is not None:
                self._problem = ""
        except SaveFailed as error:
            self._problem = str(error)
            self._say(f"checkpoint: {error}")

    def _say(self, message: str) -> None:
        if self._ranks.rank == 0:
            print(message, flush=True)

    def restore(self) -> tuple[TrainState, Tensor | None]:
        """The state to go on from, weights and moments in place, and the routing biases [M, E] if there are any."""
        cfg, shard = self._plan.cfg, self._state.shard
        if path := self._find():
            state, biases = self._load(path)
        else:
            state, biases = TrainState(0, 0, 0, 0), {}
            if cfg.model.weights is None:
                shard.initialise(cfg.train.seed)
            else:
                biases = import_weights(cfg.model.weights, self._state, self._family, self._ranks)
        shard.gather()
        state = replace(state, config_fingerprint=self._plan.fingerprint, mesh=self._plan.shape._asdict())
        if not self._sparse_layers or not (biases or cfg.balance.bias_update_rate):
            return state, None
        zeros = torch.zeros(self._plan.arch.num_experts)
        rows = [biases.get(name, zeros) for name in self._sparse_layers]
        return state, torch.stack(rows).to(shard.buckets["dense"].values.device)

    def _find(self) -> Path | None:
        resume = self._plan.cfg.checkpoint.resume
        if resume == "latest":
            path, skipped = latest(self._folder, self._ranks)
            for reason in skipped:
                self._say(f"checkpoint skipped: {reason}")
            return path
        return None if resume == "never" else resume

    def _load(self, path: Path) -> tuple[TrainState, dict[str, Tensor]]:
        cfg, wanted = self._plan.cfg, self._state.optimizer.state()
        moments = [kind for kind in wanted if (path / index_name(kind)).is_file()]
        verified = cfg.checkpoint.resume == "latest"
        state, biases = load(path, self._state, self._family, self._ranks, moments=moments, verified=verified)
        self._say(f"resumed from {path}")
        if len(moments) < len(wanted):
            self._say("the checkpoint has no moments of the optimizer: they start from zero, so the run differs")
            state = replace(state, optimizer_steps=0)
        was, now = state.config_fingerprint, self._plan.fingerprint
        if was != now:
            numbers = f"fingerprint {now[:12]}, was {was[:12]}"
            self._say(f"the run's config is not the checkpoint's ({numbers}): it goes on with the new one")
        if state.nonfinite_in_a_row >= cfg.train.max_nonfinite_steps:
            state = replace(state, nonfinite_in_a_row=0)
        return state, biases
