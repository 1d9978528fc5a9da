"""Edit sizes in every notation, test sums of every runner, JSON documents read piece by piece: right values, and nothing raises."""

import io
import json
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.events import Client, Event, ResultClass
from pipelines.importers import edit_sizes, records, texts
from pipelines.importers.aider_lines import confirmation, is_command, reverted, token_counts
from pipelines.importers.codex_items import is_program_text, outcome
from pipelines.importers.edit_sizes import EditSize
from pipelines.importers.sessions import Session, Stamp
from pipelines.importers.shell_results import error_class, exit_class, test_counts
from pipelines.importers.swe_agent import shell_words


def size(*numbers: int) -> EditSize:
    return EditSize(lines_added=numbers[0], lines_removed=numbers[1], chars_added=numbers[2], chars_removed=numbers[3])


def test_a_patch_counts_plus_and_minus_lines_of_each_file() -> None:
    patch = (
        "*** Begin Patch\n*** Update File: a.py\n*** Move to: b.py\n@@ def f\n-old\n+new1\n+new22\n same\n"
        "*** Delete File: c.py\n*** Add File: d\n++x\n*** End Patch"
    )
    assert edit_sizes.patch_files(patch) == [("a.py", size(2, 1, 9, 3)), ("c.py", size(0, 0, 0, 0)), ("d", size(1, 0, 2, 0))]
    assert edit_sizes.patch_files("no patch") == []


def test_a_diff_counts_inside_hunks_and_a_removed_line_that_looks_like_a_header_is_a_line() -> None:
    diff = (
        "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n--- comment\n+++ other\n same\n-b\n+c\n\\ No newline at end of file\n"
        "--- a/gone\n+++ /dev/null\n@@ -1 +0,0 @@\n-bye\n"
    )
    assert edit_sizes.diff_files(diff) == [("x", size(2, 2, 9, 11)), ("gone", size(0, 1, 0, 3))]


def test_search_replace_blocks_take_their_path_from_the_line_before() -> None:
    text = (
        "I do it:\n\n`src/a.py`\n```python\n<<<<<<< SEARCH\na\nb\n=======\na\nB\nc\n>>>>>>> REPLACE\n```\n"
        "and\n```python\n<<<<<<< SEARCH\nx\n=======\n>>>>>>> REPLACE\n"
        "<<<<<<< SEARCH\nnever ended\n"
    )
    found = edit_sizes.search_replace_blocks(text)
    assert found[0] == ("src/a.py", size(2, 1, 2, 1))
    assert [each for _, each in found] == [size(2, 1, 2, 1), size(0, 1, 0, 1)]


def test_fenced_whole_files_and_loose_diffs_are_edits_and_commands_are_not() -> None:
    text = "new.py\n```python\na\nbc\n```\n\n```diff\n--- a/o.py\n+++ b/o.py\n@@ ... @@\n-x\n+yy\n```\n\nRun this:\n```bash\nls\n```\n"
    assert edit_sizes.fenced_edits(text) == [("new.py", size(2, 0, 3, 0)), ("o.py", size(1, 1, 2, 1))]


@given(old=st.text("ab\n", max_size=12), new=st.text("ab\n", max_size=12))
def test_a_replacement_is_the_whole_but_for_common_ends(old: str, new: str) -> None:
    found = edit_sizes.replaced(old, new)
    assert found.lines_added - found.lines_removed == len(new.splitlines()) - len(old.splitlines())
    assert found.chars_added - found.chars_removed == len("".join(new.splitlines())) - len("".join(old.splitlines()))
    assert (found == EditSize()) == (old.splitlines() == new.splitlines())
    assert edit_sizes.replaced(None, 7) == EditSize()


@pytest.mark.parametrize(
    ("output", "passed", "failed"),
    [
        ("====== 2 failed, 10 passed, 1 skipped in 3.21s ======", 10, 2),
        ("1 failed, 3 passed, 1 error in 0.12s", 3, 2),
        ("\x1b[32m5 passed\x1b[0m in 0.01s", 5, 0),
        ("Ran 7 tests in 0.002s\n\nOK\n", 7, 0),
        ("Ran 7 tests in 0.002s\n\nFAILED (failures=1, errors=2, skipped=1)\n", 3, 3),
        ("Tests:       1 failed, 2 skipped, 8 passed, 11 total\nTime: 1 s", 8, 1),
        (" Tests  3 failed | 12 passed (15)\n", 12, 3),
        ("test result: ok. 4 passed; 0 failed; 0 ignored\n...\ntest result: FAILED. 1 passed; 2 failed; 0 ignored", 5, 2),
        ("  5 passing (12ms)\n  1 failing\n", 5, 1),
        ("Tests run: 9, Failures: 1, Errors: 1, Skipped: 2", 5, 2),
        ("--- PASS: TestA (0.00s)\n--- FAIL: TestB (0.00s)\nFAIL\n", 1, 1),
    ],
)
def test_a_test_sum_is_read(output: str, passed: int, failed: int) -> None:
    found = test_counts(output)
    assert found is not None
    assert (found.passed, found.failed) == (passed, failed)


