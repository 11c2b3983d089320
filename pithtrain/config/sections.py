"""The sections of a run file and their fields, and the fingerprint of what determines a run's numbers."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pithtrain.choices import ExpertType

Preset = Literal["qwen3-moe-tiny", "qwen3-moe-small", "qwen3-30b-a3b"]

STAGES_PER_RANK = {"1f1b": 1, "interleaved": 2, "zbv": 2, "dualpipev": 2}  # interleaved takes any number


class ConfigError(ValueError):
    """A run that cannot be, in words for the user: one line per problem."""


class Section(BaseModel):
    """What all sections share: frozen, strict, no unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelConfig(Section):
    config: Preset | Path
    """Shape of the model: a preset's name, a Hugging Face config.json, or a folder that holds one."""
    experts: ExpertType | None = None
    """Type of the experts, in place of the one that `model.config` names; `spec/experts.toml` has their formulas."""
    weights: Path | None = None
    """Hugging Face model folder with the weights to start from; without it `train.seed` draws them."""


class DataConfig(Section):
    train: Path
    """Dataset folder written by `pith data prepare`."""
    validation: Path | None = None
    """Dataset folder of held-out documents; without it the run is not evaluated."""
    sequence_length: PositiveInt
    """Tokens per sequence that the model reads (a sample holds one more, the last label)."""


class BatchConfig(Section):
    global_batch_size: PositiveInt
    """Sequences per optimizer step, over all ranks and micro-batches."""
    num_microbatches: PositiveInt = 1
    """Slices of the global batch, one forward and backward each: more need less memory and idle a pipeline less."""


class MeshConfig(Section):
    """How ranks are laid out: world = pp x dp x cp x ep, ep innermost."""

    pp: PositiveInt = 1
    """Pipeline ranks: each holds some of the layers, and all read the same data."""
    dp: PositiveInt | Literal["rest"] = "rest"
    """Data-parallel replicas, or "rest": as many as the number of processes leaves."""
    cp: Literal[1] = 1
    """Ranks that share one sequence (context parallelism). Must be 1 for now."""
    ep: PositiveInt = 1
    """Ranks that share a layer's experts. They read different data."""


class PipelineConfig(Section):
    schedule: Literal["1f1b", "interleaved", "zbv", "dualpipev"] = "1f1b"
    """Order in which pipeline ranks run the micro-batches' passes; `pith schedule` draws and compares them."""
    chunks: PositiveInt | Literal["auto"] = "auto"
    """Stages per rank. 1f1b has 1, zbv and dualpipev have 2, interleaved any number, 2 for "auto"."""

    @property
    def num_chunks(self) -> int:
        """Stages per rank, "auto" worked out."""
        return STAGES_PER_RANK[self.schedule] if self.chunks == "auto" else self.chunks


class OptimConfig(Section):
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """adamw, or plain sgd without momentum. Neither decays norms and biases."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """adamw: decay of the first moment per step."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """adamw: decay of the second moment per step."""
    eps: PositiveFloat = 1e-8
    """adamw: added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, multiplied by the learning rate."""
    clip_norm: NonNegativeFloat = 1.0
    """Largest global gradient norm; a larger gradient is scaled down to it. 0 = no clipping."""


class ScheduleConfig(Section):
    kind: Literal["wsd", "cosine", "constant"] = "wsd"
    """After the warm-up, wsd holds the peak and falls at the end, cosine falls all along, constant holds."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear rise to the peak."""
    decay_steps: NonNegativeInt = 0
    """wsd: steps of the fall that ends with the run."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where the fall ends, as a fraction of the peak."""


class BalanceConfig(Section):
    loss: Literal["none", "sequence", "micro_batch", "global_batch"] = "global_batch"
    """Scope over which the balance loss counts the tokens of each expert."""
    coef: NonNegativeFloat = 1e-3
    """Weight of the balance loss."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the mean squared log-sum-exp of the router logits."""
    bias_update_rate: NonNegativeFloat = 0.0
    """Change of an expert's routing bias per step (balancing without a loss). 0 = no biases."""


