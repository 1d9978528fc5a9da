"""What one transcript line means, and that every line is accounted for whatever is in it."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import codec
from pipelines.events import Client, Event, ResultClass
from pipelines.importers import claude_code, engine
from pipelines.importers.claude_code import SAMPLE
from pipelines.importers.claude_text import edit_size, person_text, result_class, user_text_kind
from pipelines.importers.sessions import Stamp
from pipelines.importers.texts import stable_id, time_ms

STAMP = Stamp(user_key="u", consent="measure", keep_text=True, client=Client(name="import"), keyed=lambda kind, raw: f"{kind}-{len(raw)}")


def new_importer(stamp: Stamp = STAMP) -> engine.Importer:
    return engine.Importer(claude_code.read, claude_code.Mapper(stamp))


def find_files(paths: list[Path]) -> list[Path]:
    return engine.find_files(paths, names=("*.jsonl",), where="there", order=claude_code.order)


def imported(*files: Path, stamp: Stamp = STAMP) -> tuple[list[Event], dict[str, Any]]:
    importer = new_importer(stamp)
    events = list(importer.events(files))
    return events, importer.counts.as_dict()


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def line(kind: str, uuid: str, content: Any, second: int = 0, **extra: Any) -> dict[str, Any]:
    message = {"role": kind, "content": content} | extra.pop("message", {})
    stamp = f"2026-02-03T09:00:{second:02d}.000Z"
    return {"type": kind, "uuid": uuid, "sessionId": "s", "timestamp": stamp, "isSidechain": False, "message": message} | extra


def counted_again(files: list[Path]) -> Counter[str]:
    """An own count, written without looking at the importer's code paths: line by line, block by block."""
    totals: Counter[str] = Counter()
    seen = set()
    for path in files:
        for raw in path.read_bytes().split(b"\n"):
            if raw.strip() == b"":
                continue
            totals["lines"] += 1
            try:
                entry = json.loads(raw)
            except ValueError:
                totals["bad"] += 1
                continue
            if entry.get("uuid") in seen:
                totals["duplicates"] += 1
                continue
            seen.add(entry.get("uuid") or object())
            content = (entry.get("message") or {}).get("content")
            if isinstance(content, str) and entry["type"] == "user" and not entry.get("isMeta"):
                totals["user_messages"] += 1
            for block in content if isinstance(content, list) else []:
                if block["type"] == "tool_use":
                    totals["tool_calls"] += 1
                    totals["edits"] += block["name"] in ("Edit", "Write", "MultiEdit", "NotebookEdit")
                if block["type"] == "tool_result" and block.get("is_error"):
                    totals["tool_errors"] += 1
                    totals["tool_rejections"] += "doesn't want to" in str(block["content"])
                if block["type"] == "text" and "[Request interrupted by user" in block["text"]:
                    totals["interrupts"] += 1
    return totals


def test_the_packaged_sample_gives_the_events_counted_by_hand() -> None:
    events, counts = imported(SAMPLE)
    assert counts["events"] == {
        "session_started": 1, "session_ended": 1, "turn_started": 5, "completion": 12, "tool_call": 9, "tool_result": 9,
        "edit_proposed": 4, "edit_decided": 3, "interrupted": 1,
    }  # fmt: skip
    assert [e.payload.message for e in events if e.type == "turn_started"] == [
        "The heights in tides.py are rounded down. Please round to the nearest centimetre. The station key is in .env as "
        "STATION_KEY=<redacted:high_entropy>",
        "das geht immer noch nicht, die Tests schlagen fehl:\nTraceback (most recent call last):\n"
        '  File "test_tides.py", line 4, in <module>\nAssertionError: 0 != 1',
        "It must look like this screenshot. Mail me at <redacted:email> if unclear.",
        "/review table.py",
        "merci, ça marche maintenant",
    ]
    turns = [e.payload for e in events if e.type == "turn_started"]
    assert [t.language for t in turns] == ["en", "de", "en", None, "fr"]
    assert [t.stack_traces for t in turns] == [0, 1, 0, 0, 0]
    assert [t.images for t in turns] == [0, 0, 1, 0, 0]
    assert [e.payload.decision for e in events if e.type == "edit_decided"] == ["accepted", "rejected", "accepted"]
    classes = Counter(e.payload.result_class for e in events if e.type == "tool_result")
    assert classes == {
        ResultClass.OK: 6,
        ResultClass.INVALID_ARGUMENTS: 1,
        ResultClass.UNEXPECTED_ENVIRONMENT: 1,
        ResultClass.USER_ABORTED: 1,
    }


