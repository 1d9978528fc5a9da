"""The judge's verdicts from the lake's follow-ups to rewards, against a real HTTP server on the loopback address."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pipelines.errors import ContractViolation
from pipelines.storage import Home
from signals import explain, lake, sessions, verdict_store
from signals.components import classified
from signals.config import FollowupsConfig, RewardsConfig
from signals.followup_commands import app
from signals.judge import NOT_JUDGED, HttpJudge, Judged, mixed, verdict_key
from signals.rewards import reward_version
from tests.support.chat_server import Server, answer

AT = datetime(2026, 5, 4, 9, tzinfo=UTC)
MS = round(AT.timestamp() * 1000)
SAID = ["Rename the helper", "hm, the other one", "Thanks. Now add a test for it"]
"""Three turns: two follow-ups."""
FIRST = verdict_key(SAID[1], SAID[0])
REWARDS = RewardsConfig()


def rows() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for index, message in enumerate(SAID):
        common = {"session_id": "s", "turn_id": f"t{index}", "user_key": "u", "origin": "live", "arm": "serving", "consent": "train"}
        common |= {"date": AT.date(), "policy_version": 1, "client": {"name": "c", "version": "1"}, "schema_version": 1}
        at = MS + index * 60_000
        opening = {"turn_index": index, "message": message, "message_chars": len(message)}
        reply = {"completion_id": f"c{index}", "step": 0, "finish_reason": "stop", "prompt_tokens": 5, "response_tokens": 2}
        for kind, offset, payload in (("turn_started", 0, opening), ("completion", 500, reply)):
            made.append({
                **common, "event_id": f"{kind}{index}", "fingerprint": f"f{kind}{index}", "type": kind, "occurred_at_ms": at + offset,
                "recorded_at_ms": at + offset, "payload": payload,
            })  # fmt: skip
    return made


def results(judged: Judged = NOT_JUDGED) -> dict[str, sessions.TurnResult]:
    found = sessions.distil(rows(), REWARDS, now_ms=MS + 10_000_000, judged=judged)
    return {item.turn_id: item for item in found}


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A lake of one session that was distilled without a judge."""
    made = Home(tmp_path)
    lake.create_missing(made)
    lake.append(made, "events", rows())
    turns, rewards = [], []
    for item in results().values():
        ids = {"session_id": "s", "turn_id": item.turn_id, "policy_version": 1, "date": AT.date(), "outcome": item.outcome.value}
        turns.append(ids | {"turn_index": item.turn_index, "started_at": AT, "final": True, "user_key": "u", "origin": "live"})
        rewards.append(ids | {"reward": item.reward, "reward_version": reward_version(REWARDS)} | item.components)
    lake.append(made, "turns", turns)
    lake.append(made, "rewards", rewards)
    now = AT + timedelta(milliseconds=10_000_000)
    lake.append(made, "distilled", [{"distilled_at": now, "tombstoned": [], "frontier": [], "versions": []}])
    return made


def settings(server: Server, **changes: Any) -> FollowupsConfig:
    return FollowupsConfig(judge_url=server.url, judge_model="m", **{"judge_margin": 0.5, **changes})


def ask(home: Home, config: FollowupsConfig) -> tuple[verdict_store.Asked, HttpJudge]:
    with HttpJudge(config, verdict_store.asked(home, config), key="") as judge:
        return verdict_store.ask(home, config, judge, now=AT), judge


def test_every_unsure_follow_up_of_the_lake_is_asked_once_and_its_verdict_is_in_force(home: Home, server: Server) -> None:
    server.reply = lambda number: (200, answer("YES" if number <= 3 else "NO"))
    found, judge = ask(home, settings(server))
    assert (found.follow_ups, found.unsure, judge.spent.calls) == (2, 2, 6)
    assert [json.loads(asked["messages"][1]["content"])["second"] for asked in server.asked] == [SAID[1]] * 3 + [SAID[2]] * 3
    in_force = verdict_store.in_force(home)
    assert in_force == found.judged
    assert in_force.verdicts == {FIRST: 0.875, verdict_key(SAID[2], SAID[1]): 0.125}
    again, judge = ask(home, settings(server))
    assert (judge.spent.calls, judge.spent.cached, again.judged) == (0, 2, found.judged)


