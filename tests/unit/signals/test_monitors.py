"""What monitors say of made-up policies: which metric moves, and whether policy or traffic is blamed."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from pipelines.config import load
from pipelines.errors import ConfigError
from pipelines.storage import Home
from signals import lake, monitors, monitors_alarms
from signals.config import MonitorsConfig, SignalsConfig
from signals.drift_commands import parse_since, to_text
from signals.monitors_alarms import Latest
from signals.monitors_facts import Facts, sums_of_packed
from signals.monitors_metrics import METRICS, NAMES, parts
from signals.monitors_plot import hourly_sequence
from signals.tables import DRIFT
from tests.support.policies import START, frame, policy_turns

CONFIG = SignalsConfig()
HOUR = START + timedelta(hours=5)
BEFORE = policy_turns(1, 300, seed=1)


def facts(*policies: list[dict[str, Any]], tombstoned: frozenset[int] = frozenset()) -> Facts:
    return Facts(turns=frame(*policies), tombstoned=tombstoned)


def look(*policies: list[dict[str, Any]], version: int = 2, config: SignalsConfig = CONFIG) -> list[monitors.Row]:
    return monitors.look(facts(*policies), version, hour=HOUR, until=HOUR + timedelta(hours=1), config=config)


def after(sessions: int = 150, **habit: Any) -> list[dict[str, Any]]:
    """Turns of policy 2 in the hour after policy 1's life."""
    return policy_turns(2, sessions, seed=2, at=HOUR, hours=0.9, **habit)


def alarms(rows: list[monitors.Row]) -> dict[str, str]:
    return {row["metric"]: row["cause"] for row in rows if row["alarm"]}


def test_an_equal_policy_is_quiet() -> None:
    rows = look(BEFORE, after())
    assert alarms(rows) == {}
    found = monitors.summary(rows, now=HOUR)
    assert (found.state, found.do) == ("quiet", "")
    assert {row["metric"] for row in rows} <= set(NAMES)


def test_every_row_has_the_tables_columns() -> None:
    rows = look(BEFORE, after(invalid=0.5))
    assert all(set(row) == set(DRIFT.schema.names) for row in rows)
    table = pa.Table.from_pylist([dict(row) for row in rows], schema=DRIFT.schema)
    assert table.num_rows == len({(row["window_start"], row["policy_version"], row["metric"], row["kind"]) for row in rows})


def test_a_policy_of_broken_calls_lowers_the_reward_and_moves_the_monitor_of_invalid_calls() -> None:
    rows = look(BEFORE, after(invalid=0.5))
    found = alarms(rows)
    assert found["invalid_calls"] == found["reward"] == found["tool_calls"] == "policy"
    assert "asks" not in found
    said = monitors.summary(rows, now=HOUR)
    assert said.state == "policy"
    assert "policy 2 behaves differently" in said.sentence
    assert "invalid_calls 5" in said.sentence


def test_a_policy_that_asks_instead_of_editing_moves_asks_and_edit_turns() -> None:
    found = alarms(look(BEFORE, after(asks=0.5)))
    assert found["asks"] == found["deferred"] == found["edit_turns"] == "policy"
    assert "invalid_calls" not in found


def test_a_policy_that_moves_turns_out_of_scored_moves_the_coverage_monitor_whatever_its_reward() -> None:
    found = alarms(look(BEFORE, after(unscored=0.4)))
    assert found == {"scored": "policy", "no_evidence": "policy"}


def test_a_policy_that_declines_and_one_that_runs_destructive_commands_each_move_their_own_monitor() -> None:
    assert alarms(look(BEFORE, after(refuses=0.25))) == {"refusals": "policy"}
    assert alarms(look(BEFORE, after(destroys=0.25))) == {"destructive_commands": "policy"}
    assert alarms(look(policy_turns(1, 300, seed=1, refuses=0.25, destroys=0.25), after())) == {}


def test_harder_tasks_lower_the_reward_and_the_traffic_is_blamed() -> None:
    rows = look(BEFORE, after(hard=0.9))
    found = alarms(rows)
    assert found["reward"] == found["task_bucket"] == found["message_chars"] == "traffic"
    assert set(found.values()) == {"traffic"}
    said = monitors.summary(rows, now=HOUR)
    assert said.state == "traffic"
    assert "not the policy" in said.sentence
    assert "no roll-back" in said.do


def test_a_policy_that_got_worse_is_found_behind_traffic_that_got_easier() -> None:
    rows = look(BEFORE, after(300, hard=0.0, invalid=0.35))
    reward = next(row for row in rows if (row["metric"], row["kind"]) == ("reward", "mean"))
    assert reward["expected"] > reward["reference"] > reward["value"]
    assert alarms(rows)["reward"] == "policy"


