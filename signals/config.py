"""Settings of the signal stage."""

from typing import Final

from pydantic import Field, field_validator

from pipelines.codec import FUTURE_TOLERANCE_MS
from pipelines.config import PipelinesConfig, Section
from signals.samples import COMPONENTS


class SparkConfig(Section):
    """How Spark runs."""

    master: str = "local[2]"
    """Two cores: the rest of a laptop belongs to the engine and the trainer."""
    driver_memory: str = "2g"
    shuffle_partitions: int = Field(default=2, ge=1)
    """Two on one machine: small tables pay for every partition; raise it with the cluster."""
    jars: str = ""
    """Folder with the Delta and Kafka connector jars; empty means the one that setup fills."""
    conf: dict[str, str] = Field(default_factory=dict)
    """Further Spark settings, by name; they win over ours."""


class JobsConfig(Section):
    """The append and distil jobs."""

    trigger_s: float = Field(default=30.0, gt=0)
    """How often the continuous append job starts a batch; fresher costs more small files."""
    distil_s: float = Field(default=60.0, gt=0)
    """The continuous job distils after every batch that brought events, and at the latest this often: windows close by themselves."""
    max_offsets_per_trigger: int = Field(default=200_000, ge=1)
    """Bound of one batch, so that a backlog never outgrows the driver's memory; each batch costs seconds besides its events."""
    future_allowance_s: float = Field(default=FUTURE_TOLERANCE_MS / 1000, ge=0)
    """How far an event's clock may run ahead of its Kafka record's time before it is quarantined. The record's time and not the reader's
    clock: reading again must decide alike."""
    cycle_s: float = Field(default=18_000.0, gt=0)
    """Length of a training cycle; the topic must keep records for three cycles and reward windows."""
    lookback_days: int = Field(default=30, ge=1)
    """A touched session is recomputed from events that arrived at most this long before its newest arrival."""
    quarantine_alert_share: float = Field(default=0.05, ge=0, le=1)
    """Share of quarantined records above which `run` warns."""


WEIGHTS: Final = {
    "edits_kept": 1.0, "follow_up": 0.5, "latency": 0.1, "tool_calls": 0.5, "effort": 0.05, "conventions": 0.2, "evidence": 0.1,
    "explicit": 0.5, "deferral": 1.0,
}  # fmt: skip
"""See `RewardsConfig.weights`."""


class RewardsConfig(Section):
    """Weights and windows of the reward."""

    window_s: int = Field(default=1800, ge=1)
    """How long a turn waits for evidence after its last action, unless the session ends or the user says what they think."""
    weights: dict[str, float] = Field(default_factory=lambda: dict(WEIGHTS))
    """Weight of each component. Kept edits lead because they are what the user did; what the user said is worth half of that, and a
    follow-up is a model's reading of it. A deferral stands where the edits would, so it weighs the same. An invalid call costs half an
    edit. Conventions are cheap to satisfy with a bad edit. Effort, evidence and latency only part equals. A component
    that is not named keeps its default; 0 turns it off."""
    latency_medians_ms: dict[str, float] = Field(default_factory=dict)
    """Median sampling time of a turn by task bucket ("*" for any other) until norms are frozen (`signals baselines --freeze`), which win;
    without either a turn has no latency component. Frozen, because a median of the data being scored would make one turn's reward depend
    on which other turns arrived."""
    repeat_cost: float = Field(default=0.25, ge=0, le=1)
    """What the same call again costs when nothing changed in between, in invalid calls: wasteful, but it works."""
    serial_cost: float = Field(default=0.1, ge=0, le=1)
    """What a look-up costs that could have gone out in parallel, in invalid calls: it only took a while."""
    effort_per_1k_tokens: float = Field(default=1.0, ge=0)
    """Effort of a thousand response tokens: the unit of effort."""
    effort_per_call: float = Field(default=0.1, ge=0)
    """Effort of a tool call: about a hundred tokens of arguments and result to read."""
    effort_per_completion: float = Field(default=0.1, ge=0)
    """Effort of one more request to the model: its prompt is read again, if mostly from the cache."""
    effort_k: float = Field(default=0.5, gt=0)
    """How soon effort begins to tell: with q = 2, half the largest cost at x = 1/k, two thousand tokens."""
    effort_q: float = Field(default=2.0, gt=1)
    """How fast more effort matters less; above 1 the cost has a limit, so that one long turn cannot outweigh all else."""
    lint_scale: float = Field(default=3.0, gt=0)
    """Lint issues added or removed at which that part of conventions reaches tanh(1) = .76."""
    edit_expected_from: float = Field(default=0.5, ge=0, le=1)
    """P(edit expected | prompt) from which a turn without an edit is a deferral."""
    expected_kept: float = Field(default=0.5, ge=0, le=1)
    """Kept share that a deferral is charged until norms are frozen: half, the least that can be said of edits nobody has measured."""
    defer_cost: float = Field(default=0.1, ge=0, le=1)
    """Least charge of a deferral, about a tenth of the mean |reward|: the user has to write once more, even where edits are never kept."""
    abandoned: float = Field(default=-1.0, ge=-1, le=1)
    """Value of a deferral that nobody came back to, until norms give the tenth percentile of its stratum: as bad as an edit undone."""
    session_discount: float = Field(default=0.9, gt=0, le=1)
    """How much less each earlier turn gets of what was said about the session as a whole."""
    norm_min_turns: int = Field(default=30, ge=2)
    """Turns that a stratum or bucket needs before its own norms are trusted; with fewer, those of all turns are used."""
    norm_eps: float = Field(default=0.05, gt=0)
    """Added to every frozen standard deviation: where all turns were alike, a small difference must not look like three sigma."""

    @field_validator("weights")
    @classmethod
    def _known(cls, weights: dict[str, float]) -> dict[str, float]:
        if unknown := sorted(set(weights) - set(COMPONENTS)):
            raise ValueError(f"{', '.join(unknown)} is no reward component; known: {', '.join(COMPONENTS)}")
        whole = WEIGHTS | weights
        if any(weight < 0 for weight in weights.values()) or not any(whole.values()):
            raise ValueError("weights are at least 0 and one of them is positive")
        return whole

    @field_validator("latency_medians_ms")
    @classmethod
    def _positive(cls, medians: dict[str, float]) -> dict[str, float]:
        if any(median <= 0 for median in medians.values()):
            raise ValueError("a median duration is positive")
        return medians