def test_where_the_classifier_is_sure_nobody_is_asked(home: Home, server: Server) -> None:
    stored = {row["turn_id"]: (1 - row["follow_up"]) / 2 for row in lake.read(home, "rewards").to_pylist() if row["follow_up"] is not None}
    margin = sorted(abs(p - 0.5) for p in stored.values())
    found, judge = ask(home, settings(server, judge_margin=(margin[0] + margin[1]) / 2))
    assert (found.follow_ups, found.unsure, judge.spent.calls) == (2, 1, 3)
    assert ask(home, settings(server, judge_margin=0.0))[0].judged.verdicts == found.judged.verdicts  # what is known is not thrown away


def test_a_verdict_moves_the_reward_by_the_stated_rule_and_only_of_its_turn(home: Home) -> None:
    before, judged = results(), Judged(verdicts={FIRST: 0.875}, share=0.5, version="v")
    after = results(judged)
    p = before["t0"].dissatisfied
    assert p is not None
    assert after["t0"].dissatisfied == mixed(p, 0.875, 0.5) != p
    assert after["t0"].components["follow_up"] == 1 - 2 * mixed(p, 0.875, 0.5)
    assert classified(after["t0"].evidence.follow_up) == p
    assert (after["t1"].reward, after["t2"].reward) == (before["t1"].reward, before["t2"].reward)


def test_the_reward_version_names_the_set_of_verdicts_and_no_verdicts_change_nothing(home: Home, server: Server) -> None:
    found, _ = ask(home, settings(server))
    other = verdict_store.freeze(home, settings(server), {FIRST: 0.625}, now=AT)
    versions = {reward_version(REWARDS, judged=judged.version) for judged in (NOT_JUDGED, found.judged, other)}
    assert len(versions) == 3
    assert verdict_store.freeze(home, settings(server), {}, now=AT) == verdict_store.in_force(home) == NOT_JUDGED
    assert reward_version(REWARDS, judged="") == reward_version(REWARDS)


def test_explain_names_the_judges_share_and_that_the_stored_number_is_of_before(home: Home, server: Server) -> None:
    assert explain.turn(home, REWARDS, "t0")["judge"] is None
    server.reply = lambda _: (200, answer("YES"))
    judged = ask(home, settings(server))[0].judged
    found = explain.turn(home, REWARDS, "t0")
    assert found["judge"] == {"verdict": 0.875, "share": 0.5, "classifier": results()["t0"].dissatisfied, "version": judged.version}
    assert found["reward_version"] == reward_version(REWARDS, judged=judged.version) != found["stored_version"]
    text = explain.text(found)
    assert "judge 0.875 with share 0.5 of the log-odds" in text
    assert "recompute with: tidegate signals run --once --everything" in text


def test_the_command_freezes_and_withdraws(home: Home, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--home", str(home.root), "--json", "--set", f'followups.judge_url="{server.url}"', "--set", 'followups.judge_model="m"']
    app(["judge", *options, "--set", "followups.judge_margin=0.5"], result_action="return_value")
    told = json.loads(capsys.readouterr().out)
    assert (told["follow_ups"], told["verdicts"], told["requests"], told["without_verdict"]) == (2, 2, 6, {})
    assert verdict_store.in_force(home).version == told["version"]
    app(["judge", *options, "--withdraw"], result_action="return_value")
    assert verdict_store.in_force(home) == NOT_JUDGED


def test_what_the_server_does_not_answer_is_counted_and_not_in_force(home: Home, server: Server) -> None:
    server.reply = lambda number: (200, answer("YES")) if number <= 3 else (503, {"error": "busy"})
    found, judge = ask(home, settings(server))
    assert dict(judge.spent.failures) == {"http_503": 1}
    assert found.judged.verdicts == {FIRST: 0.875}


def test_a_damaged_file_stops_instead_of_giving_other_rewards(home: Home, server: Server) -> None:
    ask(home, settings(server))
    (home.root / verdict_store.FROZEN).write_text('{"verdicts": ')
    with pytest.raises(ContractViolation, match="freeze the verdicts again"):
        verdict_store.in_force(home)


def test_a_repeated_event_and_their_order_change_no_pair(home: Home) -> None:
    lake.append(home, "events", [row | {"recorded_at_ms": row["recorded_at_ms"] + 9} for row in reversed(rows())])
    assert [(pair.message, pair.previous) for pair in verdict_store.pairs(home)] == [(SAID[1], SAID[0]), (SAID[2], SAID[1])]
