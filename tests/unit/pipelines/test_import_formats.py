"""Each format's committed sample gives the events that were counted by hand when it was written."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipelines import codec
from pipelines.events import Client, Event, ResultClass
from pipelines.importers import engine, registry, sniffing
from pipelines.importers.sessions import Stamp

SAMPLES = Path(registry.__file__).parent / "samples"
FILES = {
    "claude-code": "claude_code.jsonl",
    "codex": "codex.jsonl",
    "gemini-cli": "gemini_cli.jsonl",
    "swe-agent": "swe_agent.traj",
    "openhands": "openhands.json",
    "continue": "continue.jsonl",
    "aider": "aider.chat.history.md",
    "aider-analytics": "aider_analytics.jsonl",
}
OK, ABORTED, INVALID, ENVIRONMENT = (
    ResultClass.OK, ResultClass.USER_ABORTED, ResultClass.INVALID_ARGUMENTS, ResultClass.UNEXPECTED_ENVIRONMENT,
)  # fmt: skip


def stamp(name: str) -> Stamp:
    client = Client(name=f"import-{name}")
    return Stamp(user_key="u", consent="train", keep_text=True, client=client, keyed=readable, format=name)


def readable(kind: str, raw: str) -> str:
    """Stand for the keyed hash, so that a test can see what was hashed."""
    return f"{kind}:{raw}".encode("utf-8", "replace").decode()


def run(name: str, *files: Path) -> tuple[list[Event], dict[str, Any]]:
    module = registry.load(name)
    importer = engine.Importer(module.read, module.Mapper(stamp(name)))
    events = list(importer.events(files))
    return events, importer.counts.as_dict()


def sample(name: str) -> tuple[list[Event], dict[str, Any]]:
    return run(name, SAMPLES / FILES[name])


def of(events: Sequence[Event], kind: str) -> list[Any]:
    return [event.payload for event in events if event.type == kind]


def sizes(events: Sequence[Event]) -> list[tuple[int, int, int, int]]:
    return [(e.lines_added, e.lines_removed, e.chars_added, e.chars_removed) for e in of(events, "edit_proposed")]


def tokens(events: Sequence[Event]) -> list[tuple[int, int, int]]:
    return [(c.prompt_tokens, c.response_tokens, c.cached_tokens) for c in of(events, "completion")]


@pytest.mark.parametrize("name", FILES)
def test_a_samples_events_are_sound_say_imported_and_that_they_cannot_be_trained_on(name: str) -> None:
    events, counts = sample(name)
    for event in events:
        assert codec.decode(codec.encode(event), 1_000_000, key=event.session_id) == event
        assert (event.origin, event.policy_version, event.user_key, event.consent) == ("imported", None, "u", "train")
    assert {c.capture_error for c in of(events, "completion")} == {"no_token_ids"}
    assert len({event.event_id for event in events}) == len(events)
    assert counts["lines"] == counts["accepted"] + counts["duplicates"] + sum(counts["rejected"].values())
    assert counts["files"] == 1


@pytest.mark.parametrize("name", FILES)
def test_importing_a_sample_again_gives_the_same_bytes(name: str) -> None:
    assert [codec.encode(event) for event in sample(name)[0]] == [codec.encode(event) for event in sample(name)[0]]


@pytest.mark.parametrize("name", FILES)
def test_a_sample_is_recognised_by_its_content_and_by_no_other_format(name: str, tmp_path: Path) -> None:
    disguised = tmp_path / "transcript"
    disguised.write_bytes((SAMPLES / FILES[name]).read_bytes())
    head = sniffing.look(disguised)
    assert [known for known, form in registry.FORMATS.items() if form.sniff(head)] == [name]


@pytest.mark.parametrize("name", FILES)
def test_without_consent_no_text_is_kept_but_its_length_is(name: str) -> None:
    module = registry.load(name)
    silent = Stamp(user_key="u", consent="none", keep_text=True, client=Client(name="i"), keyed=stamp(name).keyed, format=name)
    quiet = list(engine.Importer(module.read, module.Mapper(silent)).events([SAMPLES / FILES[name]]))
    assert {turn.message for turn in of(quiet, "turn_started")} <= {None}
    assert [t.message_chars for t in of(quiet, "turn_started")] == [t.message_chars for t in of(sample(name)[0], "turn_started")]


def test_codex_user_text_opens_one_turn_tokens_count_once_and_outputs_of_both_forms_are_read() -> None:
    events, counts = sample("codex")
    assert counts["events"] == {
        "session_started": 1, "session_ended": 1, "turn_started": 2, "completion": 6, "tool_call": 5, "tool_result": 5,
        "edit_proposed": 2, "edit_decided": 2, "interrupted": 2, "test_run": 1,
    }  # fmt: skip
    assert (counts["lines"], counts["accepted"]) == (32, 20)
    assert [t.message for t in of(events, "turn_started")] == [
        "The heights in tides.py are rounded down. Please round to the nearest centimetre. The station key is in .env as "
        "STATION_KEY=<redacted:high_entropy>",
        "nein, nicht so: der Test ist immer noch rot",
    ]
    assert [t.language for t in of(events, "turn_started")] == ["en", "de"]
    assert tokens(events) == [(1000, 100, 400), (1150, 50, 1000), (1270, 30, 1150), (0, 0, 0), (0, 0, 0), (1380, 20, 1270)]
    assert {c.model for c in of(events, "completion")} == {"gpt-5-codex"}
    assert [c.arguments_valid for c in of(events, "tool_call")] == [True, True, True, False, True]
    assert [r.result_class for r in of(events, "tool_result")] == [OK, OK, ENVIRONMENT, INVALID, ABORTED]
    assert [r.exit_code for r in of(events, "tool_result")] == [0, 0, 1, None, None]
    assert [r.duration_ms for r in of(events, "tool_result")] == [200.0, 100.0, 1500.0, None, None]
    assert sizes(events) == [(2, 1, len("    # nearest centimetre    return round(metres * 100)"), len("    return int(metres * 100)")),
                             (2, 0, len("# Notesrounded"), 0)]  # fmt: skip
    assert [d.decision for d in of(events, "edit_decided")] == ["accepted", "rejected"]
    assert [i.target for i in of(events, "interrupted")] == ["turn", "rollback"]
    assert [(t.passed_after, t.failed_after, t.passed_before) for t in of(events, "test_run")] == [(3, 1, None)]
    assert of(events, "session_started")[0].repository == "repository:/home/mira/tide-tables"


def test_gemini_messages_that_grow_count_once_and_a_changed_edit_is_partly_accepted() -> None:
    events, counts = sample("gemini-cli")
    assert counts["events"] == {
        "session_started": 1, "session_ended": 1, "turn_started": 3, "completion": 3, "tool_call": 5, "tool_result": 5,
        "edit_proposed": 3, "edit_decided": 2, "interrupted": 1, "test_run": 1,
    }  # fmt: skip
    assert (counts["lines"], counts["accepted"], counts["duplicates"]) == (14, 9, 1)
    assert [t.message for t in of(events, "turn_started")] == [
        "Round the heights in tides.py to the nearest centimetre. Mail <redacted:email> if unclear.",
        "non, ce n'est pas ça, le test échoue encore",
        "use round() in tides.py",
    ]
    assert tokens(events) == [(2000, 100, 500), (2500, 80, 1900), (2600, 15, 2400)]
    assert [r.result_class for r in of(events, "tool_result")] == [OK, OK, INVALID, ENVIRONMENT, ABORTED]
    assert [r.exit_code for r in of(events, "tool_result")] == [None, None, None, 1, None]
    assert sizes(events)[0] == (2, 1, len("    # nearest centimetre    return round(metres * 100)"), len("    return int(metres * 100)"))
    assert sizes(events)[2] == (2, 0, 14, 0)
    assert [d.decision for d in of(events, "edit_decided")] == ["partly", "rejected"]
    assert [i.target for i in of(events, "interrupted")] == ["rewind"]
    assert (counts["tool_calls"], counts["edits"], counts["tool_errors"], counts["tool_rejections"]) == (5, 3, 1, 1)


def test_swe_agents_repeated_history_opens_one_turn_and_edits_of_each_notation_have_their_size() -> None:
    events, counts = sample("swe-agent")
    assert counts["events"] == {
        "session_started": 1, "session_ended": 1, "turn_started": 1, "completion": 6, "tool_call": 6, "tool_result": 6,
        "edit_proposed": 3, "test_run": 1,
    }  # fmt: skip
    assert counts["rejected"] == {"not_a_session_event:repeated_history": 4, "not_a_session_event:exit": 1}
    assert {event.turn_id for event in events if event.turn_id} == {of_turn(events)}
    assert [c.name for c in of(events, "tool_call")] == ["str_replace_editor"] * 3 + ["edit", "python", "submit"]
    assert [c.arguments_valid for c in of(events, "tool_call")] == [True, False, True, True, True, True]
    assert [r.result_class for r in of(events, "tool_result")] == [OK, INVALID, OK, OK, OK, OK]
    assert of(events, "tool_result")[0].duration_ms == 250.0
    removed, added = "    return int(metres * 100)", "    # nearest    return round(metres * 100)"
    assert sizes(events)[1:] == [(2, 1, len(added), len(removed)), (3, 2, len("def height(metres):    return round(100 * metres)"), 0)]
    assert {e.path_hash for e in of(events, "edit_proposed")} == {"path:/repo/tides.py"}
    assert [(t.passed_after, t.failed_after) for t in of(events, "test_run")] == [(3, 1)]
    assert of(events, "session_ended")[0].reason == "done"
    assert of(events, "edit_decided") == []


def of_turn(events: Sequence[Event]) -> str | None:
    return next(event.turn_id for event in events if event.type == "turn_started")


def test_swe_agent_ids_do_not_depend_on_the_files_time(tmp_path: Path) -> None:
    import os

    copy = tmp_path / "run" / "case" / "case.traj"
    copy.parent.mkdir(parents=True)
    copy.write_bytes((SAMPLES / FILES["swe-agent"]).read_bytes())
    os.utime(copy, (1_770_000_000, 1_770_000_000))
    first, _ = run("swe-agent", copy)
    os.utime(copy, (1_770_009_999, 1_770_009_999))
    again, _ = run("swe-agent", copy)
    assert [event.event_id for event in first] == [event.event_id for event in again]
    assert min(event.occurred_at_ms for event in first) == 1_770_000_000_000


def test_openhands_calls_of_one_response_are_one_completion_and_totals_give_the_tokens_of_the_rest() -> None:
    events, counts = sample("openhands")
    assert counts["events"] == {
        "session_started": 1, "session_ended": 1, "turn_started": 2, "completion": 6, "tool_call": 6, "tool_result": 5,
        "edit_proposed": 2, "edit_decided": 2, "interrupted": 1, "test_run": 1,
    }  # fmt: skip
    assert tokens(events) == [(1000, 50, 200), (1200, 70, 1000), (1300, 20, 1200), (1400, 20, 1200), (1400, 30, 1300), (1500, 10, 1400)]
    assert [t.message for t in of(events, "turn_started")] == [
        "Round the heights in tides.py. Token <redacted:github_token>",
        "no, sigue rojo",
    ]
    assert [t.images for t in of(events, "turn_started")] == [1, 0]
    assert [c.name for c in of(events, "tool_call")] == [
        "execute_bash", "str_replace_editor", "str_replace_editor", "execute_bash", "write", "finish",
    ]  # fmt: skip
    assert [r.result_class for r in of(events, "tool_result")] == [OK, OK, OK, ENVIRONMENT, ABORTED]
    assert [d.decision for d in of(events, "edit_decided")] == ["accepted", "rejected"]
    assert [(t.passed_after, t.failed_after) for t in of(events, "test_run")] == [(2, 1)]
    assert of(events, "session_ended")[0].reason == "done"


def test_continue_thumbs_outcomes_and_tool_use_reach_their_turns_and_tokens_their_replies() -> None:
    events, counts = sample("continue")
    assert counts["events"] == {
        "session_started": 2, "session_ended": 2, "turn_started": 2, "completion": 4, "tool_call": 3, "tool_result": 3,
        "edit_proposed": 3, "edit_decided": 3, "feedback": 1,
    }  # fmt: skip
    assert (counts["accepted"], counts["duplicates"]) == (9, 1)
    assert [t.message for t in of(events, "turn_started")] == ["round the heights in tides.py", "use metres everywhere"]
    assert tokens(events) == [(900, 40, 0), (1100, 25, 0), (0, 0, 0), (0, 0, 0)]
    thumb = next(event for event in events if event.type == "feedback")
    assert (thumb.payload.score, thumb.turn_id) == (-1.0, of_turn(events))
    assert [r.result_class for r in of(events, "tool_result")] == [OK, ABORTED, INVALID]
    assert [c.arguments_valid for c in of(events, "tool_call")] == [True, True, False]
    assert [d.decision for d in of(events, "edit_decided")] == ["accepted", "rejected", "accepted"]
    assert sizes(events)[1:] == [(2, 1, 10, 5), (2, 0, len("metres):    return"), 0)]


def test_aider_edits_are_undone_by_undo_and_by_a_git_revert_and_a_models_heading_is_no_message() -> None:
    events, counts = sample("aider")
    assert counts["events"] == {
        "session_started": 1, "session_ended": 1, "turn_started": 3, "completion": 4, "tool_call": 5, "tool_result": 4,
        "edit_proposed": 3, "edit_decided": 5, "interrupted": 1, "test_run": 1,
    }  # fmt: skip
    assert [t.message for t in of(events, "turn_started")] == [
        "round the heights in tides.py\nto the nearest centimetre", "still wrong, la prueba sigue roja", "explain",
    ]  # fmt: skip
    assert tokens(events) == [(4200, 120, 600), (3012, 80, 0), (3200, 90, 0), (0, 0, 0)]
    decided = [(d.edit_id, d.decision) for d in of(events, "edit_decided")]
    proposed = [e.edit_id for e in of(events, "edit_proposed")]
    assert [name for name, _ in decided] == [proposed[0], proposed[0], proposed[1], proposed[2], proposed[2]]
    assert [what for _, what in decided] == ["accepted", "undone", "rejected", "accepted", "undone"]
    assert sizes(events) == [(2, 1, 43, 28), (2, 0, 14, 0), (1, 1, 30, 28)]
    assert [(c.name, c.arguments_valid) for c in of(events, "tool_call")] == [
        ("edit", True), ("edit", False), ("edit", True), ("edit", True), ("shell", True),
    ]  # fmt: skip
    assert {c.model for c in of(events, "completion")} == {"anthropic/claude-sonnet-4"}
    assert [(t.passed_after, t.failed_after) for t in of(events, "test_run")] == [(3, 1)]
    assert {t.reply_delay_ms for t in of(events, "turn_started")} == {None}, "its times are not known"
    assert min(event.occurred_at_ms for event in events) // 1000 == 1_770_123_600


def test_aider_analytics_give_completions_and_say_no_for_an_undo() -> None:
    events, counts = sample("aider-analytics")
    assert counts["events"] == {"session_started": 2, "session_ended": 2, "completion": 2, "feedback": 1, "interrupted": 2}
    assert tokens(events) == [(2500, 120, 0), (3012, 80, 0)]
    assert [f.score for f in of(events, "feedback")] == [-1.0]
    assert [(i.by, i.target) for i in of(events, "interrupted")] == [("system", "completion"), ("user", "session")]
    assert [end.reason for end in of(events, "session_ended")] == ["done", "abandoned"], "a key press at the prompt stops nothing"


def test_the_table_of_formats_is_loadable_and_each_has_what_the_engine_asks_for() -> None:
    for name, known in registry.FORMATS.items():
        module = registry.load(name)
        assert callable(module.read)
        assert callable(module.Mapper)
        assert isinstance(module.VERSION, str)
        assert known.title
        assert known.files
    assert set(FILES) <= set(registry.FORMATS)
