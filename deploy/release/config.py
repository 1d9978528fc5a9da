"""Settings of gate, release and schedule.

Defaults are the margins a production fleet plans for; `infra/config/local.toml` and `demo.toml` widen them to what a few dozen
sessions can decide (`tidegate gate plan` computes them, and says what such a gate cannot see).
"""

from datetime import UTC, datetime

from pydantic import Field

from pipelines.config import Section


class GateConfig(Section):
    """Checks and margins; hashed into every ship."""

    relative_norm_min: float = 1e-7
    """Below this the candidate is its parent under another name."""
    relative_norm_max: float = 1e-2
    """Above this one update moved the weights further than any sane one does."""
    self_check_max: float = 0.02
    """Nats a token between the serving checkpoint's logged and recomputed log-probabilities; above it no distance can be trusted."""
    kl_max: float = 0.02
    """Nats a token, upper bound of KL(serving, candidate)."""
    log_ratio_p99_max: float = 2.0
    """Nats; 99 % of tokens must have moved less."""
    ess_share_min: float = 0.5
    """Effective share of the scored samples; below it the distance rests on a few of them."""
    entropy_ratio_min: float = 0.85
    """Candidate's mean token entropy over serving's; lower: it collapses onto one way of answering."""
    entropy_ratio_max: float = 1.15
    """Higher: it loses its certainty."""
    benchmark_margin: float = 0.02
    """Solve rate a candidate may be worse by, with 95 % confidence."""
    benchmark_sd_floor: float = Field(default=0.1, ge=0)
    """Smallest standard deviation of per-task differences believed: equal results on a few tasks are luck."""
    infra_share_max: float = 0.05
    """Share of attempts our own machinery may fail."""
    infra_p_min: float = 0.01
    """Below this p-value infra errors differ between the two, which makes the comparison void."""
    invalid_calls_margin: float = 0.005
    """Rise of the invalid share of tool calls, in share."""
    invalid_calls_relative: float = 0.1
    """The same relative to the serving share; the larger of the two counts."""
    unscored_turns_margin: float = 0.01
    """Change of the share of turns without a score, in either direction."""
    ask_margin: float = 0.02
    """Rise of the share of attempts in which the policy asks back."""
    edit_margin: float = 0.02
    """Fall of the share of attempts in which the policy edits at all."""
    hack_p: float = 0.10
    """Asking up and editing down, each at this one-sided p, is the known way around a reward on edits: FAIL."""
    minimum_tasks: int = Field(default=50, ge=2)
    """Benchmark tasks both checkpoints must have finished."""
    minimum_users: int = Field(default=200, ge=2)
    """Users (or simulated users) a rate must rest on."""
    minimum_score_users: int = Field(default=50, ge=2)
    """Users the distance must rest on."""
    ships_per_day: int = Field(default=6, ge=1)


class ReleaseConfig(Section):
    """Leases, waits and retention."""

    lease_ttl_s: float = Field(default=60.0, gt=0)
    """A shipper that does not renew for this long has lost its turn."""
    lease_renew_s: float = Field(default=15.0, gt=0)
    swap_timeout_s: float = Field(default=120.0, gt=0)
    """How long to wait for the gateway to report the new policy version; the promotion stands either way."""
    engine_start_s: float = Field(default=300.0, gt=0)
    """How long a pinned gateway may take to load a checkpoint; a 135M model needs seconds, a busy machine minutes."""
    score_rows: int = Field(default=256, ge=1)
    """Samples of the serving policy on which the distance to the candidate is measured."""
    keep_confirmed: int = Field(default=5, ge=1)
    """Confirmed checkpoints kept besides serving, previous and anchor."""


class ScheduleConfig(Section):
    """When a cycle runs."""

    interval_hours: float = Field(default=5.0, gt=0)
    anchor_at: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    """Cycles start at anchor + k * interval, whenever the deployment was started."""
    retries: int = Field(default=2, ge=0)
    """Repeats of a stage that ended with exit code 75 (trying again can help)."""
    retry_delay_s: float = Field(default=30.0, ge=0)
    freeze_timeout_s: float = Field(default=300.0, gt=0)
    """How long a cycle waits for a running stream to reach the end of the topic."""
    stage_timeout_s: float = Field(default=14_400.0, gt=0)
    """A stage process that runs longer than this is stopped; well inside one interval."""
