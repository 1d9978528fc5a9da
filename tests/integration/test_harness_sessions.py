"""Agent loop, sessions and runner against a real HTTP server with scripted answers and the real sandbox."""

import itertools
import json
import threading
from pathlib import Path

import pytest

from deploy.harness.agent import Agent, Ending, run_turn
from deploy.harness.client import Caller, GatewayClient, Place, Sampling
from deploy.harness.config import HarnessConfig
from deploy.harness.demonstrations import DONE, call_text
from deploy.harness.runner import SESSIONS, RunPlan, read_lines, run_sessions
from deploy.harness.session import Plan, run_session
from deploy.harness.stamps import SessionLog
from deploy.harness.summary import describe, summarise
from pipelines.errors import Busy, ConfigError, ContractViolation, EngineUnavailable
from pipelines.events import EVENT, ResultClass
from pipelines.storage import exclusive
from tests.support.harness import ListSink, Scripted, ScriptedGateway, knowing_policy

pytestmark = pytest.mark.sandbox


def plan(**fields) -> RunPlan:
    return RunPlan(**({"sessions": 6, "seed": 11, "origin": "simulated", "split": "simulated", "concurrency": 3} | fields))


@pytest.fixture
def agent(scripted, sandbox, workspace):
    """Build an agent whose policy says the given texts in turn."""
    clients: list[GatewayClient] = []

    def build(*texts, sink: ListSink | None = None, **config) -> tuple[Agent, ScriptedGateway]:
        answers = iter(texts)
        gateway = scripted(lambda body, headers: next(answers))
        sink = sink or ListSink()
        log = SessionLog(sink=sink, session_id="s1", origin="simulated", user_key="u", consent="train")
        caller = Caller(session_id="s1", user="ada", origin="simulated", consent="train", surface="simulator", task_bucket="edit.x")
        harness = HarnessConfig(**config)
        client = GatewayClient(gateway.url, timeout_s=10, tries=1)
        clients.append(client)
        return (
            Agent(client=client, sandbox=sandbox, workspace=workspace, log=log, caller=caller, config=harness, seed_key="k"),
            gateway,
        )

    yield build
    for client in clients:
        client.__exit__()


def turn_of(agent: Agent, **more):
    conversation = [{"role": "system", "content": "sys"}, {"role": "user", "content": "do it"}]
    return run_turn(agent, conversation, turn_id="t0", turn_index=0, **more), conversation


def test_a_turn_of_read_edit_done_is_recorded_step_by_step(agent, workspace: Path) -> None:
    (workspace / "a.py").write_text("A = 1\n")
    sink = ListSink()
    read, edit = call_text("read_file", {"path": "a.py"}), call_text("edit_file", {"path": "a.py", "old": "A = 1", "new": "A = 2"})
    parts, gateway = agent(read, edit, DONE, sink=sink)
    turn, conversation = turn_of(parts)
    assert turn.ending is Ending.ANSWERED
    assert (turn.calls, turn.invalid_calls, len(turn.proposals)) == (2, 0, 1)
    assert [message["role"] for message in conversation] == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert conversation[2]["content"] == read
    assert conversation[3]["content"] == "A = 1\n"
    assert [event.type for event in sink.events] == ["tool_call", "tool_result", "tool_call", "tool_result", "edit_proposed"]
    for event in sink.events:
        assert (event.session_id, event.turn_id, event.policy_version, event.arm, event.user_key) == ("s1", "t0", 3, "serving", "u")
    calls = sink.of("tool_call")
    assert [(call.payload.name, call.payload.completion_id, call.payload.arguments_valid) for call in calls] == [
        ("read_file", "c1", True),
        ("edit_file", "c2", True),
    ]
    edit_event = sink.of("edit_proposed")[0].payload
    assert (edit_event.chars_added, edit_event.chars_removed, edit_event.tool_call_id) == (1, 1, calls[1].payload.tool_call_id)
    assert len(gateway.requests) == 3


def test_every_prompt_begins_with_the_one_before(agent, workspace: Path) -> None:
    (workspace / "a.py").write_text("A = 1\n")
    parts, gateway = agent(call_text("read_file", {"path": "a.py"}), "not <tool_call>{broken</tool_call>", DONE)
    turn_of(parts)
    prompts = [body["messages"] for _, body in gateway.requests]
    for earlier, later in itertools.pairwise(prompts):
        assert later[: len(earlier)] == earlier