def test_the_sample_agrees_with_an_independent_count_and_its_lines_add_up() -> None:
    _, counts = imported(SAMPLE)
    again = counted_again([SAMPLE])
    for name in ("lines", "duplicates", "user_messages", "tool_calls", "edits", "tool_errors", "tool_rejections", "interrupts"):
        assert counts[name] == again[name], name
    assert counts["lines"] == counts["accepted"] + counts["duplicates"] + sum(counts["rejected"].values()) == 43


def test_every_imported_event_is_sound_says_imported_and_that_it_cannot_be_trained_on() -> None:
    events, _ = imported(SAMPLE)
    for event in events:
        assert codec.decode(codec.encode(event), 1_000_000, key=event.session_id) == event
        assert event.origin == "imported"
        assert event.policy_version is None
    assert {e.payload.capture_error for e in events if e.type == "completion"} == {"no_token_ids"}
    assert len({event.event_id for event in events}) == len(events)


def test_importing_again_gives_the_same_bytes() -> None:
    assert [codec.encode(e) for e in imported(SAMPLE)[0]] == [codec.encode(e) for e in imported(SAMPLE)[0]]


def test_a_message_that_spans_lines_is_one_completion_with_its_final_token_counts(tmp_path: Path) -> None:
    def part(number: int, output: int) -> dict[str, Any]:
        usage = {"input_tokens": 10, "cache_creation_input_tokens": 200, "cache_read_input_tokens": 3_000, "output_tokens": output}
        extra = {"id": "msg_1", "model": "m", "usage": usage, "stop_reason": "tool_use" if output > 1 else None}
        return line("assistant", f"a{number}", [{"type": "text", "text": "x"}], number, message=extra)

    result = line("user", "r", [{"type": "tool_result", "tool_use_id": "k", "content": "ok"}], 2)
    events, counts = imported(write(tmp_path / "s.jsonl", part(1, 1), result, part(3, 77)))
    (completion,) = [e for e in events if e.type == "completion"]
    assert (completion.payload.prompt_tokens, completion.payload.cached_tokens, completion.payload.response_tokens) == (3_210, 3_000, 77)
    assert completion.payload.finish_reason == "tool_calls"
    assert counts["accepted"] == 3


def test_a_resumed_session_repeats_lines_in_another_file_and_its_new_lines_join_the_right_turn(tmp_path: Path) -> None:
    first = [line("user", "u1", "fix the bug please", 1), line("assistant", "a1", [{"type": "text", "text": "x"}], 2, message={"id": "m1"})]
    new = line("assistant", "a2", [{"type": "tool_use", "id": "k", "name": "Bash", "input": {}}], 3, message={"id": "m2"})
    one = write(tmp_path / "a.jsonl", *first)
    two = write(tmp_path / "b.jsonl", *first, new)
    events, counts = imported(one, two)
    assert (counts["lines"], counts["duplicates"], counts["accepted"]) == (5, 2, 3)
    assert counts["events"]["turn_started"] == 1
    assert counts["events"]["completion"] == 2
    (call,) = [e for e in events if e.type == "tool_call"]
    assert call.turn_id == "u1"
    assert [e.payload.step for e in events if e.type == "completion"] == [0, 1]


