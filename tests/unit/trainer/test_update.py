"""Training rows from samples: what the completions of a turn share."""

from datetime import UTC, datetime

import pytest

from pipelines.storage import Home
from signals import lake
from signals.tables import TABLES
from tests.support.model import on_policy_records
from trainer import candidates
from trainer.config import UpdateConfig
from trainer.dataset import frontier
from trainer.selection import Limits
from trainer.update import prepare

pytestmark = pytest.mark.model

NOW = datetime(2026, 11, 30, 13, tzinfo=UTC)


def limits(folder):
    return Limits(
        tokenizer_sha=candidates.tokenizer_sha(folder), vocabulary=512, policy_version=1, max_stale_versions=0, max_stale_hours=24,
        max_row_tokens=512, max_rows=100, origins=frozenset({"simulated"}),
    )  # fmt: skip


def test_a_summary_and_what_follows_it_share_their_turns_advantage_and_weight(tiny_folder):
    # a turn of three completions: work, a summary of it, and work that goes on from the summary alone, so from another prompt
    records = on_policy_records(tiny_folder, 9)
    chain = [record | {"session_id": "s9", "turn_id": "t9", "turn_index": 0, "attempt": k, "reward": 1.0, "user_key": "u9"}
             for k, record in enumerate(records[6:])]  # fmt: skip
    made = prepare([*records[:6], *chain], limits(tiny_folder), UpdateConfig(min_rows=1), state={"ema": {}, "consumed": []}, now=NOW)
    shared = [row for row in made.rows if row.row_id in {record["completion_id"] for record in chain}]
    assert len(shared) == 3
    assert len({row.advantage for row in shared}) == 1
    assert {row.omega for row in shared} == {1.0}
    assert made.facts["turns"] == 7
    assert shared[0].advantage > 0


def test_the_events_behind_a_version_of_the_lake_are_those_of_its_last_distil(tmp_path):
    home = Home(tmp_path)
    assert frontier(home, 7) == {}
    lake.create_missing(home)
    blank = {field.name: None for field in TABLES["distilled"].schema}
    for hour, version, offset in ((1, 6, 10), (2, 7, 20), (3, 7, 25), (4, 8, 30)):
        at = datetime(2026, 11, 30, hour, tzinfo=UTC)
        lake.append(home, "distilled", [blank | {"distilled_at": at, "frontier": {"t-0": offset}, "versions": {"samples": version}}])
    assert frontier(home, 7) == {"t-0": 25}
    assert frontier(home, 9) == {}


def test_two_sessions_of_one_prompt_are_each_others_baseline(tiny_folder):
    records = on_policy_records(tiny_folder, 6)
    same = [record | {"prompt_ids": records[0]["prompt_ids"], "turn_index": 0, "session_id": f"p{k}", "user_key": f"p{k}", "reward": reward}
            for k, (record, reward) in enumerate(zip(records[:2], (1.0, 0.5), strict=True))]  # fmt: skip
    made = prepare([*same, *records[2:]], limits(tiny_folder), UpdateConfig(min_rows=1), state={"ema": {}, "consumed": []}, now=NOW)
    first, second = (next(row for row in made.rows if row.row_id == record["completion_id"]).advantage for record in same)
    assert first == pytest.approx(-second)
    assert first > 0