class FollowupsConfig(Section):
    """The model that reads a user's next message, and the optional judge beside it."""

    judge_url: str = ""
    """Base address of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1; empty: no judge. It sees users' messages."""
    judge_model: str = ""
    """Model that the server is asked for."""
    judge_votes: int = Field(default=3, ge=1, le=15)
    """Answers asked for one message; the share of yes is the verdict."""
    judge_timeout_s: float = Field(default=20.0, gt=0)
    """For all votes on one message together; late means no verdict."""
    judge_margin: float = Field(default=0.3, ge=0, le=0.5)
    """The judge is asked where the classifier's P lies within this of 0.5: elsewhere it would cost much and change little."""
    judge_share: float = Field(default=0.5, ge=0, le=1)
    """Weight of the verdict in the log-odds of the mixed P."""
    judge_max_calls: int = Field(default=1000, ge=0)
    """Requests of one run; then no more verdicts."""
    judge_max_tokens: int = Field(default=500_000, ge=0)
    """Tokens of one run, counted by the server; then no more verdicts."""


class LakeConfig(Section):
    """Keeping the lake small and clean."""

    keep_events_days: int = Field(default=90, ge=8)
    """`signals retain` deletes events and quarantined records that arrived longer ago: they hold what people typed. What was distilled
    from them stays. More than the look-back, so that no session is recomputed from half of its events."""
    keep_versions_hours: int = Field(default=168, ge=168)
    """Old table versions are kept this long for time travel and running readers. Less than seven days could delete a file that a reader
    or an unfinished write still needs, so it is refused."""
    target_file_mb: int = Field(default=128, ge=1, le=1024)
    """Size that `signals compact` merges small files to: large enough that listing and opening cost little, small enough to skip by."""
    spill_mb: int = Field(default=512, ge=64)
    """Memory that compaction sorts in before it spills to disk."""


class MonitorsConfig(Section):
    """Drift and reward-hack monitors."""

    alpha: float = Field(default=0.01, gt=0, lt=0.5)
    """Chance that one metric of one policy version alarms without cause: over all looks for means, over a day of hourly looks for the
    shape of the traffic."""
    min_effect_sd: float = Field(default=0.1, ge=0)
    """A change of a mean smaller than this, in standard deviations of the reference, is no alarm however certain."""
    min_neutral_effect_sd: float = Field(default=0.5, ge=0)
    """The same for lengths and entropy, which may move either way for good reasons; every update moves them a little."""
    min_n: int = Field(default=30, ge=2)
    """Observations on each side below which nothing is said."""
    min_users: int = Field(default=5, ge=2)
    """Users on each side below which sessions are taken as the independent units."""
    window_hours: int = Field(default=24, ge=1)
    """Traffic is compared over this many hours up to the look."""
    history_days: int = Field(default=14, ge=1)
    """How far back turns are read; an older reference is not found."""
    recompute_hours: int = Field(default=3, ge=1)
    """Hours before the present one that a run writes again, because their windows have closed meanwhile."""
    tight_at: int = Field(default=500, ge=1)
    """Observations at which the confidence sequences are tightest."""
    reference_version: int | None = None
    """Policy version to compare with (an anchor, to see slow drift); by default the newest earlier one with enough turns."""
    origins: tuple[str, ...] = ("live", "simulated")
    """Whose turns count. Benchmarks repeat fixed tasks and imports are other agents' work: neither is this policy's traffic."""
    bootstrap_draws: int = Field(default=200, ge=20)
    """Resamples of the users behind a displayed interval."""


class SignalsConfig(PipelinesConfig):
    """Settings up to the signal stage."""

    spark: SparkConfig = SparkConfig()
    signals: JobsConfig = JobsConfig()
    rewards: RewardsConfig = RewardsConfig()
    followups: FollowupsConfig = FollowupsConfig()
    lake: LakeConfig = LakeConfig()
    monitors: MonitorsConfig = MonitorsConfig()