def test_a_subagents_file_joins_the_turn_that_was_open_at_its_time(tmp_path: Path) -> None:
    main = write(tmp_path / "z.jsonl", line("user", "u1", "first question here", 1), line("user", "u2", "second question here", 20))
    call = [{"type": "tool_use", "id": "k", "name": "Read", "input": {}}]
    side = write(tmp_path / "agent-1.jsonl", line("assistant", "x", call, 10, isSidechain=True, message={"id": "m"}))
    events, _ = imported(*find_files([tmp_path]))
    assert find_files([tmp_path]) == [main, side]
    assert [e.turn_id for e in events if e.type == "tool_call"] == ["u1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The user doesn't want to proceed with this tool use.", ResultClass.USER_ABORTED),
        ("<tool_use_error>Error: No such tool available: Foo</tool_use_error>", ResultClass.UNKNOWN_TOOL),
        ("<tool_use_error>InputValidationError: path missing</tool_use_error>", ResultClass.INVALID_ARGUMENTS),
        ("File has not been read yet. Read it first before writing to it.", ResultClass.INVALID_ARGUMENTS),
        ("<tool_use_error>File has been modified since read</tool_use_error>", ResultClass.UNEXPECTED_ENVIRONMENT),
        ("Command timed out after 2m 0.0s", ResultClass.TIMEOUT),
        ("API Error: 529 overloaded", ResultClass.PROVIDER_ERROR),
        ("\x1b[31mExit code 1\x1b[0m", ResultClass.UNEXPECTED_ENVIRONMENT),
        ("", ResultClass.UNEXPECTED_ENVIRONMENT),
    ],
)
def test_an_error_text_gives_its_class(text: str, expected: ResultClass) -> None:
    assert result_class(text) is expected


@pytest.mark.parametrize(
    ("entry", "text", "kind"),
    [
        ({}, "fix it", None),
        ({"isMeta": True}, "fix it", "meta"),
        ({"isSidechain": True}, "fix it", "sidechain_prompt"),
        ({"isCompactSummary": True}, "Summary", "compaction_summary"),
        ({}, "This session is being continued from a previous conversation that", "compaction_summary"),
        ({}, "<local-command-stdout>ok</local-command-stdout>", "program_text"),
        ({}, "<command-name>/clear</command-name>", "local_command"),
        ({}, "<command-message>x</command-message>\n<command-name>/my-own:prompt</command-name>", None),
        ({}, "  \n", "empty_message"),
    ],
)
def test_only_a_persons_words_open_a_turn(entry: dict[str, Any], text: str, kind: str | None) -> None:
    assert user_text_kind(entry, text) == kind


def test_terminal_colours_leave_the_text_and_a_prompt_command_reads_as_typed() -> None:
    assert person_text("\x1b[31mred\x1b[0m") == "red"
    assert person_text("<command-name>/fix</command-name><command-args> a b </command-args>") == "/fix a b"


def test_edit_sizes_leave_common_lines_out() -> None:
    size = edit_size("Edit", {"old_string": "a\nb\nc", "new_string": "a\nBB\nX\nc"})
    assert (size.lines_added, size.lines_removed, size.chars_added, size.chars_removed) == (2, 1, 3, 1)
    size = edit_size("MultiEdit", {"edits": [{"old_string": "x", "new_string": "x\ny"}, {"old_string": "q", "new_string": ""}, 7]})
    assert (size.lines_added, size.lines_removed) == (1, 1)
    assert edit_size("Write", {"content": "1\n2\n"}).lines_added == 2
    assert edit_size("NotebookEdit", {"new_source": "z"}).chars_added == 1
    assert edit_size("Edit", {}).lines_added == 0


def test_ids_are_uuid7_shaped_depend_on_the_seed_and_sort_by_time() -> None:
    one = stable_id("a", 1_000, space="s")
    assert one == stable_id("a", 1_000, space="s") != stable_id("b", 1_000, space="s")
    assert one != stable_id("a", 1_000, space="t")
    assert (one[14], one[19] in "89ab") == ("7", True)
    assert stable_id("z", 1_000, space="s") < stable_id("a", 2_000, space="s")


def test_times_are_utc_milliseconds_or_none() -> None:
    assert time_ms("1970-01-01T00:00:01.500Z") == 1_500
    assert time_ms("1970-01-01T01:00:00+01:00") == 0
    assert [time_ms(value) for value in ("soon", None, 7)] == [None, None, None]