class TrainConfig(Section):
    steps: PositiveInt
    """Optimizer steps of the whole run."""
    seed: NonNegativeInt = 0
    """Seed of the initial weights and of the order of the data."""
    precision: Literal["auto", "fp32", "bf16", "fp8"] = "auto"
    """Arithmetic; masters, sums, router and norms are fp32. auto: bf16 on CUDA, fp32 on CPU. fp8: bf16, with the
    products of attention, MLP and experts in blocks of E4M3."""
    recompute: Literal["none", "experts", "layer"] = "none"
    """Activations computed again in the backward pass instead of kept: the experts', or all within a layer."""
    routing: Literal["learned", "balanced"] = "learned"
    """How training chooses experts: by the router, or in turn and evenly, to measure speed without its effect."""
    eval_interval: NonNegativeInt = 0
    """Steps between evaluations on the validation data. 0 = only at the end."""
    eval_batches: NonNegativeInt = 0
    """Global batches per evaluation, always the same ones. 0 = all."""
    max_nonfinite_steps: PositiveInt = 10
    """Non-finite losses or gradient norms in a row that end the run; each such step is skipped."""
    threads: PositiveInt = 1
    """CPU threads per rank."""
    hang_timeout: PositiveInt = 600
    """Seconds that a rank waits for the others, or a stop signal for the last step and its checkpoint."""


class CheckpointConfig(Section):
    interval: NonNegativeInt = 0
    """Steps between checkpoints. 0 = only at the end or when stopped."""
    keep: PositiveInt = 2
    """Newest checkpoints kept."""
    resume: Literal["latest", "never"] | Path = "latest"
    """latest = the newest whole checkpoint of the run folder, if any; never = start anew; or a folder."""
    background: bool = True
    """Write from a snapshot while training goes on."""
    optimizer: bool = True
    """Save the optimizer's moments too. Without them a run cannot be resumed exactly."""


class OutputConfig(Section):
    folder: Path
    """Run folder: checkpoints, metrics.jsonl, status.json."""
    log_interval: PositiveInt = 10
    """Steps between printed lines when there is no terminal. metrics.jsonl has every step."""
    peak_flops: PositiveFloat | None = None
    """Peak FLOP/s of one device, for MFU, where the device's own figure is not known."""
    timeline_steps: NonNegativeInt = 0
    """Steps recorded for `pith timeline`, after the first of a start. 0 = none."""


class RunConfig(Section):
    model: ModelConfig
    data: DataConfig
    batch: BatchConfig
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    balance: BalanceConfig = BalanceConfig()
    train: TrainConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: OutputConfig


# every key of a run file, as "section.field"
FIELDS = {
    f"{section}.{name}": field
    for section, info in RunConfig.model_fields.items()
    for name, field in cast(type[Section], info.annotation).model_fields.items()
}

_NOT_NUMBERS: dict[str, bool | set[str]] = {
    **dict.fromkeys(("mesh", "pipeline", "checkpoint", "run"), True),
    "data": {"validation"},
    "train": {"recompute", "eval_interval", "eval_batches", "max_nonfinite_steps", "threads", "hang_timeout"},
}


def fingerprint(cfg: RunConfig, contents: Mapping[str, str] | None = None) -> str:
    """sha256 (hex) of what determines a run's numbers.

    Left out: where things are written and how often, what only watches the run, and mesh, pipeline, threads
    and recomputation, which change the order of summation and nothing else. `contents` replaces a path by a digest
    of what lies there (`{"data.train": "<sha256>"}`): the same files elsewhere then give the same fingerprint.
    """
    numbers = cfg.model_dump(mode="json", exclude=_NOT_NUMBERS)
    values = {f"{section}.{field}": value for section, table in numbers.items() for field, value in table.items()}
    contents = contents or {}
    assert contents.keys() <= values.keys(), f"not in the fingerprint: {sorted(contents.keys() - values.keys())}"
    canonical = json.dumps({**values, **contents}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a run file; spec/run.schema.json holds it."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}