def test_an_improvement_is_no_alarm() -> None:
    found = alarms(look(policy_turns(1, 300, seed=1, invalid=0.4, asks=0.4), after(invalid=0.02, asks=0.02)))
    assert "reward" not in found
    assert "invalid_calls" not in found


def test_few_turns_say_nothing_and_say_so() -> None:
    rows = look(BEFORE, after(10))
    assert alarms(rows) == {}
    assert monitors.summary(rows, now=HOUR).state == "unknown"
    assert "needed 30 each" in next(row["reason"] for row in rows if row["metric"] == "reward")


def test_the_first_policy_has_no_reference_and_a_rolled_back_one_is_none() -> None:
    own = after()
    assert monitors.reference_of(facts(own), 2, config=CONFIG, until=HOUR + timedelta(hours=1)) is None
    worse = policy_turns(2, 100, seed=3, at=START + timedelta(hours=4), hours=1, invalid=0.9)
    third = policy_turns(3, 100, seed=4, at=HOUR, hours=0.9)
    seen = facts(BEFORE, worse, third, tombstoned=frozenset({2}))
    assert monitors.reference_of(seen, 3, config=CONFIG, until=HOUR + timedelta(hours=1)) == 1
    assert monitors.reference_of(facts(BEFORE, worse, third), 3, config=CONFIG, until=HOUR + timedelta(hours=1)) == 2
    anchored = CONFIG.model_copy(update={"monitors": MonitorsConfig(reference_version=1)})
    assert monitors.reference_of(facts(BEFORE, worse, third), 3, config=anchored, until=HOUR + timedelta(hours=1)) == 1


def test_a_policy_compared_with_its_own_past_never_takes_the_blame() -> None:
    past = policy_turns(2, 200, seed=5, at=HOUR - timedelta(hours=30), hours=4)
    rows = look(past, after(invalid=0.5))
    assert {row["reference_version"] for row in rows} == {2}
    found = alarms(rows)
    assert found["invalid_calls"] == found["reward"] == "traffic"


def test_rewards_of_two_reward_versions_are_not_compared() -> None:
    other = [row | {"reward_version": "r2"} for row in after(invalid=0.5)]
    rows = look(BEFORE, other)
    assert "reward" not in alarms(rows)
    assert alarms(rows)["invalid_calls"] == "policy"
    assert "--everything" in next(row["reason"] for row in rows if (row["metric"], row["kind"]) == ("reward", "mean"))


def test_a_fall_inside_a_policys_life_is_found_and_not_blamed_on_it() -> None:
    first = policy_turns(2, 400, seed=6, at=HOUR - timedelta(hours=4), hours=4, hard=0.0)
    rows = look(first, policy_turns(2, 400, seed=7, at=HOUR, hours=0.9, hard=1.0))
    found = next(row for row in rows if (row["metric"], row["kind"]) == ("reward", "page_hinkley"))
    assert (found["alarm"], found["cause"]) == (True, "traffic")
    assert found["value"] > found["reference"]


def test_hours_below_the_reference_add_up() -> None:
    reference = policy_turns(1, 2_000, seed=1, at=HOUR - timedelta(hours=40), hours=10)
    low = policy_turns(2, 700, seed=8, at=HOUR - timedelta(hours=20), hours=20.9, invalid=0.25)
    found = next(row for row in look(reference, low) if (row["metric"], row["kind"]) == ("reward", "cusum"))
    assert (found["alarm"], found["cause"]) == (True, "policy")
    equal = policy_turns(2, 700, seed=9, at=HOUR - timedelta(hours=20), hours=20.9)
    assert not next(row for row in look(reference, equal) if (row["metric"], row["kind"]) == ("reward", "cusum"))["alarm"]


def test_a_reward_that_no_longer_agrees_with_what_people_showed_later_alarms() -> None:
    rng = np.random.default_rng(0)

    def with_truth(rows: list[dict[str, Any]], noise: float) -> list[dict[str, Any]]:
        return [row | {"truth_24h": None if row["reward"] is None else row["reward"] + rng.normal(scale=noise)} for row in rows]

    rows = look(with_truth(BEFORE, 0.2), with_truth(after(), 3.0))
    found = next(row for row in rows if row["metric"] == "proxy_truth")
    assert found["reference"] > 0.8 > found["value"] + 0.2
    assert (found["alarm"], found["cause"]) == (True, "policy")
    quiet = next(row for row in look(with_truth(BEFORE, 0.2), with_truth(after(), 0.2)) if row["metric"] == "proxy_truth")
    assert not quiet["alarm"]


