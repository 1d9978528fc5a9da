"""Settings of the training stage."""

from typing import Literal, Self

from pydantic import Field, model_validator

from pipelines.config import Section
from signals.config import SignalsConfig

LossName = Literal["decoupled_ppo", "cispo", "gspo", "dppo", "reinforce", "rloo", "sft"]


class UpdateConfig(Section):
    """One on-policy update: rows of the lake and the serving checkpoint become a candidate."""

    world_size: int = Field(default=2, ge=1)
    """Ranks on each machine (one a core or one a GPU); ranks x threads must not exceed free cores."""
    nodes: int = Field(default=1, ge=1)
    """Machines that train together, `world_size` ranks on each; they share the deployment's folder."""
    rendezvous: str = ""
    """HOST:PORT of one of them, where torchrun's agents meet; needed with more than one node."""
    launcher: Literal["torchrun", "deepspeed"] = "torchrun"
    """`deepspeed` starts all nodes of `hostfile` by ssh from here; with torchrun each other node runs `tidegate trainer join`."""
    hostfile: str = ""
    """DeepSpeed's list of machines, a `NAME slots=N` a line."""
    threads_per_rank: int = Field(default=1, ge=1)
    """OpenMP threads of a CPU rank; more than the free cores makes small ops many times slower."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Arithmetic of the frozen weights and activations; adapters, log-softmax, optimizer and accumulation are fp32 always."""
    zero_stage: int = Field(default=1, ge=0, le=3)
    """What DeepSpeed spreads over the ranks: 1 optimizer states, 2 gradients too, 3 weights too, 0 nothing."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """Keep the optimizer's states, or these and the weights (ZeRO 3), in CPU memory: for models that do not fit the GPUs."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: a third more time, memory of one layer."""
    seed: int = 0

    adapter: Literal["lora", "full"] = "lora"
    lora_rank: int = Field(default=16, ge=1)
    lora_alpha: float = Field(default=32.0, gt=0)
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    lr: float = Field(default=7e-5, ge=0)
    """Of the adapters; 0 is the self-test: nothing must move. Measured on SmolLM2-135M, 48 rows of 49 trained tokens, 6 steps of
    16 rows: 1e-4 moves an even two-way decision from .50 to .94 with KL(serving || candidate) .019 nat a token, at the edge of what
    the gate allows (.02), so the default is a notch below."""
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    passes: int = Field(default=2, ge=1)
    """How often each row is visited."""
    rows_per_step: int = Field(default=16, ge=1)
    """Rows in one optimizer batch, over all ranks."""
    steps_per_prox: int = Field(default=1, ge=1)
    """Optimizer steps that share one proximal policy. 1: prox is the policy at the start of every step, no extra forward needed."""

    loss: LossName = "decoupled_ppo"
    beta: float = Field(default=0.02, ge=0)
    """Weight of KL(theta || approved). Starting guess."""
    weight_cap: float = Field(default=2.0, gt=0)
    sequence_ratio_low: float = Field(default=0.9, gt=0)
    sequence_ratio_high: float = Field(default=1.1, gt=0)
    """Turns whose mean prox/mu ratio leaves [low, high] are masked. Starting guess, to be calibrated from the parity probe."""
    veto_low: float = Field(default=1e-4, gt=0)
    veto_high: float = Field(default=100.0, gt=0)
    negative_kl_cap: float = Field(default=0.1, ge=0)
    """A punished turn that already lost this many nats a token is pushed no further."""
    clip_low: float = Field(default=0.8, gt=0)
    clip_high: float = Field(default=1.28, gt=0)
    dual_clip: float = Field(default=3.0, gt=1)
    sequence_clip_low: float = Field(default=3e-4, gt=0, lt=1)
    sequence_clip_high: float = Field(default=4e-4, gt=0)
    """`gspo`: how far a row's mean ratio may leave 1, downwards and upwards; as published."""
    divergence_limit: float = Field(default=0.15, gt=0, lt=1)
    """`dppo`: how much a token's probability may have moved since it was sampled. Starting guess."""

    gamma: float = Field(default=0.9, ge=0, le=1)
    """Discount across turns; 1 within a turn. Starting guess."""
    baseline_kappa: float = Field(default=8.0, ge=0)
    """Rows that the running baseline counts for. Starting guess."""
    baseline_decay: float = Field(default=0.8, ge=0, lt=1)
    """How much of a bucket's running mean survives one update."""
    advantage_clip: float = Field(default=5.0, gt=0)
    user_cap: float = Field(default=16.0, gt=0)
    """Rows a user can have before each of them counts less."""

    hindsight: float = Field(default=0.0, ge=0)
    """Weight of what the policy would have said had it known the user's next message, token by token, beside the advantage. 0: off."""
    hindsight_clip: float = Field(default=1.0, gt=0)
    """Largest |log-probability difference| that counts, nats."""

    max_rows: int = Field(default=4096, ge=1)
    min_rows: int = Field(default=2, ge=1)
    """Fewer trainable rows than this and no candidate is made."""
    max_row_tokens: int = Field(default=4096, ge=2)
    max_tokens_per_micro_batch: int = Field(default=2048, ge=2)
    max_stale_versions: int = Field(default=2, ge=0)
    max_stale_hours: float = Field(default=72.0, gt=0)
    origins: tuple[str, ...] = ("live", "simulated")
    """Benchmark sessions are never trained on."""

    kl_budget: float = Field(default=0.01, gt=0)
    """Mean k3 to the approved checkpoint, nats a token: above this the update stops and emits what exists. Half of what the gate
    allows, because the gate measures the other direction, KL(serving || candidate), which is the larger one where a choice was
    made unlikely."""
    kl_target: float = Field(default=0.005, gt=0)
    """Mean k3 aimed at, nats a token: above it `beta` doubles from step to step, long before the budget ends the update."""
    parity_rows: int = Field(default=64, ge=1)
    """Rows of the parent's own that are scored again before training; where they agree, the others' logged log-probabilities are
    the reference, and no forward pass is spent on them."""
    parity_median: float = Field(default=0.02, gt=0)
    parity_p99: float = Field(default=0.5, gt=0)
    parity_outside_share: float = Field(default=0.1, gt=0, le=1)
    """Same-version rows re-scored before training: limits on median |d|, p99 |d| (nats) and the share of tokens outside +-10 %."""
    probe_tolerance: float = Field(default=0.02, gt=0)
    """Mean |d| between the exported weights and the trainer on the probe."""
    max_nonfinite_steps: int = Field(default=3, ge=1)
    """Non-finite steps in a row before the update aborts."""
    save_every_steps: int = Field(default=1, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    collective_timeout_s: float = Field(default=300.0, gt=0)
    timeout_s: float = Field(default=7200.0, gt=0)
    """The whole update, ranks included."""

    @model_validator(mode="after")
    def _nodes_can_meet(self) -> Self:
        if self.launcher == "torchrun" and self.nodes > 1 and ":" not in self.rendezvous:
            raise ValueError("nodes > 1 needs rendezvous = 'HOST:PORT', where the nodes meet")
        if self.launcher == "deepspeed" and not self.hostfile:
            raise ValueError("launcher = 'deepspeed' needs hostfile, the list of machines")
        return self


class WarmstartConfig(Section):
    """Supervised training before reinforcement."""

    dtype: Literal["fp32", "bf16"] = "bf16"
    lr: float = Field(default=2e-4, ge=0)
    """Full weights in fp32 masters; measured to teach the tool-call format in a few hundred examples."""
    examples_per_step: int = Field(default=8, ge=1)
    passes: int = Field(default=1, ge=1)
    max_examples: int = Field(default=128, ge=1)
    """Stop after this many examples (early on purpose: reinforcement needs room)."""
    warmup_steps: int = Field(default=2, ge=0)
    save_every_steps: int = Field(default=8, ge=1)
    """A full-weight checkpoint is six times the model in bytes; a killed warm start loses at most this many steps."""
    max_tokens_per_micro_batch: int = Field(default=2048, ge=2)
    world_size: int | None = Field(default=None, ge=1)
    """Ranks on each machine; None: `trainer.world_size`. On CPU one rank of several threads is faster here than several of one: all
    weights are trained, so ranks would exchange four bytes a weight every step (SmolLM2-135M, two busy cores: 17 to 22 % less time a
    step, 14 % less CPU time; after six steps the losses differ by 1 to 3 %, as bf16 rounds)."""
    threads_per_rank: int | None = Field(default=None, ge=1)
    """None: `trainer.threads_per_rank`."""


class PretrainConfig(Section):
    """Continued pretraining on text and code, before a warm start; dtype, warm-up, ranks and checkpoints are those of `warmstart`."""

    lr: float = Field(default=5e-5, ge=0)
    """Full weights; a quarter of the warm start's, because the model knows the language already and is not to forget it."""
    row_tokens: int = Field(default=1024, ge=32)
    rows_per_step: int = Field(default=8, ge=1)
    max_tokens: int = Field(default=1_000_000, ge=1)
    """Stop after this many tokens: half an hour on two cores for a 135M model."""


class MlflowConfig(Section):
    """Where runs are tracked."""

    tracking_uri: str = ""
    """Empty means SQLite under the deployment's home."""


class TrainerConfig(SignalsConfig):
    """Settings up to the training stage."""

    trainer: UpdateConfig = UpdateConfig()
    pretrain: PretrainConfig = PretrainConfig()
    warmstart: WarmstartConfig = WarmstartConfig()
    mlflow: MlflowConfig = MlflowConfig()
