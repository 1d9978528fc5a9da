"""What one OpenHands event says: which call, which reply it came with, how a call ended, what it edited. Pure.

Takes: an event of version 0.x or 1.x. Gives: values, None for what an event is not.
Leaves out: state between events (`openhands.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipelines.events import ResultClass
from pipelines.importers.edit_sizes import EditSize, diff_files, replaced
from pipelines.importers.records import parse
from pipelines.importers.shell_results import error_class, exit_class
from pipelines.importers.texts import count, mapping, text_of, word

ACTIONS: Final = frozenset({
    "run", "run_ipython", "read", "write", "edit", "browse", "browse_interactive", "call_tool_mcp", "delegate", "think", "finish",
    "reject", "task_tracking", "add_task", "modify_task", "kill",
})  # fmt: skip
"""Actions of version 0.x that are calls of the agent."""
_OBSERVATIONS: Final = frozenset({
    "run", "run_ipython", "read", "write", "edit", "browse", "mcp", "delegate", "think", "error", "user_rejected", "success",
    "task_tracking", "loop_detection",
})  # fmt: skip
_EDIT_COMMANDS: Final = frozenset({"create", "str_replace", "insert", "write"})
_STILL_RUNNING: Final = ("[the command has no new output after", "[the command timed out")
_FAILED: Final = ("error", "[error", "invalid parameter", "no replacement was performed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of the agent."""

    call_id: object
    name: str
    arguments: str
    valid: bool
    runs: object
    """The arguments as they stand in the event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The model's response that an event came with."""

    name: str = ""
    """Its id; empty when the event does not tell."""
    model: str = ""
    usage: tuple[int, int, int] | None = None
    """Prompt, response and cached tokens of this response."""
    totals: tuple[int, int, int] | None = None
    """The same of the conversation so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """How a call ended."""

    cause: str
    """Id of the action's event; empty when not told."""
    call_id: str
    verdict: ResultClass
    text: str
    exit_code: int | None = None


def read_call(event: Mapping[str, Any]) -> Call | None:
    """Read an agent's call."""
    if event.get("source") not in ("agent", None):
        return None
    if event.get("kind") == "ActionEvent":
        call = mapping(event.get("tool_call"))
        raw = call.get("arguments", mapping(call.get("function")).get("arguments"))
        name = event.get("tool_name", call.get("name"))
        arguments = raw if isinstance(raw, str) else repr(event.get("action"))
        valid = isinstance(parse(raw), dict) if isinstance(raw, str) else event.get("action") is not None
        return Call(
            call_id=event.get("tool_call_id"), name=name if isinstance(name, str) else "", arguments=arguments, valid=valid,
            runs=event.get("action") if raw is None else raw,
        )  # fmt: skip
    action = event.get("action")
    if not isinstance(action, str) or action not in ACTIONS:
        return None
    known = mapping(event.get("tool_call_metadata"))
    name = known.get("function_name")
    arguments = {name: value for name, value in mapping(event.get("args")).items() if name != "thought"}
    name = name if isinstance(name, str) and name else action
    return Call(
        call_id=known.get("tool_call_id"), name=name, arguments=repr(arguments), valid=isinstance(event.get("args"), dict), runs=arguments
    )


def response_of(event: Mapping[str, Any]) -> Response:
    """Read the response that an event came with."""
    if "kind" in event:
        name = event.get("llm_response_id")
        return Response(name=name if isinstance(name, str) else "")
    totals = mapping(mapping(event.get("llm_metrics")).get("accumulated_token_usage"))
    sums = (count(totals.get("prompt_tokens")), count(totals.get("completion_tokens")), count(totals.get("cache_read_tokens")))
    response = mapping(mapping(event.get("tool_call_metadata")).get("model_response"))
    usage = mapping(response.get("usage"))
    cached = count(mapping(usage.get("prompt_tokens_details")).get("cached_tokens"))
    own = (count(usage.get("prompt_tokens")), count(usage.get("completion_tokens")), cached)
    name, model = response.get("id"), response.get("model")
    return Response(
        name=name if isinstance(name, str) else "",
        model=model if isinstance(model, str) else "",
        usage=own if usage else None,
        totals=sums if totals else None,
    )


