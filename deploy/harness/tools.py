"""The tools that a policy may call, the same for live sessions, simulation and benchmark.

Takes: a call as the policy wrote it, a workspace folder, a sandbox. Gives: an `Answer` for the policy with its result class;
a call that cannot be carried out is answered in one helpful line and never dropped. `invalid_arguments` is everything the
policy could have known better: no JSON, fields that do not fit the schema, a path outside the workspace, a file or an old text that is not
there. `unexpected_environment` is what it could not know: a file that cannot be read or written.

Files are touched only inside the workspace: paths are resolved with every symlink before use, and only regular files are
opened (a FIFO left by a command would block us). No command runs while a tool does: its processes died with it.
Leaves out: the agent loop, events, and parsing of the policy's text (the gateway does that).
"""

import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from deploy.harness.edits import Edit
from deploy.harness.sandbox import WORKSPACE, Sandbox
from pipelines.events import ResultClass

READ_BYTES: Final = 8_192
"""Of a file, what the policy gets to see at once."""
MAX_FILE_BYTES: Final = 1_000_000
"""Larger files are not edited."""
MAX_ARGUMENT_CHARS: Final = 30_000
"""Of one argument; Linux takes at most 128 KiB for one word of a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call as the policy wrote it."""

    tool_call_id: str
    name: str
    """"" when the policy's text did not even hold a name."""
    arguments: str
    """JSON text, or whatever the policy wrote in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a tool gave back."""

    result_class: ResultClass
    text: str
    """Shown to the policy."""
    arguments_valid: bool = True
    """The tool is known and the arguments fit its schema."""
    exit_code: int | None = None
    output_bytes: int = 0
    duration_ms: float = 0.0
    edit: Edit | None = None

    @property
    def invalid(self) -> bool:
        """Whether the call failed by the policy's own doing."""
        return self.result_class in (ResultClass.UNKNOWN_TOOL, ResultClass.INVALID_ARGUMENTS)