def test_requests_say_who_asks_and_where(agent) -> None:
    parts, gateway = agent(DONE)
    turn_of(parts)
    headers, body = gateway.requests[0]
    expected = {
        "x-session-id": "s1", "x-turn-id": "t0", "x-turn-index": "0", "x-step": "0", "x-user": "ada", "x-consent": "train",
        "x-origin": "simulated", "x-surface": "simulator", "x-task-bucket": "edit.x", "x-turn-type": "main",
    }  # fmt: skip
    assert {name: headers[name] for name in expected} == expected
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (1.0, 1.0, 128)
    assert "top_k" not in body
    assert [tool["function"]["name"] for tool in body["tools"]] == ["read_file", "edit_file", "grep", "run_terminal"]


def test_a_broken_call_is_answered_recorded_and_may_be_repaired(agent) -> None:
    sink = ListSink()
    parts, _ = agent('<tool_call>{"name": "edit_file", "arguments": [</tool_call>', call_text("fly", {}), DONE, sink=sink)
    turn, conversation = turn_of(parts)
    assert (turn.calls, turn.invalid_calls) == (2, 2)
    assert [result.payload.result_class for result in sink.of("tool_result")] == [ResultClass.INVALID_ARGUMENTS, ResultClass.UNKNOWN_TOOL]
    assert [call.payload.arguments_valid for call in sink.of("tool_call")] == [False, False]
    assert conversation[3]["content"].startswith("error: arguments are not JSON; edit_file takes")
    assert turn.ending is Ending.ANSWERED


@pytest.mark.parametrize(
    ("texts", "config", "ending"),
    [
        (["Which file do you mean?"], {}, Ending.ASKED),
        (["It is 7."], {}, Ending.ANSWERED),
        ([Scripted(content="It is", finish_reason="length")], {}, Ending.CUT),
        ([call_text("grep", {"pattern": "x"})] * 9, {"max_steps": 2}, Ending.STEP_LIMIT),
        ([call_text("fly", {})] * 9, {"max_invalid_steps": 2}, Ending.STUCK),
        ([call_text("fly", {}), call_text("grep", {"pattern": "x"})] * 9, {"max_invalid_steps": 2}, Ending.STEP_LIMIT),
        ([call_text("grep", {"pattern": "x"})] * 9, {"max_turn_tokens": 30}, Ending.TOKEN_LIMIT),
        ([call_text("grep", {"pattern": "x"}), Scripted(status=400, error_code="context_length_exceeded")], {}, Ending.CONTEXT_LIMIT),
    ],
)
def test_how_a_turn_ends(agent, texts, config, ending: Ending) -> None:
    parts, _ = agent(*texts, **config)
    assert turn_of(parts)[0].ending is ending


def test_an_impatient_user_interrupts_and_the_open_call_is_not_run(agent, workspace: Path) -> None:
    sink = ListSink()
    parts, _ = agent(call_text("run_terminal", {"command": "touch ran"}), DONE, sink=sink)
    turn, _ = turn_of(parts, patience_s=-1.0)
    assert turn.ending is Ending.INTERRUPTED
    assert [result.payload.result_class for result in sink.of("tool_result")] == [ResultClass.USER_ABORTED]
    assert sink.of("interrupted")[0].payload.by == "user"
    assert turn.invalid_calls == 0
    assert not (workspace / "ran").exists()


SAMPLING = Sampling(temperature=1.0, max_tokens=8, seed=1)
CALLER = Caller(session_id="s", user="u", origin="simulated", consent="train", surface="simulator")
PLACE = Place(turn_id="t", turn_index=0, step=0)
HELLO = [{"role": "user", "content": "x"}]


def test_a_busy_gateway_is_asked_again_and_a_broken_answer_is_not(scripted) -> None:
    answers = iter([Scripted(status=503), Scripted(content="hello")])
    gateway = scripted(lambda body, headers: next(answers))
    with GatewayClient(gateway.url, timeout_s=5, tries=3) as client:
        assert client.complete(HELLO, SAMPLING, caller=CALLER, place=PLACE).content == "hello"
    assert len(gateway.requests) == 2
    broken = scripted(lambda body, headers: Scripted(status=500))
    with GatewayClient(broken.url, timeout_s=5, tries=3) as client, pytest.raises(EngineUnavailable, match="answered 500"):
        client.complete(HELLO, SAMPLING, caller=CALLER, place=PLACE)
    assert len(broken.requests) == 1


