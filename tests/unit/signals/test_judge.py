"""The optional judge, against a real HTTP server on the loopback address."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.errors import ConfigError
from signals.config import FollowupsConfig
from signals.judge import HttpJudge, Verdicts, mixed, verdict_key, version, voted
from tests.support.chat_server import Server, answer


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


def config(server: Server, **changes: Any) -> FollowupsConfig:
    return FollowupsConfig(judge_url=server.url, judge_model="m", **changes)


def ask(server: Server, tmp_path: Path, message: str = "hm, the other one", **changes: Any) -> tuple[float | None, HttpJudge]:
    settings = config(server, **changes)
    cache = Verdicts(tmp_path / "verdicts.jsonl", model=settings.judge_model, votes=settings.judge_votes)
    with HttpJudge(settings, cache, key="secret") as asked:
        return asked.verdict(message, "Rename the helper"), asked


def test_the_verdict_is_the_smoothed_share_of_yes_votes(server: Server, tmp_path: Path) -> None:
    server.reply = lambda number: (200, answer("YES" if number < 3 else "no."))
    verdict, asked = ask(server, tmp_path)
    assert verdict == voted(2, 3) == 2.5 / 4
    assert (asked.spent.calls, asked.spent.tokens, dict(asked.spent.failures)) == (3, 150, {})
    assert server.asked[0]["path"] == "/v1/chat/completions"
    assert json.loads(server.asked[0]["messages"][1]["content"]) == {"first": "Rename the helper", "second": "hm, the other one"}
    assert server.headers == ["Bearer secret"] * 3


def test_nothing_is_asked_twice_also_by_a_later_run(server: Server, tmp_path: Path) -> None:
    first, _ = ask(server, tmp_path)
    with (tmp_path / "verdicts.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"key": "torn')
    again, asked = ask(server, tmp_path)
    assert again == first == 0.5 / 4
    assert (asked.spent.calls, asked.spent.cached, len(server.asked)) == (0, 1, 3)
    assert ask(server, tmp_path, judge_votes=1)[1].spent.calls == 1


def test_a_slow_server_costs_no_more_than_the_time_limit_and_gives_no_verdict(server: Server, tmp_path: Path) -> None:
    server.reply = lambda _: (time.sleep(1.0), (200, answer("YES")))[1]
    begun = time.monotonic()
    verdict, asked = ask(server, tmp_path, judge_timeout_s=0.2)
    assert verdict is None
    assert dict(asked.spent.failures) == {"timeout": 1}
    assert time.monotonic() - begun < 0.9
    assert asked.spent.tokens > 0


@pytest.mark.parametrize(
    ("content", "status", "reason"),
    [
        (b"<html>", 200, "unreadable"),
        ({"choices": []}, 200, "unreadable"),
        ([], 200, "unreadable"),
        (answer("maybe"), 200, "unreadable"),
        ({"choices": [{"message": {"content": None}}]}, 200, "unreadable"),
        ({"error": "busy"}, 503, "http_503"),
    ],
)
def test_what_cannot_be_read_is_no_verdict_with_a_reason(server: Server, tmp_path: Path, content: Any, status: int, reason: str) -> None:
    server.reply = lambda _: (status, content)
    verdict, asked = ask(server, tmp_path)
    assert verdict is None
    assert dict(asked.spent.failures) == {reason: 1}
    assert not (tmp_path / "verdicts.jsonl").exists()


def test_a_server_that_is_not_there_is_no_verdict(server: Server, tmp_path: Path) -> None:
    settings = FollowupsConfig(judge_url="http://127.0.0.1:9/v1", judge_model="m")
    with HttpJudge(settings, Verdicts(tmp_path / "v.jsonl", model="m", votes=3)) as asked:
        assert asked.verdict("x", None) is None
    assert dict(asked.spent.failures) == {"unreachable": 1}


def test_the_cost_limits_end_the_asking(server: Server, tmp_path: Path) -> None:
    assert ask(server, tmp_path, judge_max_calls=2)[1].spent.calls == 2
    server.asked.clear()
    verdict, asked = ask(server, tmp_path, judge_max_tokens=10)
    assert verdict is None
    assert (asked.spent.calls, dict(asked.spent.failures), server.asked) == (0, {"cost_limit": 1}, [])


def test_a_judge_without_address_or_model_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"judge_url"):
        HttpJudge(FollowupsConfig(), Verdicts(tmp_path / "v", model="", votes=3))


def test_mixing_is_a_weighted_mean_of_log_odds() -> None:
    assert mixed(0.5, 0.875, 0.5) == round(7**0.5 / (1 + 7**0.5), 6)
    assert mixed(0.3, 0.875, 0.0) == 0.3
    assert mixed(0.3, 0.875, 1.0) == 0.875


@given(st.floats(1e-6, 1 - 1e-6), st.integers(0, 5), st.floats(0, 1))
def test_a_mixed_probability_lies_between_both_and_strictly_inside_zero_and_one(p: float, yes: int, share: float) -> None:
    verdict = voted(yes, 5)
    found = mixed(p, verdict, share)
    assert 0.0 < found < 1.0
    assert min(p, verdict) - 1e-6 <= found <= max(p, verdict) + 1e-6


def test_model_share_and_verdicts_decide_the_version_and_a_judge_that_is_off_has_none() -> None:
    on = FollowupsConfig(judge_url="http://127.0.0.1:1/v1", judge_model="m")
    assert version(FollowupsConfig(), {}) == ""
    seen = {
        version(on, {}),
        version(on, {verdict_key("a", None): 0.5}),
        version(on.model_copy(update={"judge_model": "n"}), {}),
        version(on.model_copy(update={"judge_share": 0.1}), {}),
    }
    assert len(seen) == 4
    assert len({verdict_key("a", None), verdict_key("a", ""), verdict_key("", "a"), verdict_key("a", "b")}) == 4
