"""What one item of a Codex rollout says: whose text it is, what a call asks for, how a call ended. Pure.

Takes: parsed lines and items. Gives: classifications with closed sets of answers.
Leaves out: state between lines (`codex.py`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipelines.events import ResultClass
from pipelines.importers.edit_sizes import EditSize, patch_files
from pipelines.importers.records import BAD, parse
from pipelines.importers.shell_results import error_class, exit_class
from pipelines.importers.texts import identifier, items, mapping, milliseconds, text_of, word

CALLS: Final = frozenset({"function_call", "custom_tool_call", "local_shell_call", "web_search_call", "tool_search_call"})
OUTPUTS: Final = frozenset({"function_call_output", "custom_tool_call_output", "tool_search_output"})
_ITEMS: Final = CALLS | OUTPUTS | {"message", "reasoning"}
_PROGRAM_TAG: Final = re.compile(r"\s*<([a-z][a-z0-9_ -]{2,60}|INSTRUCTIONS|BUTTON)>.*</\1>\s*\Z", re.S)
_PROGRAM_HEADS: Final = (
    "<environment_context>", "<user_instructions>", "# AGENTS.md instructions", "<turn_aborted>", "<INSTRUCTIONS>", "<user_shell_command>",
    "<permissions instructions>", "<collaboration_mode>", "<skill>", "<subagent_notification>", "<model_switch>", "<user_action>",
    "Another language model started to solve this problem",
)  # fmt: skip
"""Beginnings of texts that the program wrote in the user's name."""
_PATCH: Final = "*** Begin Patch"
_EXIT: Final = re.compile(r"^(?:Exit code: |Process exited with code )(-?\d{1,6})\s*$", re.M)
_WALL: Final = re.compile(r"^Wall time: ([\d.]{1,12}) seconds", re.M)
_OUTPUT: Final = re.compile(r"^(?:Output|Total output lines: \d+\n+Output):\n", re.M)
_HEAD_CHARS: Final = 600
_FAILURES: Final = (
    "failed", "error", "unsupported call", "execution error", "apply_patch verification failed", "apply_patch failed",
    "exec_command failed", "err:", "unknown tool", "patch rejected", "command rejected", "rejected", "exec command rejected",
    "aborted by user", "timeout", "collab tool failed", "write_stdin failed", "unable to", "invalid",
)  # fmt: skip
"""How an output begins that tells of a failure without an exit code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call as the model wrote it."""

    call_id: str
    name: str
    arguments: str
    valid: bool
    """Whether its arguments are of the right form: an object, or a patch that is one."""
    runs: object
    """The arguments as they stand in the item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a call ended."""

    verdict: ResultClass
    text: str
    exit_code: int | None = None
    duration_ms: float | None = None


def parts(line: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return (kind, payload) of a line; bare items of the first versions are `response_item`, their first line `session_meta`."""
    kind, payload = line.get("type"), line.get("payload")
    if isinstance(payload, dict):
        return (kind if isinstance(kind, str) else ""), payload
    if word(kind) in _ITEMS:
        return "response_item", dict(line)
    if kind is None and "id" in line and "timestamp" in line:
        return "session_meta", dict(line)
    return ("state" if "record_type" in line else kind if isinstance(kind, str) else ""), {}


def is_program_text(text: str) -> bool:
    """Whether a text in the user's name was written by the program."""
    return text.lstrip().startswith(_PROGRAM_HEADS) or bool(_PROGRAM_TAG.match(text[:100_000]))


def read_call(payload: Mapping[str, Any], *, seed: str) -> Call:
    """Read a call item."""
    kind, name = payload.get("type"), payload.get("name")
    call_id = identifier(payload.get("call_id") or payload.get("id"), seed)
    if kind == "function_call":
        arguments = payload.get("arguments")
        valid = isinstance(arguments, dict) or (isinstance(arguments, str) and isinstance(parse(arguments), dict))
    elif kind == "custom_tool_call":
        arguments = payload.get("input")
        valid = isinstance(arguments, str) and (name != "apply_patch" or bool(patch_files(arguments)))
    else:
        arguments = payload.get("action")
        valid = True
        name = name or {"local_shell_call": "shell", "web_search_call": "web_search"}.get(str(kind), str(kind))
    text = arguments if isinstance(arguments, str) else repr(arguments)
    return Call(call_id=call_id, name=name if isinstance(name, str) else "", arguments=text, valid=valid, runs=arguments)


def edited_files(payload: Mapping[str, Any]) -> list[tuple[str, EditSize]]:
    """Return (path, size) of each file that a call patches: with the patch tool, or with `apply_patch` in a command."""
    if payload.get("type") == "custom_tool_call":
        text = payload.get("input")
        return patch_files(text) if payload.get("name") == "apply_patch" and isinstance(text, str) else []
    raw = payload.get("arguments")
    if isinstance(raw, str) and _PATCH in raw:
        raw = parse(raw)
    action = mapping(payload.get("action")) if raw is None else mapping(raw)
    found: list[tuple[str, EditSize]] = []
    for value in action.values():
        texts = [part for part in items(value) if isinstance(part, str)] if isinstance(value, list) else [value]
        for text in texts:
            if isinstance(text, str) and _PATCH in text:
                found += patch_files(text[text.index(_PATCH) :])
    return found


def outcome(output: object) -> Outcome:
    """Read a call's output, whatever form it has."""
    success: object = None
    if isinstance(output, dict):
        success = output.get("success")
        output = output.get("content", output.get("output", ""))
    text = text_of(output)
    if text.startswith("{"):
        value = parse(text)
        if value is not BAD and isinstance(value, dict) and isinstance(value.get("output"), str):
            details = mapping(value.get("metadata"))
            code = details.get("exit_code")
            code = code if isinstance(code, int) and not isinstance(code, bool) and abs(code) < 2**31 else None
            return Outcome(
                verdict=_verdict(value["output"], code, success),
                text=value["output"],
                exit_code=code,
                duration_ms=milliseconds(details.get("duration_seconds"), unit_ms=1000.0),
            )
    head = text[:_HEAD_CHARS]
    exit_code, wall = _EXIT.search(head), _WALL.search(head)
    if exit_code is None and wall is None:
        return Outcome(verdict=_verdict(text, None, success), text=text)
    body = _OUTPUT.search(text)
    inner = text[body.end() :] if body else text
    code = int(exit_code[1]) if exit_code else None
    return Outcome(
        verdict=_verdict(inner, code, success),
        text=inner,
        exit_code=code,
        duration_ms=float(wall[1]) * 1000.0 if wall and _is_number(wall[1]) else None,
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _verdict(text: str, exit_code: int | None, success: object) -> ResultClass:
    if exit_code is not None:
        verdict = exit_class(exit_code, text)
        refused = verdict is ResultClass.UNEXPECTED_ENVIRONMENT and text.lstrip().lower().startswith(_FAILURES)
        return error_class(text) if refused else verdict
    if success is False or text.lstrip()[:60].lower().startswith(_FAILURES):
        return error_class(text)
    return ResultClass.OK