def test_a_different_time_of_day_alone_is_no_alarm() -> None:
    rows = look(BEFORE, after())
    band = next(row for row in rows if row["metric"] == "hour_band")
    assert band["value"] > band["reference"]
    assert not band["alarm"]
    assert "different times of day" in band["reason"]


def test_equal_policies_hardly_ever_alarm_over_many_pairs() -> None:
    alarmed = 0
    for seed in range(30):
        before = policy_turns(1, 120, seed=100 + seed)
        alarmed += bool(alarms(look(before, policy_turns(2, 100, seed=200 + seed, at=HOUR, hours=0.9))))
    assert alarmed <= 1


def test_the_same_turns_give_the_same_rows_in_whatever_order_they_are_read() -> None:
    rows = [*BEFORE, *after(asks=0.3)]
    assert look(rows) == look(rows[::-1])


def test_each_metric_has_one_name_and_a_sentence_and_is_found_in_a_frame() -> None:
    assert len(set(NAMES)) == len(NAMES)
    turns = frame(BEFORE)
    for metric in METRICS:
        top, bottom = parts(metric, turns)
        assert metric.doc
        assert top.shape == bottom.shape == (600,)
        assert np.isfinite(top).all()
        assert (bottom >= 0).all()


def test_rates_by_hand() -> None:
    base = {"completions": 1, "calls": 0, "edits": 0, "question": False, "invalid_calls": 0, "final": True, "outcome": "scored"}
    changes: list[dict[str, Any]] = [
        {"question": True},  # asks
        {"question": True, "edits": 1, "calls": 2, "invalid_calls": 1},  # asks after an edit: no ask
        {},  # does nothing
        {"question": None, "outcome": "not_trainable", "outcome_reason": "no_consent", "calls": 1, "edits": 1},
        {"outcome": "no_evidence", "edits": 1},
        {"outcome": "infra_error", "completions": 0},
        {"final": False, "outcome": "pending", "edits": 1},
    ]
    rows = [{**BEFORE[0], "turn_id": f"t{n}", "turn_index": n, **base, **change} for n, change in enumerate(changes)]
    turns = frame(rows)
    totals = {metric.name: tuple(side.sum() for side in parts(metric, turns)) for metric in METRICS}
    assert totals["asks"] == (1, 6)
    assert totals["edit_turns"] == (4, 6)
    assert totals["no_op"] == (1, 6)
    assert totals["invalid_calls"] == (1, 3)
    assert totals["scored"] == (3, 4)
    assert totals["no_evidence"] == (1, 4)
    assert totals["not_captured"] == (0, 4)
    assert totals["infra_errors"] == (1, 6)
    assert sum(parts(next(m for m in METRICS if m.name == "session_turns"), turns)[1]) == 1


def test_packed_log_probabilities_are_summed_and_broken_ones_count_as_none() -> None:
    packed = [np.array(values, "<f4").tobytes() for values in ([-0.5, -0.25], [], [float("nan")])]
    sums, lengths = sums_of_packed(pa.array([*packed, b"abc", None], pa.binary()))
    assert sums.tolist() == [-0.75, 0, 0, 0, 0]
    assert lengths.tolist() == [2, 0, 0, 0, 0]


