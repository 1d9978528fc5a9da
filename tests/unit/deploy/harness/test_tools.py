"""Tools: what they do, what they refuse, and that nothing leaves the workspace."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.harness.sandbox import Bubblewrap
from deploy.harness.tools import TOOLS, Answer, Call, CallError, call_tool, check_call, locate, put_back, read_text
from pipelines.events import ResultClass

pytestmark = pytest.mark.sandbox


def use(name: str, workspace: Path, sandbox: Bubblewrap, **arguments: str) -> Answer:
    return call_tool(Call(tool_call_id="c1", name=name, arguments=json.dumps(arguments)), workspace, sandbox)


def test_a_file_is_read(workspace: Path, sandbox: Bubblewrap) -> None:
    (workspace / "a.py").write_text("A = 1\n")
    for path in ("a.py", "./a.py", "/workspace/a.py"):
        answer = use("read_file", workspace, sandbox, path=path)
        assert (answer.result_class, answer.text, answer.output_bytes, answer.invalid) == (ResultClass.OK, "A = 1\n", 6, False)


def test_a_long_file_is_cut_and_says_so(workspace: Path, sandbox: Bubblewrap) -> None:
    (workspace / "a").write_text("x" * 10_000)
    assert use("read_file", workspace, sandbox, path="a").text.endswith("cut at 8192 of 10000 bytes")


def test_an_edit_replaces_the_one_place_and_tells_what_changed(workspace: Path, sandbox: Bubblewrap) -> None:
    (workspace / "a.py").write_text("A = 1\nB = 1\n")
    answer = use("edit_file", workspace, sandbox, path="a.py", old="A = 1", new="# T-1\nA = 2")
    assert (answer.result_class, answer.text) == (ResultClass.OK, "ok")
    assert (workspace / "a.py").read_text() == "# T-1\nA = 2\nB = 1\n"
    assert answer.edit is not None
    assert (answer.edit.path, answer.edit.before, answer.edit.after) == ("a.py", "A = 1\nB = 1\n", "# T-1\nA = 2\nB = 1\n")


def test_line_endings_are_left_alone(workspace: Path, sandbox: Bubblewrap) -> None:
    (workspace / "a").write_bytes(b"a\r\nb\r\n")
    use("edit_file", workspace, sandbox, path="a", old="b", new="c")
    assert (workspace / "a").read_bytes() == b"a\r\nc\r\n"


def test_an_empty_old_makes_a_new_file_only(workspace: Path, sandbox: Bubblewrap) -> None:
    answer = use("edit_file", workspace, sandbox, path="sub/new.py", old="", new="x = 1\n")
    assert answer.edit is not None
    assert answer.edit.before is None
    assert (workspace / "sub/new.py").read_text() == "x = 1\n"
    again = use("edit_file", workspace, sandbox, path="sub/new.py", old="", new="y")
    assert (again.result_class, again.text) == (ResultClass.INVALID_ARGUMENTS, "error: old is empty; it must be there once")


@pytest.mark.parametrize(
    ("old", "text"),
    [
        ("C = 1", "error: old is not in the file; it must be there once"),
        (" = 1", "error: old is 2 times in the file; it must be there once"),
    ],
)
def test_an_old_text_that_is_not_there_once_is_the_policys_fault(old: str, text: str, workspace: Path, sandbox: Bubblewrap) -> None:
    (workspace / "a.py").write_text("A = 1\nB = 1\n")
    answer = use("edit_file", workspace, sandbox, path="a.py", old=old, new="x")
    assert (answer.result_class, answer.text, answer.invalid, answer.edit) == (ResultClass.INVALID_ARGUMENTS, text, True, None)
    assert (workspace / "a.py").read_text() == "A = 1\nB = 1\n"


def test_an_edit_that_changes_nothing_is_refused(workspace: Path, sandbox: Bubblewrap) -> None:
    (workspace / "a.py").write_text("A\n")
    assert use("edit_file", workspace, sandbox, path="a.py", old="A", new="A").result_class is ResultClass.INVALID_ARGUMENTS


def test_a_file_that_is_no_text_is_the_environments_fault(workspace: Path, sandbox: Bubblewrap) -> None:
    (workspace / "a").write_bytes(b"\xff\xfe\x00")
    answer = use("edit_file", workspace, sandbox, path="a", old="x", new="y")
    assert (answer.result_class, answer.invalid) == (ResultClass.UNEXPECTED_ENVIRONMENT, False)


@pytest.mark.parametrize(
    "path", ["../secret", "/etc/passwd", "sub/../../secret", "out", "out/secret", "outdir/secret", "/workspace/../secret", ""]
)
@pytest.mark.parametrize("tool", ["read_file", "edit_file", "grep"])
def test_no_path_leads_out_of_the_workspace(tool: str, path: str, workspace: Path, sandbox: Bubblewrap) -> None:
    (workspace.parent / "secret").write_text("token here")
    (workspace / "sub").mkdir()
    (workspace / "out").symlink_to(workspace.parent / "secret")
    (workspace / "outdir").symlink_to(workspace.parent)
    extra = {"read_file": {}, "edit_file": {"old": "token", "new": "x"}, "grep": {"pattern": "token"}}[tool]
    answer = use(tool, workspace, sandbox, path=path, **extra)
    assert "token here" not in answer.text
    if not (tool == "grep" and path == ""):
        assert answer.result_class is ResultClass.INVALID_ARGUMENTS
    assert (workspace.parent / "secret").read_text() == "token here"


def test_grep_does_not_follow_links_out(workspace: Path, sandbox: Bubblewrap) -> None:
    (workspace.parent / "secret").write_text("token here")
    (workspace / "out").symlink_to(workspace.parent / "secret")
    (workspace / "outdir").symlink_to(workspace.parent)
    (workspace / "in").write_text("a token inside")
    assert use("grep", workspace, sandbox, pattern="token").text == "in:1:a token inside\n"


def test_a_fifo_does_not_block_us(workspace: Path, sandbox: Bubblewrap) -> None:
    os.mkfifo(workspace / "pipe")
    assert use("read_file", workspace, sandbox, path="pipe").result_class is ResultClass.INVALID_ARGUMENTS
    assert use("edit_file", workspace, sandbox, path="pipe", old="a", new="b").result_class is ResultClass.INVALID_ARGUMENTS


def test_grep_finds_lines_with_their_place_and_says_when_there_is_none(workspace: Path, sandbox: Bubblewrap) -> None:
    (workspace / "a.py").write_text("one\ntwo = 2\n")
    (workspace / "b.py").write_text("two = 3\n")
    assert use("grep", workspace, sandbox, pattern="two = [23]").text == "a.py:2:two = 2\nb.py:1:two = 3\n"
    assert use("grep", workspace, sandbox, pattern="two", path="b.py").text == "b.py:1:two = 3\n"
    assert use("grep", workspace, sandbox, pattern="three").text == "no match"
    assert use("grep", workspace, sandbox, pattern="(").result_class is ResultClass.INVALID_ARGUMENTS


def test_a_command_that_fails_is_a_result_not_a_fault(workspace: Path, sandbox: Bubblewrap) -> None:
    answer = use("run_terminal", workspace, sandbox, command="echo no; exit 4")
    assert (answer.result_class, answer.text, answer.exit_code) == (ResultClass.OK, "no\nexit code 4", 4)


def test_a_command_that_takes_too_long_is_a_timeout(workspace: Path) -> None:
    from deploy.harness.sandbox import Limits

    answer = use("run_terminal", workspace, Bubblewrap(limits=Limits(wall_s=0.3)), command="sleep 30")
    assert answer.result_class is ResultClass.TIMEOUT
    assert "wall time" in answer.text


@pytest.mark.parametrize(
    ("name", "arguments", "fault", "text"),
    [
        ("fly", "{}", "unknown_tool", "error: no tool 'fly'; tools: read_file, edit_file, grep, run_terminal"),
        ("read_file", "{path: a}", "invalid_arguments", 'error: arguments are not JSON; read_file takes {"path"}'),
        ("read_file", "[]", "invalid_arguments", 'error: arguments are not an object; read_file takes {"path"}'),
        ("edit_file", '{"path": "a"}', "invalid_arguments", 'error: old is missing; edit_file takes {"old", "new", "path"}'),
        ("grep", '{"pattern": 3}', "invalid_arguments", 'error: pattern is not a string; grep takes {"pattern", "path"?}'),
        ("grep", '{"pattern": "a", "x": "b"}', "invalid_arguments", 'error: x is not an argument; grep takes {"pattern", "path"?}'),
    ],
)
def test_an_invalid_call_is_answered_in_one_helpful_line(name: str, arguments: str, fault: str, text: str) -> None:
    found, result_class, message = check_call(Call(tool_call_id="c", name=name, arguments=arguments))
    assert (found, result_class.value, message) == (None, fault, text)


def test_text_that_is_no_call_is_told_how_to_write_one(workspace: Path, sandbox: Bubblewrap) -> None:
    answer = call_tool(Call(tool_call_id="c", name="", arguments="{name: broken"), workspace, sandbox)
    assert (answer.result_class, answer.arguments_valid) == (ResultClass.INVALID_ARGUMENTS, False)
    assert '{"name": "edit_file", "arguments": {...}}' in answer.text


@given(st.sampled_from([tool["function"]["name"] for tool in TOOLS] + ["", "x"]), st.text(max_size=60))
def test_whatever_a_policy_writes_as_arguments_never_raises(name: str, arguments: str) -> None:
    found, fault, message = check_call(Call(tool_call_id="c", name=name, arguments=arguments))
    assert (found is None) == (fault is not ResultClass.OK)
    assert (found is None) == bool(message)


@given(st.dictionaries(st.sampled_from(["path", "old", "new", "x"]), st.one_of(st.text(max_size=20), st.integers(), st.none()), max_size=4))
def test_only_the_exact_string_fields_are_accepted(arguments: dict[str, object]) -> None:
    found, _, _ = check_call(Call(tool_call_id="c", name="edit_file", arguments=json.dumps(arguments)))
    texts = [value for value in arguments.values() if isinstance(value, str)]
    clean = not any("\0" in text or any("\ud800" <= char <= "\udfff" for char in text) for text in texts)
    assert (found is not None) == (set(arguments) == {"path", "old", "new"} and len(texts) == 3 and clean)


@given(st.lists(st.sampled_from(["..", ".", "a", "b", "", "/", "workspace"]), min_size=1, max_size=8))
def test_a_located_path_is_inside_or_refused(parts: list[str]) -> None:
    root = Path("/tmp/tidegate-locate")
    inside = None
    try:
        inside = locate(root, "/".join(parts))
    except CallError as error:
        fault = error.result_class
    else:
        fault = ResultClass.OK
    assert (inside is not None and inside.is_relative_to(root)) or fault is ResultClass.INVALID_ARGUMENTS


def test_putting_back_restores_text_removes_new_files_and_replaces_links(workspace: Path) -> None:
    outside = workspace.parent / "outside"
    outside.write_text("untouched")
    (workspace / "a").symlink_to(outside)
    put_back(workspace, "a", "mine")
    assert outside.read_text() == "untouched"
    assert read_text(workspace, "a") == "mine"
    put_back(workspace, "a", None)
    assert not (workspace / "a").exists()
    assert read_text(workspace, "a") == ""