def observed(event: Mapping[str, Any]) -> Observed | None:
    """Read an answer to a call."""
    kind = event.get("kind")
    if kind in ("ObservationEvent", "AgentErrorEvent", "UserRejectObservation"):
        return _observed_new(event, str(kind))
    name = event.get("observation")
    if not isinstance(name, str) or name not in _OBSERVATIONS:
        return None
    text, extras = text_of(event.get("content")), mapping(event.get("extras"))
    code = mapping(extras.get("metadata")).get("exit_code", extras.get("exit_code"))
    code = _code(code)
    known = mapping(event.get("tool_call_metadata")).get("tool_call_id")
    cause = event.get("cause")
    return Observed(
        cause=str(cause) if isinstance(cause, int | str) else "",
        call_id=known if isinstance(known, str) else "",
        verdict=_verdict(name, text, code),
        text=text,
        exit_code=None if code == -1 else code,
    )


def _observed_new(event: Mapping[str, Any], kind: str) -> Observed:
    observation = mapping(event.get("observation"))
    text = text_of(observation.get("content", observation.get("output"))) or text_of(event.get("error", event.get("rejection_reason")))
    code = _code(observation.get("exit_code", mapping(observation.get("metadata")).get("exit_code")))
    name = "run" if code is not None else "error" if kind == "AgentErrorEvent" or observation.get("is_error") else ""
    verdict = ResultClass.USER_ABORTED if kind == "UserRejectObservation" else _verdict(name, text, code)
    cause, call_id = event.get("action_id"), event.get("tool_call_id")
    return Observed(
        cause=cause if isinstance(cause, str) else "",
        call_id=call_id if isinstance(call_id, str) else "",
        verdict=verdict,
        text=text,
        exit_code=None if code == -1 else code,
    )


def _code(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31 else None


def _verdict(name: str, text: str, exit_code: int | None) -> ResultClass:
    if name == "user_rejected":
        return ResultClass.USER_ABORTED
    if name == "error":
        return error_class(text)
    if exit_code == -1:
        return ResultClass.TIMEOUT if any(mark in text[-2_000:].lower() for mark in _STILL_RUNNING) else ResultClass.OK
    if name == "run":
        return exit_class(exit_code, text)
    return error_class(text) if text.lstrip()[:60].lower().startswith(_FAILED) else ResultClass.OK


def edited_file(event: Mapping[str, Any]) -> tuple[str, EditSize | None] | None:
    """Return (path, size) of a call that edits a file; the size is None where only the answer shows it. None for any other event."""
    if event.get("kind") == "ActionEvent":
        action = mapping(event.get("action"))
        if word(action.get("command")) not in _EDIT_COMMANDS or not isinstance(action.get("path"), str):
            return None
        return action["path"], _size(action)
    name, arguments = event.get("action"), mapping(event.get("args"))
    if event.get("source") not in ("agent", None) or name not in ("edit", "write"):
        return None
    path = arguments.get("path")
    path = path if isinstance(path, str) else ""
    if name == "write":
        return path, replaced("", arguments.get("content"))
    command = word(arguments.get("command"))
    if command in _EDIT_COMMANDS:
        return path, _size(arguments)
    return None if command in ("view", "undo_edit") else (path, None)


def _size(arguments: Mapping[str, Any]) -> EditSize:
    command = arguments.get("command")
    if command == "create":
        return replaced("", arguments.get("file_text"))
    if command == "write":
        return replaced("", arguments.get("content"))
    old = arguments.get("old_str") if command == "str_replace" else ""
    return replaced(old, arguments.get("new_str"))


def shown_edit(event: Mapping[str, Any]) -> tuple[str, EditSize]:
    """Return (path, size) as an edit's answer shows them: in a diff, or in the file before and after."""
    extras = mapping(event.get("extras"))
    path = extras.get("path")
    path = path if isinstance(path, str) else ""
    for diff in (extras.get("diff"), event.get("content")):
        files = diff_files(diff) if isinstance(diff, str) else []
        if files:
            return path, sum((size for _, size in files), EditSize())
    return path, replaced(extras.get("old_content"), extras.get("new_content"))