@pytest.mark.parametrize(("status", "error"), [(401, ConfigError), (400, ContractViolation), (429, EngineUnavailable)])
def test_refusals_of_the_gateway_are_told_apart(status: int, error: type[Exception], scripted) -> None:
    gateway = scripted(lambda body, headers: Scripted(status=status))
    with GatewayClient(gateway.url + "/v1", timeout_s=5, tries=1) as client, pytest.raises(error):
        client.complete(HELLO, SAMPLING, caller=CALLER, place=PLACE)


def test_a_policy_that_follows_the_convention_keeps_every_edit(scripted, services, tmp_path: Path) -> None:
    gateway = scripted(knowing_policy("ref", split="simulated", seed=11))
    sink = ListSink()
    result = summarise(run_sessions(services(gateway.url, sink), plan(), tmp_path))
    assert result["kept_edits"]["rate"] == 1.0
    assert result["solved"]["rate"] == 1.0
    assert (result["dissatisfied"]["rate"], result["invalid_calls"]["rate"], result["unscored_turns"]["rate"]) == (0.0, 0.0, 0.0)
    decisions = [event.payload.decision for event in sink.of("edit_decided")]
    assert decisions == ["accepted"] * result["turns"]
    assert {event.payload.survival_no_revert for event in sink.of("edit_survival")} == {1.0}
    assert sorted({event.payload.horizon_s for event in sink.of("edit_survival")}) == [0, 300, 900]


def test_a_policy_that_works_but_ignores_the_convention_keeps_none(scripted, services, tmp_path: Path) -> None:
    gateway = scripted(knowing_policy("see", split="simulated", seed=11))
    sink = ListSink()
    result = summarise(run_sessions(services(gateway.url, sink), plan(), tmp_path))
    assert result["kept_edits"]["rate"] == 0.0
    assert result["verdicts"] == {"convention": result["turns"]}
    assert {event.payload.decision for event in sink.of("edit_decided")} == {"undone"}
    assert {event.payload.survival_no_revert for event in sink.of("edit_survival")} == {0.0}
    assert all(event.payload.passed_after == 1 for event in sink.of("test_run"))
    assert result["dissatisfied"]["rate"] > 0


def test_an_undone_edit_is_really_taken_back_before_the_next_try(scripted, services, tmp_path: Path) -> None:
    # the same old text is found again by every retry, so no call is invalid
    gateway = scripted(knowing_policy("see", split="simulated", seed=11))
    rows = run_sessions(services(gateway.url, ListSink(), max_asks_again=3), plan(sessions=8), tmp_path)
    assert max(turn["try_number"] for row in rows for turn in row["turns"]) >= 2
    assert sum(row["invalid_calls"] for row in rows) == 0


def test_events_of_a_session_are_whole_ordered_and_stamped(scripted, services) -> None:
    gateway = scripted(knowing_policy("see", split="simulated", seed=11))
    sink = ListSink()
    session = Plan(index=1, attempt=0, session_id="simulated-x", seed=11, split="simulated", origin="simulated")
    record, transcript = run_session(services(gateway.url, sink), session)
    kinds = [event.type for event in sink.events]
    assert (kinds[0], kinds[-1]) == ("session_started", "session_ended")
    assert kinds.count("turn_started") == len(record.turns) == len(transcript)
    assert [event.payload.turn_index for event in sink.of("turn_started")] == list(range(len(record.turns)))
    assert len({event.event_id for event in sink.events}) == len(sink.events)
    for event in sink.events:
        assert (event.policy_version, event.arm, event.origin, event.consent) == (3, "serving", "simulated", "train")
        assert event.user_key == record.user_key
        assert EVENT.validate_json(event.model_dump_json()) == event
    proposed = {event.payload.edit_id for event in sink.of("edit_proposed")}
    assert proposed == {event.payload.edit_id for event in sink.of("edit_decided")}
    assert "completion" not in kinds


def test_a_turn_that_asks_instead_of_editing_is_counted_and_scored_for_it(scripted, services, tmp_path: Path) -> None:
    gateway = scripted(lambda body, headers: "Which file do you mean?")
    sink = ListSink()
    rows = run_sessions(services(gateway.url, sink, max_asks_again=0), plan(), tmp_path)
    opened = {event.turn_id: event.payload for event in sink.of("turn_started")}
    for row in rows:
        assert row["asks"] == len(row["turns"])
        # Asked for an edit, the policy put it off: that is charged, with or without a follow-up.
        for turn in row["turns"]:
            follow_up = turn is not row["turns"][-1]
            assert turn["scored"] == (follow_up or opened[turn["turn_id"]].edit_expected >= 0.5)
    assert {turn["scored"] for row in rows for turn in row["turns"]} == {True, False}
    assert summarise(rows)["asks"]["rate"] == 1.0