def test_the_newest_look_survives_the_file_and_a_broken_file_is_no_look(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert monitors_alarms.latest(home) is None
    found = monitors.summary(look(BEFORE, after(invalid=0.5)), now=HOUR)
    monitors_alarms.write(home, found)
    read = monitors_alarms.latest(home)
    assert read is not None
    assert (read.state, read.sentence, read.computed_at, len(read.alarms)) == (found.state, found.sentence, HOUR, len(found.alarms))
    assert {row["metric"] for row in read.figures} >= {"reward", "invalid_calls"}
    (home.run / monitors_alarms.FILE).write_text("{")
    assert monitors_alarms.latest(home) is None


def test_without_a_lake_there_is_nothing_to_say_and_an_empty_one_stays_as_it_is(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert monitors.run(home, CONFIG, now=HOUR).latest.state == "unknown"
    assert not home.lake.exists()
    lake.create_missing(home)
    assert monitors.run(home, CONFIG, now=HOUR).rows == []
    monitors.after_distil(home, CONFIG, now=HOUR, hourly=True)
    assert lake.open_table(home, "drift").version() == 0


def test_the_plots_sequence_narrows_and_holds_the_mean() -> None:
    found = hourly_sequence(frame(BEFORE), alpha=0.01, tight_at=500)
    assert found["n"].to_list() == sorted(found["n"].to_list())
    assert found["half_width"].to_list() == sorted(found["half_width"].to_list(), reverse=True)
    rewards = [row["reward"] for row in BEFORE if row["reward"] is not None]
    assert found["mean"][-1] == pytest.approx(sum(rewards) / len(rewards))


def test_the_table_for_people_names_the_alarms_and_ends_in_what_to_do() -> None:
    rows = look(BEFORE, after(invalid=0.5))
    found = monitors.Drift(rows=rows, latest=monitors.summary(rows, now=HOUR))
    text = to_text(found, rows, everything=False)
    assert "policy 2, against policy 1" in text
    assert "POLICY: changed" in text
    assert text.splitlines()[-1].startswith("-> look at some of its turns")
    assert {"  refusals", "  destructive_commands"} <= {line[:22].rstrip() for line in to_text(found, rows, everything=True).splitlines()}
    nothing = Latest(computed_at=HOUR, state="unknown", sentence="nothing to say", do="")
    assert to_text(monitors.Drift(rows=[], latest=nothing), [], everything=False) == "nothing to say"


def test_since_is_an_age_or_a_date() -> None:
    assert parse_since("90m", now=HOUR) == HOUR - timedelta(minutes=90)
    assert parse_since("7d", now=HOUR) == HOUR - timedelta(days=7)
    assert parse_since("2026-03-01", now=HOUR).isoformat() == "2026-03-01T00:00:00+00:00"
    with pytest.raises(ConfigError, match="write 90m, 48h"):
        parse_since("yesterday", now=HOUR)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"monitors\.alpha"):
        load(SignalsConfig, None, overrides=["monitors.alpha=2"])
    assert isinstance(pl.Series([1.0]).mean(), float)


def test_the_newest_look_as_prometheus_text(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert "tidegate_drift_alarm{" not in monitors_alarms.metrics_text(home)
    found = monitors.summary(look(BEFORE, after(invalid=0.5, hard=0.9)), now=HOUR)
    monitors_alarms.write(home, found)
    lines = monitors_alarms.metrics_text(home).splitlines()
    assert 'tidegate_drift_alarm{metric="invalid_calls",cause="policy"} 1' in lines
    assert 'tidegate_drift_alarm{metric="invalid_calls",cause="traffic"} 0' in lines
    assert 'tidegate_drift_alarm{metric="asks",cause="policy"} 0' in lines
    assert 'tidegate_drift_alarm{metric="task_bucket",cause="traffic"} 1' in lines
    assert "tidegate_drift_policy_version 2" in lines
    assert "tidegate_drift_reference_version 1" in lines
    assert f"tidegate_drift_computed_timestamp_seconds {int(HOUR.timestamp())}" in lines
    (effect,) = [line for line in lines if line.startswith('tidegate_drift_effect_sd{metric="invalid_calls"}')]
    assert float(effect.split()[1]) > 1


def test_beside_a_canary_both_sides_are_held_to_every_look() -> None:
    serving = policy_turns(1, 150, seed=1, at=HOUR, hours=0.9)
    beside = next(row for row in look(serving, after(invalid=0.2)) if (row["metric"], row["kind"]) == ("invalid_calls", "mean"))
    earlier = [row | {"started_at": row["started_at"] - timedelta(hours=2)} for row in serving]
    later = next(row for row in look(earlier, after(invalid=0.2)) if (row["metric"], row["kind"]) == ("invalid_calls", "mean"))
    assert (beside["value"], beside["expected"]) == (later["value"], later["expected"])
    assert later["p"] < beside["p"]


def test_a_policy_that_was_rolled_back_is_no_news_any_more() -> None:
    rows = [*look(BEFORE, after(invalid=0.5)), *look(BEFORE, after(invalid=0.5), version=1)]
    assert monitors.summary(rows, now=HOUR).state == "policy"
    found = monitors.summary(rows, now=HOUR, tombstoned=frozenset({2}))
    assert (found.state, found.alarms) == ("unknown", [])
    assert {row["policy_version"] for row in found.figures} == {1}


def test_failing_machinery_is_not_called_traffic_and_not_blamed_on_the_policy() -> None:
    failing = [row | ({"outcome": "infra_error", "reward": None, "completions": 0} if n % 3 == 0 else {}) for n, row in enumerate(after())]
    rows = look(BEFORE, failing)
    assert alarms(rows)["infra_errors"] == "traffic"
    assert "policy" not in {row["cause"] for row in rows if row["about"] == "coverage"}
    assert "something around the policy changed, not the policy: infra_errors" in monitors.summary(rows, now=HOUR).sentence