@pytest.mark.parametrize("output", ["", "3 passed the exam", "all tests passed", "5 errors in 2 files", "def test(): pass"])
def test_no_test_sum_is_read_where_there_is_none(output: str) -> None:
    assert test_counts(output) is None


def test_a_codex_output_is_read_as_json_as_text_with_a_heading_and_as_blocks() -> None:
    as_json = outcome(json.dumps({"output": "boom", "metadata": {"exit_code": 2, "duration_seconds": 0.5}}))
    assert (as_json.verdict, as_json.exit_code, as_json.duration_ms, as_json.text) == (ResultClass.UNEXPECTED_ENVIRONMENT, 2, 500.0, "boom")
    as_text = outcome("Exit code: 0\nWall time: 1.25 seconds\nOutput:\nExit code: 9\n")
    assert (as_text.verdict, as_text.exit_code, as_text.duration_ms, as_text.text) == (ResultClass.OK, 0, 1250.0, "Exit code: 9\n")
    assert outcome([{"type": "input_text", "text": "fine"}]).verdict is ResultClass.OK
    assert outcome({"content": "no such file", "success": False}).verdict is ResultClass.UNEXPECTED_ENVIRONMENT
    assert outcome("unsupported call: frobnicate").verdict is ResultClass.UNKNOWN_TOOL
    assert outcome('{"not": "ours"}').text == '{"not": "ours"}'
    assert outcome(None).text == ""


def test_texts_of_the_program_are_told_from_a_persons() -> None:
    assert is_program_text("<environment_context>\n<cwd>/x</cwd>\n</environment_context>")
    assert is_program_text("# AGENTS.md instructions for /x\n")
    assert not is_program_text("<div> is not closed in index.html")
    assert not is_program_text("fix the bug")


def test_exit_codes_and_error_texts_have_their_class() -> None:
    assert [exit_class(code, "") for code in (0, None, 1, 124, 130)] == [
        ResultClass.OK, ResultClass.OK, ResultClass.UNEXPECTED_ENVIRONMENT, ResultClass.TIMEOUT, ResultClass.USER_ABORTED,
    ]  # fmt: skip
    assert error_class("Tool call rejected by user") is ResultClass.USER_ABORTED
    assert error_class("params must have required property 'path'") is ResultClass.INVALID_ARGUMENTS
    assert error_class("429 rate limit") is ResultClass.PROVIDER_ERROR


def test_aider_lines_say_what_they_mean() -> None:
    assert token_counts("Tokens: 12k sent, 1,234 received.") == (12_000, 1_234, 0)
    assert token_counts("Tokens: many sent") is None
    assert [is_command(text) for text in ("/add x", "!ls", "/ask why?", "/ask", "why", "/code do")] == [
        True,
        True,
        False,
        True,
        False,
        False,
    ]
    assert [confirmation(text) for text in ("Add file? (Y)es/(N)o [Yes]: n", "(Y)es/(N)o/(D)on't ask again [Yes]: a", "yes")] == [
        False,
        True,
        None,
    ]
    assert reverted("/git revert HEAD", ["aaaaaa1", "bbbbbb2"]) == 1
    assert reverted("/git revert bbbbbb2", ["aaaaaa1", "bbbbbb2"]) == 1
    assert reverted("/git revert aaaaaa1", ["aaaaaa1", "bbbbbb2"]) == 0
    assert reverted("/run git reset --hard HEAD~2", ["aaaaaa1", "bbbbbb2"]) == 2
    assert reverted("/git reset --hard HEAD^", ["aaaaaa1"]) == 1
    assert reverted("/git reset HEAD~1", ["aaaaaa1"]) == 0
    assert reverted("/git status", ["aaaaaa1"]) == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(
    entries=st.lists(st.dictionaries(st.text(max_size=3), JSON, max_size=3), max_size=5),
    other=JSON,
    indent=st.sampled_from([None, 2]),
    block=st.integers(1, 7),
)
def test_a_document_read_in_pieces_is_the_document(entries: list[dict[str, object]], other: object, indent: int | None, block: int) -> None:
    raw = json.dumps({"a": other, "messages": entries, "b": 1}, indent=indent).encode()

    class Slow(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(size or block, block))

    seen: list[int] = []
    found = list(records.json_document(Slow(raw), seen.append, lists=("messages",)))
    assert [record.value for record in found if record.key == "messages"] == entries
    assert {record.key: record.value for record in found if not record.counted} == {"a": other, "b": 1}
    assert sum(seen) == len(raw)