def test_the_same_seed_asks_the_same_things_with_the_same_sampling_seeds(scripted, services, tmp_path: Path) -> None:
    asked = []
    for name in ("one", "two"):
        gateway = scripted(knowing_policy("ref", split="simulated", seed=11))
        run_sessions(services(gateway.url, ListSink()), plan(), tmp_path / name)
        asked.append(sorted((body["messages"][-1]["content"], body["seed"]) for _, body in gateway.requests))
    assert asked[0] == asked[1]
    assert len({seed for _, seed in asked[0]}) == len(asked[0])


def test_a_finished_run_is_not_run_again_and_a_cut_off_session_gets_another_id(scripted, services, tmp_path: Path) -> None:
    gateway = scripted(knowing_policy("ref", split="simulated", seed=11))
    first = run_sessions(services(gateway.url, ListSink()), plan(sessions=4), tmp_path)
    before = len(gateway.requests)
    assert run_sessions(services(gateway.url, ListSink()), plan(sessions=4), tmp_path) == first
    assert len(gateway.requests) == before
    lines = (tmp_path / SESSIONS).read_bytes().splitlines(keepends=True)
    lost = json.loads(lines[-1])
    (tmp_path / SESSIONS).write_bytes(b"".join(lines[:-1]) + lines[-1][:20])  # as a crash leaves it
    again = run_sessions(services(gateway.url, ListSink()), plan(sessions=4), tmp_path)
    redone = next(row for row in again if row["index"] == lost["index"])
    assert redone["attempt"] == lost["attempt"] + 1
    assert redone["session_id"] != lost["session_id"]
    assert [row for row in again if row is not redone] == [row for row in first if row["index"] != lost["index"]]
    assert len({row["index"] for row in read_lines(tmp_path / SESSIONS)}) == 4


def test_a_folder_of_another_run_or_in_use_is_refused(scripted, services, tmp_path: Path) -> None:
    gateway = scripted(knowing_policy("ref", split="simulated", seed=11))
    parts = services(gateway.url, ListSink())
    run_sessions(parts, plan(sessions=1), tmp_path)
    with pytest.raises(ConfigError, match="holds another run"):
        run_sessions(parts, plan(sessions=1, seed=12), tmp_path)
    with exclusive(tmp_path / ".lock", what="x"), pytest.raises(Busy):
        run_sessions(parts, plan(sessions=1), tmp_path)


def test_our_own_failures_are_infra_errors_and_are_done_again(scripted, services, tmp_path: Path) -> None:
    known = knowing_policy("ref", split="simulated", seed=11)
    failing = threading.Event()
    failing.set()

    def policy(body, headers):
        return Scripted(status=500) if failing.is_set() and headers["x-user"].endswith("-1") else known(body, headers)

    gateway = scripted(policy)
    sink = ListSink()
    rows = run_sessions(services(gateway.url, sink), plan(sessions=3), tmp_path)
    assert [row["outcome"] for row in rows] == ["done", "infra_error", "done"]
    failed = [event for event in sink.events if event.session_id == rows[1]["session_id"]]
    assert [event.type for event in failed] == ["session_started", "turn_started", "interrupted", "session_ended"]
    assert failed[2].payload.by == "system"
    assert {event.policy_version for event in failed} == {None}
    assert summarise(rows)["infra_errors"] == 1
    failing.clear()
    again = run_sessions(services(gateway.url, sink), plan(sessions=3), tmp_path)
    assert [row["outcome"] for row in again] == ["done", "done", "done"]
    assert (again[0], again[1]["attempt"]) == (rows[0], 1)


def test_a_gateway_that_is_not_there_is_one_clear_sentence(services, tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="none of 2 sessions got an answer"):
        run_sessions(services("http://127.0.0.1:9", ListSink()), plan(sessions=2), tmp_path)


def test_the_summary_reads_well_with_and_without_data(scripted, services, tmp_path: Path) -> None:
    gateway = scripted(knowing_policy("ref", split="simulated", seed=11))
    text = describe(summarise(run_sessions(services(gateway.url, ListSink()), plan(sessions=2), tmp_path)))
    assert "kept edits  100.0%" in text
    assert "no data" in describe(summarise([]))