def _tool(name: str, description: str, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    parameters = {"properties": {field: {} for field in (*required, *optional)}, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS: Final[tuple[dict[str, Any], ...]] = (
    _tool("read_file", "Show a file", ("path",)),
    _tool("edit_file", "Replace old by new, once", ("old", "new", "path")),
    _tool("grep", "Search a regex", ("pattern",), ("path",)),
    _tool("run_terminal", "Run a shell command", ("command",)),
)
"""In OpenAI's form. All arguments are strings; the schemas leave that and "type": "object" out, because a small policy pays for every
token of its prompt (223 tokens of system message instead of 282). `check_call` enforces it. edit_file ends with the path: as the
first argument, as in read_file, a small policy closed the call right after it (15 of 51 first calls after 128 demonstrations)."""


KINDS: Final[dict[str, Literal["read", "search", "edit", "run"]]] = {
    "read_file": "read",
    "edit_file": "edit",
    "grep": "search",
    "run_terminal": "run",
}
"""What each tool does, as events say it."""


class CallError(Exception):
    """A call that cannot be carried out, on its way to becoming an Answer."""

    def __init__(self, result_class: ResultClass, text: str) -> None:
        super().__init__(text)
        self.result_class = result_class
        self.text = text


def _invalid(text: str) -> CallError:
    return CallError(ResultClass.INVALID_ARGUMENTS, text)


def check_call(call: Call) -> tuple[dict[str, str] | None, ResultClass, str]:
    """Check a call against the schemas.

    Returns:
        (arguments, OK, "") or (None, the class of the fault, one line that tells the policy how to do better).
    """
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    if call.name not in schemas:
        form = '{"name": "edit_file", "arguments": {...}}'
        what = f"no tool {call.name!r}" if call.name else f"not a tool call; write {form}"
        fault = ResultClass.UNKNOWN_TOOL if call.name else ResultClass.INVALID_ARGUMENTS
        return None, fault, f"error: {what}; tools: {', '.join(schemas)}"
    schema = schemas[call.name]
    expected = ", ".join(f'"{field}"' + ("" if field in schema["required"] else "?") for field in schema["properties"])
    try:
        arguments = json.loads(call.arguments)
    except (json.JSONDecodeError, RecursionError):
        return None, ResultClass.INVALID_ARGUMENTS, f"error: arguments are not JSON; {call.name} takes {{{expected}}}"
    fault = _schema_fault(arguments, schema)
    if fault:
        return None, ResultClass.INVALID_ARGUMENTS, f"error: {fault}; {call.name} takes {{{expected}}}"
    return arguments, ResultClass.OK, ""


def _schema_fault(arguments: Any, schema: Mapping[str, Any]) -> str:
    if not isinstance(arguments, dict):
        return "arguments are not an object"
    for field in schema["required"]:
        if field not in arguments:
            return f"{field} is missing"
    for field, value in arguments.items():
        if field not in schema["properties"]:
            return f"{field} is not an argument"
        if not isinstance(value, str):
            return f"{field} is not a string"
        if len(value) > MAX_ARGUMENT_CHARS:
            return f"{field} is too long"
        if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
            return f"{field} holds characters that no file or command can take"
    return ""


def locate(workspace: Path, path: str) -> Path:
    """Resolve a policy's path inside the workspace.

    Raises:
        CallError: It is empty, or leaves the workspace (by .., an absolute path or a symlink).
    """
    inside = path.removeprefix(WORKSPACE).lstrip("/") if path == WORKSPACE or path.startswith(WORKSPACE + "/") else path
    if not inside and path != WORKSPACE:
        raise _invalid("error: path is empty")
    try:
        target = (workspace / inside).resolve()
    except (OSError, RuntimeError) as error:
        raise _invalid(f"error: {path} is not a path") from error
    if not target.is_relative_to(workspace.resolve()):
        raise _invalid(f"error: {path} is outside the workspace")
    return target


def _open_regular(target: Path, path: str) -> tuple[bytes, int]:
    """Read at most MAX_FILE_BYTES of a regular file without following a link or waiting for a FIFO."""
    try:
        descriptor = os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _invalid(f"error: no file {path}") from error
    except OSError as error:
        raise CallError(ResultClass.UNEXPECTED_ENVIRONMENT, f"error: cannot read {path}: {os.strerror(error.errno or 0)}") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _invalid(f"error: {path} is not a file")
        return file.read(MAX_FILE_BYTES), status.st_size


def _read_file(arguments: Mapping[str, str], workspace: Path, _sandbox: Sandbox) -> Answer:
    path = arguments["path"]
    data, length = _open_regular(locate(workspace, path), path)
    text = data[:READ_BYTES].decode("utf-8", errors="replace")
    if length > READ_BYTES:
        text += f"\n... cut at {READ_BYTES} of {length} bytes"
    return Answer(result_class=ResultClass.OK, text=text, output_bytes=length)


def _edit_file(arguments: Mapping[str, str], workspace: Path, _sandbox: Sandbox) -> Answer:
    path, old, new = arguments["path"], arguments["old"], arguments["new"]
    target = locate(workspace, path)
    if old == new:
        raise _invalid("error: old and new are the same")
    before: str | None = None
    if old == "" and not target.exists():
        after = new
    else:
        data, length = _open_regular(target, path)
        if length > MAX_FILE_BYTES:
            raise CallError(ResultClass.UNEXPECTED_ENVIRONMENT, f"error: {path} is too large to edit ({length} bytes)")
        try:
            before = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CallError(ResultClass.UNEXPECTED_ENVIRONMENT, f"error: {path} is not UTF-8 text") from error
        count = before.count(old) if old else 0
        if count != 1:
            found = "is empty" if not old else "is not in the file" if count == 0 else f"is {count} times in the file"
            raise _invalid(f"error: old {found}; it must be there once")
        after = before.replace(old, new, 1)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(target, after)
    except OSError as error:
        raise CallError(ResultClass.UNEXPECTED_ENVIRONMENT, f"error: cannot write {path}: {os.strerror(error.errno or 0)}") from error
    name = target.relative_to(workspace.resolve()).as_posix()
    return Answer(result_class=ResultClass.OK, text="ok", output_bytes=2, edit=Edit(path=name, before=before, after=after))


def _write(target: Path, text: str) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
        file.write(text)


def put_back(workspace: Path, path: str, text: str | None) -> None:
    """Give a workspace file the text it had before; None: it did not exist. Whatever stands in its place is removed first."""
    target = workspace / path
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    elif target.is_symlink() or target.exists():
        target.unlink()
    if text is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(target, text)


def read_text(workspace: Path, path: str) -> str:
    """Return a workspace file's text as it is now, "" when it is gone or not readable."""
    try:
        return _open_regular(locate(workspace, path), path)[0].decode("utf-8", errors="replace")
    except CallError:
        return ""


def _grep(arguments: Mapping[str, str], workspace: Path, sandbox: Sandbox) -> Answer:
    """Search inside the sandbox, so that neither a symlink nor a regular expression that never ends can hurt us."""
    target = locate(workspace, arguments.get("path") or ".")
    if not target.exists():
        raise _invalid(f"error: no file {arguments.get('path')}")
    place = target.relative_to(workspace.resolve()).as_posix()
    search = ["rg", "--no-config", "--no-heading", "--sort", "path", "-nH"] if shutil.which("rg") == "/usr/bin/rg" else ["grep", "-rnHIE"]
    finished = sandbox.run([*search, "-e", arguments["pattern"], "--", place], workspace)
    if finished.stopped:
        return Answer(result_class=ResultClass.TIMEOUT, text="error: the search took too long", output_bytes=finished.output_bytes)
    if finished.exit_code == 1:
        return Answer(result_class=ResultClass.OK, text="no match", exit_code=1)
    if finished.exit_code != 0:
        raise _invalid(f"error: {finished.output.strip()[:200]}")
    text = re.sub(r"^\./", "", finished.output, flags=re.MULTILINE)
    return Answer(result_class=ResultClass.OK, text=text, exit_code=0, output_bytes=finished.output_bytes)


def _run_terminal(arguments: Mapping[str, str], workspace: Path, sandbox: Sandbox) -> Answer:
    finished = sandbox.run(["sh", "-c", arguments["command"]], workspace)
    if finished.stopped:
        text = f"{finished.output}error: stopped, it passed its limit of {finished.stopped.replace('_', ' ')}"
        return Answer(result_class=ResultClass.TIMEOUT, text=text, exit_code=finished.exit_code, output_bytes=finished.output_bytes)
    text = finished.output if finished.exit_code == 0 else f"{finished.output}exit code {finished.exit_code}"
    return Answer(result_class=ResultClass.OK, text=text or "ok", exit_code=finished.exit_code, output_bytes=finished.output_bytes)


_RUN: Final[dict[str, Callable[[Mapping[str, str], Path, Sandbox], Answer]]] = {
    "read_file": _read_file,
    "edit_file": _edit_file,
    "grep": _grep,
    "run_terminal": _run_terminal,
}


def call_tool(call: Call, workspace: Path, sandbox: Sandbox) -> Answer:
    """Carry out one call, or say why not; never raises for what a policy wrote."""
    started = time.monotonic()
    arguments, fault, message = check_call(call)
    if arguments is None:
        return Answer(result_class=fault, text=message, arguments_valid=False)
    try:
        answer = _RUN[call.name](arguments, workspace, sandbox)
    except CallError as refused:
        answer = Answer(result_class=refused.result_class, text=refused.text)
    return replace(answer, duration_ms=(time.monotonic() - started) * 1000)