@given(raw=st.binary(max_size=60), cut=st.integers(0, 60))
def test_hostile_bytes_never_raise_and_a_fault_is_a_record(raw: bytes, cut: int) -> None:
    whole = b'{"messages": [{"id": "a"}, {"id": "b"}], "x": [1, 2.5e3, true]}'
    for data in (raw, whole[:cut] + raw):
        for found in (
            list(records.json_document(io.BytesIO(data), lambda _n: None, lists=("messages",))),
            list(records.json_values(io.BytesIO(data), lambda _n: None)),
            list(records.json_lines(io.BytesIO(data), lambda _n: None)),
        ):
            assert all((record.value is None) == (record.fault is not None) for record in found if record.counted)


def test_a_cut_document_gives_what_is_whole_and_says_that_it_was_cut() -> None:
    raw = b'{"messages": [{"id": "a"}, {"id": "b'
    found = list(records.json_document(io.BytesIO(raw), lambda _n: None, lists=("messages",)))
    assert [(record.value, record.fault) for record in found] == [({"id": "a"}, None), (None, "truncated_document")]
    broken = list(records.json_document(io.BytesIO(b'{"messages": [{"id": "a"} {"id": "b"}]}'), lambda _n: None, lists=("messages",)))
    assert [record.fault for record in broken] == [None, "malformed_json"]


def test_numbers_and_times_that_are_none_are_none() -> None:
    assert [texts.count(value) for value in (3, 2.9, -1, True, "3", float("nan"), float("inf"), 2**40)] == [3, 2, 0, 0, 0, 0, 0, 0]
    assert [texts.milliseconds(value, unit_ms=1000) for value in (0.5, -1, float("nan"), None)] == [500.0, None, None, None]
    assert texts.time_ms("2026-02-03T09:00:00") == texts.time_ms("2026-02-03T09:00:00Z") == 1_770_109_200_000
    assert texts.identifier("half \ud83d" + "x" * 200, "d") == ("half ?" + "x" * 200)[:120]


KEY = "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\n"


@settings(max_examples=20, deadline=None)
@given(at=st.integers(19_900, 21_100), fill=st.sampled_from(["word ", KEY]))
def test_a_secret_at_the_edge_of_what_is_kept_of_a_long_message_does_not_stay_in_part(at: int, fill: str) -> None:
    secret = "ghp_" + "abcdefghijklmnopqrstuvwxyz0123456789" * 2
    text = (fill * (at // len(fill) + 1))[:at] + " " + secret + " tail" * 900
    out: list[Event] = []
    stamp = Stamp(user_key="u", consent="train", keep_text=True, client=Client(name="i"), keyed=lambda kind, raw: kind + raw)
    Session(stamp, "s", out=out).turn("t", 0, text)
    kept = next(event.payload.message for event in out if event.type == "turn_started")
    assert kept is not None
    assert len(kept) <= 20_000
    assert "ghp_" not in kept


@settings(deadline=None)
@given(text=st.text("ab \n'\"\\", max_size=14) | st.lists(st.text(max_size=5), max_size=4).map(shlex.join))
def test_a_command_is_split_into_the_words_that_the_standard_library_sees(text: str) -> None:
    try:
        expected: list[str] | None = shlex.split(text)
    except ValueError:
        expected = None
    assert shell_words(text) == expected


def test_a_text_with_half_a_character_is_parsed() -> None:
    assert records.parse('{"a": "\ud83d"}') == {"a": "?"}
    assert records.parse("\ud83d") is records.BAD
    assert records.parse(b'{"a": "\\ud83d"}') == {"a": "\ud83d"}