def test_without_consent_no_text_is_kept_but_its_features_are(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", line("user", "u1", "das geht noch nicht"))
    stamp = Stamp(user_key="u", consent="none", keep_text=True, client=Client(name="i"), keyed=STAMP.keyed)
    (turn,) = [e for e in imported(path, stamp=stamp)[0] if e.type == "turn_started"]
    assert (turn.payload.message, turn.payload.message_chars, turn.payload.language) == (None, 19, "de")


def test_damaged_lines_are_counted_shown_by_place_and_stop_nothing(tmp_path: Path) -> None:
    good = json.dumps(line("user", "u1", "hello there friend"))
    surrogate = '{"type":"user","uuid":"u2","sessionId":"s","timestamp":"2026-02-03T09:00:00Z","message":{"content":"half \\ud83d emoji"}}'
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"\n".join([b"{not json", b"[1, 2]", b"\xff\xfe\x00", b"", surrogate.encode(), good.encode(), good[:40].encode()]))
    importer = new_importer()
    events = list(importer.events([path]))
    counts = importer.counts.as_dict()
    assert counts["rejected"] == {"malformed_json": 2, "not_an_object": 1, "truncated_last_line": 1}
    assert (counts["lines"], counts["accepted"]) == (6, 2)
    assert importer.counts.faults == [
        f"{path}:1: malformed_json", f"{path}:2: not_an_object", f"{path}:3: malformed_json", f"{path}:7: truncated_last_line",
    ]  # fmt: skip
    assert [e.payload.message for e in events if e.type == "turn_started"] == ["half ? emoji", "hello there friend"]


BLOCKS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["text", "tool_use", "tool_result", "image", "thinking", 7]),
        "text": st.text(max_size=9) | st.just("[Request interrupted by user]") | st.none(),
        "id": st.sampled_from(["k1", "k2", "", 3]),
        "tool_use_id": st.sampled_from(["k1", "k2", None]),
        "name": st.sampled_from(["Edit", "Write", "Bash", "", None, 5]),
        "input": st.none()
        | st.text(max_size=3)
        | st.dictionaries(st.sampled_from(["file_path", "old_string", "edits"]), st.none() | st.text(max_size=5)),
        "is_error": st.booleans() | st.none(),
        "content": st.none() | st.text(max_size=9) | st.just("The user doesn't want to"),
    },
)
LINES = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["user", "assistant", "summary", "system", "", None, 4]),
        "uuid": st.sampled_from(["a", "b", "c", "d", None, 9]),
        "timestamp": st.sampled_from(["2026-02-03T09:00:00Z", "2026-02-03T09:00:09Z", "never", None]),
        "sessionId": st.sampled_from(["s1", "s2", "", None, 1]),
        "isSidechain": st.booleans(),
        "isMeta": st.booleans(),
        "message": st.none() | st.text(max_size=3) | st.fixed_dictionaries(
            {}, optional={
                "content": st.none() | st.text(max_size=9) | st.lists(BLOCKS | st.none() | st.text(max_size=3), max_size=3),
                "id": st.sampled_from(["m1", "m2", None, 8]),
                "model": st.sampled_from(["m", "<synthetic>", None, 2]),
                "usage": st.none() | st.dictionaries(st.sampled_from(["input_tokens", "output_tokens"]), st.integers(0, 9) | st.none()),
                "stop_reason": st.sampled_from(["end_turn", None, 1]),
            },
        ),
        "toolUseResult": st.none() | st.text(max_size=3) | st.dictionaries(st.just("durationMs"), st.integers(-1, 5) | st.text(max_size=1)),
    },
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(lines=st.lists(LINES.map(json.dumps) | st.text(max_size=12).map(lambda t: t.replace("\n", " ").replace("\r", " ")), max_size=12))
def test_whatever_a_transcript_holds_every_line_is_accounted_for_once(lines: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="")
    events, counts = imported(path)
    assert counts["lines"] == sum(bool(text.encode().strip()) for text in lines)
    assert counts["lines"] == counts["accepted"] + counts["duplicates"] + sum(counts["rejected"].values())
    assert "unmappable" not in counts["rejected"]
    assert sum(counts["events"].values()) == len(events)
    assert len({event.event_id for event in events}) == len(events)
    assert counts["tool_calls"] >= counts["events"].get("tool_call", 0)
    for event in events:
        assert codec.decode(codec.encode(event), 1_000_000) == event
