"""The benchmark against a scripted gateway and the real sandbox: pairs, outcomes, and rows that the gate can read."""

import json
import re
from pathlib import Path

import pytest

from deploy.benchmark.folders import load_tasks
from deploy.benchmark.runner import RESULTS, BenchmarkPlan, describe, run_benchmark, summarise
from deploy.harness.demonstrations import DONE, call_text
from deploy.release.evidence import parse_attempts, read_rows
from pipelines.errors import ConfigError, EngineUnavailable
from tests.support.harness import ListSink, Scripted, knowing_policy

pytestmark = pytest.mark.sandbox

NAMES = ("retry-limit", "only-a-question", "find-the-constant")
TASKS = tuple(task for task in load_tasks() if task.name in NAMES)


def plan(**fields) -> BenchmarkPlan:
    return BenchmarkPlan(**({"tasks": TASKS, "attempts": 2, "sessions": 3, "seed": 5, "concurrency": 4} | fields))


def able(body, headers):
    """A policy that solves our three folders and every session."""
    text = next(message["content"] for message in body["messages"] if message["role"] == "user")
    last = body["messages"][-1]
    if "How many functions" in text:
        return "2"
    if "RETRIES to 5" in text or "MAX_UPLOAD" in text:
        path, old, new = (
            ("settings.py", "RETRIES = 3", "RETRIES = 5") if "RETRIES" in text else ("files.py", "MAX_UPLOAD = 16", "MAX_UPLOAD = 40")
        )
        return DONE if last["content"] == "ok" else call_text("edit_file", {"path": path, "old": old, "new": new})
    return knowing_policy("see", split="held_out", seed=5)(body, headers)


def test_an_able_policy_passes_and_the_rows_are_what_the_gate_reads(scripted, services, tmp_path: Path) -> None:
    sink = ListSink()
    gateway = scripted(able)
    rows = run_benchmark(services(gateway.url, sink), plan(), tmp_path)
    assert [row.outcome for row in rows] == ["pass"] * 9
    assert {(row.task, row.attempt) for row in rows if row.suite != "edits"} == {(name, attempt) for name in NAMES for attempt in (0, 1)}
    question = next(row for row in rows if row.task == "only-a-question")
    assert (question.edits_proposed, question.turns, question.unscored_turns) == (0, 1, 0), "its test run is evidence"
    edit = next(row for row in rows if row.task == "retry-limit")
    assert (edit.edits_proposed, edit.edits_kept, edit.calls, edit.invalid_calls, edit.scored_turns) == (1, 1, 1, 0, 1)
    # sessions: the work is done (solved), but users of this world do not keep see
    sessions = [row for row in rows if row.suite == "edits"]
    assert all(row.solved and row.edits_kept == 0 and row.edits_proposed > 0 for row in sessions)
    attempts = parse_attempts(read_rows(tmp_path / RESULTS), source="results")
    assert [(each.suite, each.task, each.solved) for each in attempts] == [(row.suite, row.task, row.solved) for row in rows]
    for event in sink.events:
        assert (event.origin, event.consent) == ("benchmark", "measure")
    assert "edits" in describe(summarise(rows))


def test_two_policies_are_asked_the_same_with_the_same_sampling_seeds(scripted, services, tmp_path: Path) -> None:
    first_prompts = []
    for name, policy in (("serving", able), ("candidate", lambda body, headers: "No.")):
        gateway = scripted(policy)
        run_benchmark(services(gateway.url, ListSink()), plan(sessions=2), tmp_path / name)
        opening = [(body["messages"][1]["content"], body["seed"]) for headers, body in gateway.requests if len(body["messages"]) == 2]
        first_prompts.append(sorted(opening))
    assert first_prompts[0] == first_prompts[1]
    seeds = [seed for _, seed in first_prompts[0]]
    assert len(seeds) == len(set(seeds)) == 8


def test_a_policy_that_breaks_every_call_fails_and_shows_it(scripted, services, tmp_path: Path) -> None:
    gateway = scripted(lambda body, headers: '<tool_call>{"name": "edit_file", "arguments": [</tool_call>')
    rows = run_benchmark(services(gateway.url, ListSink()), plan(attempts=1), tmp_path)
    figures = summarise(rows)
    for suite in figures.values():
        assert suite["passed"] == 0
        assert suite["invalid_calls"] == 1.0
        assert suite["unscored_turns"] == 0.0


def test_attempts_that_our_machinery_failed_are_infra_errors_and_are_tried_again(scripted, services, tmp_path: Path) -> None:
    broken = {"on": True}

    def policy(body, headers):
        if broken["on"] and re.search("only-a-question", headers["x-user"]):
            return Scripted(status=500)
        return able(body, headers)

    gateway = scripted(policy)
    rows = run_benchmark(services(gateway.url, ListSink()), plan(attempts=1, sessions=1), tmp_path)
    assert {row.task: row.outcome for row in rows if row.suite != "edits"} == {
        "retry-limit": "pass", "only-a-question": "infra_error", "find-the-constant": "pass",
    }  # fmt: skip
    failed = next(row for row in rows if row.outcome == "infra_error")
    assert (failed.solved, failed.turns) == (False, 0)
    assert "answered 500" in failed.detail
    broken["on"] = False
    before = len(gateway.requests)
    again = run_benchmark(services(gateway.url, ListSink()), plan(attempts=1, sessions=1), tmp_path)
    assert [row.outcome for row in again] == ["pass"] * 4
    assert len(gateway.requests) == before + 1
    assert [json.loads(line)["outcome"] for line in (tmp_path / RESULTS).read_text().splitlines()] == ["pass"] * 4


def test_another_seed_in_the_same_folder_and_an_open_sandbox_are_refused(scripted, services, tmp_path: Path) -> None:
    from dataclasses import replace

    gateway = scripted(able)
    parts = services(gateway.url, ListSink())
    run_benchmark(parts, plan(attempts=1, sessions=0), tmp_path)
    with pytest.raises(ConfigError, match="holds another benchmark"):
        run_benchmark(parts, plan(attempts=1, sessions=0, seed=6), tmp_path)
    unconfined = replace(parts, harness=parts.harness.model_copy(update={"sandbox": "none"}))
    with pytest.raises(ConfigError, match="could read the tests"):
        run_benchmark(unconfined, plan(), tmp_path / "other")


def test_no_gateway_at_all_is_one_clear_sentence(services, tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="none of 3 benchmark attempts got an answer"):
        run_benchmark(services("http://127.0.0.1:9", ListSink()), plan(attempts=1, sessions=0), tmp_path)
