"""Reward columns against the plain rules, on made-up sessions, without a broker."""

import json
import random
from typing import Any

import pytest

from pipelines.events import Event
from signals import sessions, transforms
from signals.config import RewardsConfig
from signals.norms import NO_NORMS, Norms, freeze, load
from signals.samples import COMPONENTS, Outcome
from signals.tables import EVENTS
from tests.support.spark import T0, as_row, made_up_session

pytestmark = pytest.mark.spark

CONFIG = RewardsConfig(latency_medians_ms={"*": 900.0, "edit": 700.0})
NOW_MS = T0 + 5_000_000


def frame(spark: Any, rows: list[dict[str, Any]]) -> Any:
    """Return rows as the table `events` would give them."""
    import pyarrow as pa

    full = [{"fingerprint": sessions.fingerprint(row), "topic": "t", "partition": 0, "offset": at} | row for at, row in enumerate(rows)]
    named = [field for field in EVENTS.schema if field.name not in ("arrived_at", "date")]
    return spark.createDataFrame(pa.Table.from_pylist(full, schema=pa.schema(named)))


def distilled(spark: Any, rows: list[dict[str, Any]], norms: Norms = NO_NORMS) -> dict[str, dict[tuple[str, str], dict[str, Any]]]:
    found = transforms.distilled(
        frame(spark, rows), CONFIG, now_ms=NOW_MS, tombstoned=frozenset({3}), partitions=2, norms=norms
    )  # fmt: skip
    tables = {"turns": found.turns, "rewards": found.rewards}
    return {
        name: {(row["session_id"], row["turn_id"]): row.asDict() for row in table.collect()} for name, table in tables.items()
    }  # fmt: skip


def plain(events: list[Event], norms: Norms = NO_NORMS) -> list[sessions.TurnResult]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for item in events:
        rows.setdefault(item.session_id, []).append(as_row(item))
    return [
        turn for own in rows.values() for turn in sessions.distil(own, CONFIG, now_ms=NOW_MS, tombstoned=frozenset({3}), norms=norms)
    ]  # fmt: skip


def world(seed: int, number: int) -> list[Event]:
    rng = random.Random(seed)
    return [item for index in range(number) for item in made_up_session(rng, f"c{seed}-{index}")]


def frozen(events: list[Event]) -> Norms:
    turns = [
        {"session_id": turn.session_id, "turn_id": turn.turn_id, "surface": turn.evidence.surface, "language": turn.evidence.language,
         "task_bucket": turn.task_bucket, "user_key": turn.user_key, "sampling_ms": turn.evidence.sampling_ms}
        | {name: turn.components.get(name) for name in COMPONENTS}
        for turn in plain(events) if turn.course.final
    ]  # fmt: skip
    return load(freeze(turns, min_turns=5), min_turns=5)


def close(value: float | None) -> Any:
    return None if value is None else pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("with_norms", [False, True], ids=["as they are", "normalised"])
def test_every_column_of_a_turn_and_its_reward_is_what_the_plain_rules_say(spark: Any, with_norms: bool) -> None:
    events = world(5, 120)
    norms = frozen(world(6, 80)) if with_norms else NO_NORMS
    tables = distilled(spark, [as_row(item) for item in events], norms)
    expected = plain(events, norms)
    assert len(expected) == len(tables["rewards"]) == len(tables["turns"]) > 150
    assert {turn.outcome for turn in expected} == set(Outcome)
    seen: set[str] = set()
    for turn in expected:
        row, facts = tables["rewards"][turn.session_id, turn.turn_id], tables["turns"][turn.session_id, turn.turn_id]
        evidence = turn.evidence
        seen |= turn.components.keys()
        assert (row["outcome"], row["outcome_reason"]) == (turn.outcome.value, turn.outcome_reason)
        assert {name: row[name] for name in COMPONENTS if row[name] is not None} == pytest.approx(turn.components, abs=1e-12)
        assert row["reward"] == close(turn.reward)
        assert row["maturity"] == {name: state.value for name, state in turn.maturity.items()}
        assert row["explicit_mass"] == close(turn.explicit_mass)
        truth = (turn.truth.commit, turn.truth.day, turn.truth.week, turn.truth_evaluation)
        assert tuple(row[name] for name in ("truth_commit", "truth_24h", "truth_7d", "truth_evaluation")) == tuple(map(close, truth))
        if turn.course.final:
            assert (row["credit"], row["mass"]) == (
                close(sum(mass * value for mass, value in turn.pieces.values())), close(sum(mass for mass, _ in turn.pieces.values())),
            )  # fmt: skip
        names = ("calls", "invalid_calls", "repeats", "serial_calls", "claims", "claims_unread", "completions", "edits_observed")
        assert tuple(facts[name] for name in names) == tuple(getattr(evidence, name) for name in names)
        assert facts["edits"] == len(evidence.edits)
        own = (turn.turn_index, turn.user_key, turn.arm, turn.policy_version, turn.late, turn.asked, turn.deferred, turn.replied_after_ms)
        columns = ("turn_index", "user_key", "arm", "policy_version", "late", "asked", "deferred", "replied_after_ms")
        assert own == tuple(facts[name] for name in columns)
        assert (facts["final"], facts["followed_up"]) == (turn.course.final, turn.followed_up)
    assert seen == set(COMPONENTS)


def test_order_duplicates_and_partitions_cannot_change_a_bit(spark: Any) -> None:
    rows = [as_row(item) for item in world(8, 40)]
    rng = random.Random(1)
    mixed = rows + rng.choices(rows, k=len(rows) // 2)
    rng.shuffle(mixed)

    def written(found: dict[str, Any]) -> str:
        return json.dumps({name: sorted(map(str, table.values())) for name, table in found.items()})

    assert written(distilled(spark, mixed)) == written(distilled(spark, rows))
