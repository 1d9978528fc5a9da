"""The lake's tables as data: columns, units, partitions and what one row is.

Takes: nothing. Gives: an Arrow schema for each table, which both writers (Spark and deltalake) and all readers follow.
Leaves out: reading and writing (`lake.py`) and how the rows come about (`stream.py`, `distil.py`).
"""

from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from pipelines.codec import REASONS
from signals.samples import SAMPLES
from signals.wire import arrow_fields

DAY: Final = "date"
"""Partition of events (by arrival) and of what is distilled from them (by the turn's start): a day that is over is only touched by
what comes late for it."""
INSTANT: Final = pa.timestamp("us", tz="UTC")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table of the lake."""

    name: str
    row: str
    """What one row is."""
    schema: pa.Schema
    partition_by: tuple[str, ...] = ()


def _field(name: str, kind: pa.DataType, doc: str) -> pa.Field:
    return pa.field(name, kind, metadata={"doc": doc})


_RECORD: Final = [
    _field("topic", pa.string(), "Kafka topic"),
    _field("partition", pa.int32(), "Kafka partition"),
    _field("offset", pa.int64(), "Kafka offset"),
]
_ARRIVED: Final = [
    _field("arrived_at", INSTANT, "Kafka's record time"),
    _field("date", pa.date32(), "UTC day of arrived_at"),
]
_TURN_IDS: Final = [
    _field("session_id", pa.string(), "session"),
    _field("turn_id", pa.string(), "turn"),
    _field("turn_index", pa.int32(), "position in the session, from 0"),
    _field("user_key", pa.string(), "keyed hash of the user"),
    _field("origin", pa.string(), "live, simulated, benchmark or imported"),
    _field("arm", pa.string(), "experiment arm"),
    _field("policy_version", pa.int64(), "policy that served the turn; null for foreign policies"),
    _field("task_bucket", pa.string(), "kind of task; null when unknown"),
]
_OUTCOME: Final = [
    _field("outcome", pa.string(), "scored, pending, no_evidence, not_trainable or infra_error; exactly one"),
    _field("outcome_reason", pa.string(), "detail of the outcome, e.g. no_consent; null when there is none"),
]
_DAY: Final = _field(DAY, pa.date32(), "UTC day of the turn's start")

COMPONENT_DOCS: Final = {
    "edits_kept": "share of the turn's edits that was kept, by root of size, on [-1, 1]",
    "follow_up": "1 - 2 P(dissatisfied) of the next user message, in [-1, 1]",
    "latency": "sampling time against the median of the task bucket, in (-1, 1); 0 at the median, negative above",
    "tool_calls": "cost of invalid, repeated and needlessly serial calls, in [-1, 0]",
    "effort": "cost of tokens, calls and completions, in (-1, 0]",
    "conventions": "lint delta, tests and project rules after the turn's edits, in [-1, 1]",
    "evidence": "cost of speaking of files that were not looked at, in [-1, 0]",
    "explicit": "thumbs, scores and external evaluations inside the window, in [-1, 1]",
    "deferral": "charge of an eligible turn that was answered without an edit, in [-1, 0]",
}
"""What each column of a reward component says, in the order of COMPONENTS."""
_ORIGINAL: Final = _field(
    "original", pa.binary(), "record value as it arrived, where it has fields that this release does not know; null otherwise"
)

EVENTS: Final = Table(
    name="events",
    row="one accepted Kafka record, as it arrived; duplicates included",
    schema=pa.schema(
        [*arrow_fields(), _field("fingerprint", pa.string(), "sha256 of all but the recorder's clock"), _ORIGINAL, *_RECORD, *_ARRIVED]
    ),
    partition_by=("date",),
)
QUARANTINE: Final = Table(
    name="quarantine",
    row="one Kafka record that is no valid event, whole",
    schema=pa.schema(
        [
            *_RECORD,
            *_ARRIVED,
            _field("reason", pa.string(), f"{', '.join(sorted(REASONS))}, claim_missing, claim_mismatch or claim_foreign"),
            _field("detail", pa.string(), "the field at fault; null when there is none"),
            _field("key", pa.binary(), "record key as it arrived"),
            _field("raw", pa.binary(), "record value as it arrived"),
        ]
    ),
    partition_by=("date",),
)
OFFSETS: Final = Table(
    name="offset_ledger",
    row="one batch and Kafka partition: where every offset went",
    schema=pa.schema(
        [
            _field("stream", pa.string(), "id of the stream state (Spark checkpoint) that wrote the batch"),
            _field("batch", pa.int64(), "batch id inside the stream"),
            *_RECORD[:2],
            _field("start", pa.int64(), "first offset of the batch"),
            _field("end", pa.int64(), "offset after its last"),
            _field("kept", pa.int64(), "records written to events"),
            _field("quarantined", pa.int64(), "records written to quarantine"),
            _field("committed_at", INSTANT, "when the row was written"),
        ]
    ),
)
GAPS: Final = Table(
    name="gaps",
    row="offsets that Kafka no longer had and a person accepted as lost",
    schema=pa.schema(
        [
            *_RECORD[:2],
            _field("start", pa.int64(), "first lost offset"),
            _field("end", pa.int64(), "offset after the last lost one"),
            _field("accepted_at", INSTANT, "when --accept-gap was given"),
        ]
    ),
)
REMOVALS: Final = Table(
    name="removals",
    row="rows of one Kafka partition that were taken out of a table on purpose, so that the offset ledger still adds up",
    schema=pa.schema(
        [
            _field("removal_id", pa.string(), "the run that removed them; the table's own commit carries it as a transaction"),
            _field("kind", pa.string(), "retain (age) or forget (a user's request)"),
            _field("table", pa.string(), "events or quarantine"),
            *_RECORD[:2],
            _field("rows", pa.int64(), "number of rows"),
            _field("removed_at", INSTANT, "when"),
        ]
    ),
)
CONFLICTS: Final = Table(
    name="conflicts",
    row="an event whose id was seen before with other content; not used",
    schema=pa.schema([_field("session_id", pa.string(), "session"), _field("event_id", pa.string(), "the repeated id"), *_RECORD, _DAY]),
    partition_by=(DAY,),
)
TURNS: Final = Table(
    name="turns",
    row="one turn, with its one outcome",
    schema=pa.schema(
        [
            *_TURN_IDS,
            _field("consent", pa.string(), "strictest consent seen in the turn: none < measure < train"),
            _field("surface", pa.string(), "where: cli, ide, api, simulator, importer"),
            _field("language", pa.string(), "ISO 639-1; null when unknown"),
            _field("started_at", INSTANT, "first event of the turn"),
            _field("acted_at", INSTANT, "last action of the policy in the turn"),
            _field("closes_at", INSTANT, "evidence after this instant is late"),
            _field("final", pa.bool_(), "whether that instant had passed when the turn was distilled"),
            _field("completions", pa.int64(), "requests sampled in the turn"),
            _field("prompt_tokens", pa.int64(), "tokens, summed over completions"),
            _field("response_tokens", pa.int64(), "tokens, summed over completions"),
            _field("sampling_ms", pa.float64(), "time spent sampling, ms; tools excluded; null when unknown"),
            _field("calls", pa.int64(), "tool calls, each id once"),
            _field("invalid_calls", pa.int64(), "calls of unknown tools or with invalid arguments"),
            _field("repeats", pa.int64(), "valid calls that repeat an earlier one of the turn with nothing changed in between"),
            _field("serial_calls", pa.int64(), "valid look-ups in a later completion that could have gone out in parallel"),
            _field("claims", pa.int64(), "files that the replies speak of"),
            _field("claims_unread", pa.int64(), "of those, files that no earlier call or result showed"),
            _field("edits_observed", pa.bool_(), "whether the client records every change, so that no edit event means no edit"),
            _field("edit_expected", pa.float64(), "P(the user asked for a change), from the prompt alone, in [0, 1]; null when not read"),
            _field("eligible", pa.bool_(), "whether an edit was to be expected and would have been seen"),
            _field("asked", pa.bool_(), "whether the turn's last words were a question"),
            _field("deferred", pa.bool_(), "whether an eligible turn was answered without an edit"),
            _field("edits", pa.int64(), "edits proposed in the turn"),
            _field("edits_judged", pa.int64(), "of those, edits with evidence"),
            _field("followed_up", pa.bool_(), "whether a user message came next inside the window"),
            _field("replied_after_ms", pa.int64(), "from the last action to the next user message, ms, however late; null when none came"),
            _field("interrupted", pa.bool_(), "whether the user stopped the turn"),
            _field("late", pa.int64(), "evidence after closes_at: counted, not used in the reward"),
            *_OUTCOME,
            _DAY,
        ]
    ),
    partition_by=(DAY,),
)
EDITS: Final = Table(
    name="edits",
    row="one edit, with what became of it inside its turn's window",
    schema=pa.schema(
        [
            _field("session_id", pa.string(), "session"),
            _field("turn_id", pa.string(), "turn that proposed it; null when the proposal never arrived"),
            _field("edit_id", pa.string(), "edit"),
            _field("policy_version", pa.int64(), "policy that proposed it"),
            _field("path_hash", pa.string(), "keyed hash of the path"),
            _field("chars_added", pa.int64(), "characters"),
            _field("decision", pa.string(), "last decision: accepted, partly, rejected, undone; null when none"),
            _field("horizon_s", pa.int64(), "last horizon inside the window, seconds; null when not measured"),
            _field("survival_no_revert", pa.float64(), "share that was not taken back, at horizon_s, in [0, 1]"),
            _field("kept", pa.float64(), "share that counts as kept, in [0, 1]; null without evidence"),
            _field("weight", pa.float64(), "sqrt of characters added, at least 1"),
            _field("survival_commit", pa.float64(), "share that stood at the last commit measured, in [0, 1]; truth, not in the reward"),
            _field("survival_24h", pa.float64(), "share that stood a day later, in [0, 1]; truth, not in the reward"),
            _field("survival_7d", pa.float64(), "share that stood a week later, in [0, 1]; truth, not in the reward"),
            _DAY,
        ]
    ),
    partition_by=(DAY,),
)
REWARDS: Final = Table(
    name="rewards",
    row="one turn's reward, trainable or not",
    schema=pa.schema(
        [
            *_TURN_IDS,
            *[_field(name, pa.float64(), f"{doc}; null without evidence") for name, doc in COMPONENT_DOCS.items()],
            _field("dissatisfied", pa.float64(), "P(dissatisfied) of the next user message, in [0, 1]; null when none"),
            _field(
                "explicit_mass",
                pa.float64(),
                "for how much `explicit` counts: 1 for the turn, and its share of what was said of the session",
            ),
            _field("maturity", pa.map_(pa.string(), pa.string()), "component -> pending, observed, defaulted or censored"),
            _field("credit", pa.float64(), "sum of mass x value over the turn's evidence; null before the window closes"),
            _field("mass", pa.float64(), "sum of mass: for how much evidence; null before the window closes"),
            _field("reward", pa.float64(), "credit / mass, in [-1, 1]; null without evidence or before the window closes"),
            _field("reward_version", pa.string(), "digest of reward code, weights, windows and norms"),
            _field("norms_version", pa.string(), "digest of the frozen norms it was computed with; null without"),
            _field("truth_commit", pa.float64(), "share of the turn's edits that stood at commit, in [0, 1]; null when not measured"),
            _field("truth_24h", pa.float64(), "share of the turn's edits that stood a day later, in [0, 1]; null when not measured"),
            _field("truth_7d", pa.float64(), "share of the turn's edits that stood a week later, in [0, 1]; null when not measured"),
            _field("truth_evaluation", pa.float64(), "last external evaluation of the turn, however late, in [-1, 1]; null when none"),
            _field("matured_at", INSTANT, "when the reward became final; null before"),
            *_OUTCOME,
            _DAY,
        ]
    ),
    partition_by=(DAY,),
)
NORMS: Final = Table(
    name="norms",
    row="one frozen figure that turns are compared with; the newest frozen_at is in force",
    schema=pa.schema(
        [
            _field("frozen_at", INSTANT, "when `signals baselines --freeze` wrote it; one instant a version"),
            _field("reward_version", pa.string(), "reward version of the turns it was computed from"),
            _field("policy_versions", pa.list_(pa.int64()), "policies whose turns it was computed from; empty means all"),
            _field("kind", pa.string(), "scale, low, median_ms, kept or kept_by_user"),
            _field("surface", pa.string(), "of the stratum; * for all, empty for unknown"),
            _field("language", pa.string(), "of the stratum; * for all, empty for unknown"),
            _field("task_bucket", pa.string(), "of the stratum or bucket; * for all, empty for unknown"),
            _field("user_key", pa.string(), "keyed hash of the user (kept_by_user); * elsewhere"),
            _field("component", pa.string(), "component (scale); * elsewhere"),
            _field("turns", pa.int64(), "turns behind the figure"),
            _field("total", pa.float64(), "sum of kept shares (kept, kept_by_user)"),
            _field("mean", pa.float64(), "mean of the component (scale)"),
            _field("sd", pa.float64(), "standard deviation of the component (scale)"),
            _field("value", pa.float64(), "tenth percentile of edits_kept (low), or milliseconds (median_ms)"),
        ]
    ),
)
BACKFILL: Final = Table(
    name="rewards_backfill",
    row="one turn's reward under other settings, computed by signals backfill; never trained on",
    schema=pa.schema(
        [
            _field("backfill", pa.string(), "name of the side version; the partition that is written together"),
            _field("computed_at", INSTANT, "when it was computed, and the instant that windows were closed against"),
            *REWARDS.schema,
        ]
    ),
    partition_by=("backfill", DAY),
)
SAMPLES_TABLE: Final = Table(
    name="samples",
    row="one completion with its turn's reward; see signals/samples.py",
    schema=pa.schema([*SAMPLES, _DAY]),
    partition_by=(DAY,),
)
COUNTS: Final = Table(
    name="ledger_counts",
    row="turns by policy version, arm, origin and outcome; sum over date",
    schema=pa.schema(
        [
            _field("policy_version", pa.int64(), "null for foreign policies"),
            _field("arm", pa.string(), "experiment arm"),
            _field("origin", pa.string(), "live, simulated, benchmark or imported"),
            *_OUTCOME,
            _field("turns", pa.int64(), "number of turns"),
            _DAY,
        ]
    ),
    partition_by=(DAY,),
)
DISTILLED: Final = Table(
    name="distilled",
    row="one finished distil: up to which offset, and which versions of the tables belong together",
    schema=pa.schema(
        [
            _field("distilled_at", INSTANT, "the instant `now` that windows were closed against"),
            _field("frontier", pa.map_(pa.string(), pa.int64()), "topic-partition -> offset after the last event distilled"),
            _field("tombstoned", pa.list_(pa.int64()), "policy versions that were quarantined"),
            _field("reward_version", pa.string(), "digest of reward code, weights, windows and norms"),
            _field("sessions", pa.int64(), "sessions recomputed"),
            _field("turns", pa.int64(), "turns in those sessions"),
            _field("versions", pa.map_(pa.string(), pa.int64()), "table -> Delta version after this distil"),
        ]
    ),
)

DRIFT: Final = Table(
    name="drift",
    row="what one monitor said of one policy version at the end of one hour; written again for an hour, it says the same or better",
    schema=pa.schema(
        [
            _field("window_start", INSTANT, "start of the UTC hour that the row belongs to"),
            _field("window_end", INSTANT, "end of that hour, or the instant of the look when the hour was not over"),
            _field("policy_version", pa.int64(), "policy that is looked at"),
            _field("reference_version", pa.int64(), "policy it is compared with; itself when earlier hours are; null without one"),
            _field("metric", pa.string(), "what is measured, see signals/monitors_metrics.py"),
            _field("about", pa.string(), "reward, policy, coverage, truth or traffic: what the metric is a property of"),
            _field("kind", pa.string(), "statistic: mean, correlation, psi, ks, wasserstein, page_hinkley, cusum or q05 to q95"),
            _field("value", pa.float64(), "the statistic, or the policy's figure for kind mean, correlation and quantiles"),
            _field("reference", pa.float64(), "the reference's figure; for a statistic, the limit it is held against"),
            _field("expected", pa.float64(), "the reference's figure on this policy's mix of traffic; null where it does not apply"),
            _field("effect", pa.float64(), "size: (value - expected) in the reference's standard deviations; for a statistic, itself"),
            _field("low", pa.float64(), "2.5 % bound of value, bootstrapped by user; null where it does not apply"),
            _field("high", pa.float64(), "97.5 % bound of value, bootstrapped by user; null where it does not apply"),
            _field("n", pa.int64(), "observations of this policy"),
            _field("m", pa.int64(), "observations of the reference"),
            _field("users", pa.int64(), "independent units behind n: users, or sessions where either side has too few users"),
            _field("p", pa.float64(), "p-value, for kind mean valid at every look; null without a test"),
            _field("alarm", pa.bool_(), "whether the change is beyond its limit, certain enough, and in the harmful direction"),
            _field("cause", pa.string(), "policy or traffic, of an alarm; null without one"),
            _field("reason", pa.string(), "a sentence: what changed, or why there is no verdict"),
        ]
    ),
)

TABLES: Final[dict[str, Table]] = {
    table.name: table
    for table in (
        EVENTS,
        QUARANTINE,
        OFFSETS,
        GAPS,
        REMOVALS,
        CONFLICTS,
        TURNS,
        EDITS,
        REWARDS,
        NORMS,
        BACKFILL,
        SAMPLES_TABLE,
        COUNTS,
        DISTILLED,
        DRIFT,
    )
}
