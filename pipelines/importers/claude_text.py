"""What a piece of a Claude Code transcript says: who wrote a text, how a tool failed, how large an edit is. Pure.

Takes: texts and values of one line. Gives: classifications with a closed set of answers.
Leaves out: state between lines (`claude_lines.py`), files (`claude_code.py`).
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from pipelines.events import ResultClass
from pipelines.importers.edit_sizes import EditSize, replaced

EDIT_TOOLS: Final = frozenset({"Edit", "Write", "MultiEdit", "NotebookEdit"})
INTERRUPT: Final = "[Request interrupted by user"
REJECTION: Final = "doesn't want to"
_REJECTED: Final = "The user doesn't want to"
_COMPACTION: Final = "This session is being continued from a previous conversation"
_PROGRAM_TEXT: Final = (
    "<local-command-",
    "<bash-stdout>",
    "<bash-stderr>",
    "<bash-input>",
    "<task-notification>",
    "<system-reminder>",
    "Caveat: The messages below",
)
"""Beginnings of user texts that the program wrote."""
_COMMAND: Final = re.compile(r"<command-name>\s*/?([\w:.-]+)\s*</command-name>")
_COMMAND_ARGS: Final = re.compile(r"<command-args>(.*?)</command-args>", re.S)
LOCAL_COMMANDS: Final = frozenset(
    word
    for line in (
        "add-dir agents bashes bug clear compact config context copy cost doctor exit export extra-usage feedback help hooks ide",
        "install-github-app keybindings login logout mcp memory mobile model output-style permissions plan plugin privacy-settings",
        "quit release-notes remote-env rename resume rewind sandbox skills stats status statusline tasks terminal-setup theme todos",
        "upgrade usage vim",
    )
    for word in line.split()
)
"""Slash commands the program answers itself. Any other one is a prompt and opens a turn."""
_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_HEAD_CHARS: Final = 2_000
"""Error texts are judged by their beginning; the rest is output."""


def text_of(content: object) -> str:
    """Return the readable text of a content value: a string, or the text blocks of a list joined by newlines."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(block["text"] for block in content if isinstance(block, dict) and isinstance(block.get("text"), str))
    return ""


def user_text_kind(line: Mapping[str, Any], text: str) -> str | None:
    """Say who wrote a user line's text: None for a person, else the reason why it opens no turn."""
    if line.get("isMeta"):
        return "meta"
    if line.get("isCompactSummary") or text.startswith(_COMPACTION):
        return "compaction_summary"
    if line.get("isSidechain"):
        return "sidechain_prompt"
    head = text.lstrip()[:200]
    if head.startswith(_PROGRAM_TEXT):
        return "program_text"
    command = _COMMAND.search(text) if "<command-name>" in head or head.startswith("<command-message>") else None
    if command and command[1] in LOCAL_COMMANDS:
        return "local_command"
    return None if head else "empty_message"


def person_text(text: str) -> str:
    """Return what the person typed: a prompt command as `/name arguments`, anything else without terminal colour codes."""
    command = _COMMAND.search(text[:2_000]) if text.lstrip().startswith("<command-") else None
    if command:
        arguments = _COMMAND_ARGS.search(text)
        return f"/{command[1]} {arguments[1].strip() if arguments else ''}".strip()
    return _ANSI.sub("", text) if "\x1b" in text else text


def result_class(text: str) -> ResultClass:
    """Classify an error result by its text; what nothing fits is the environment's doing."""
    head = _ANSI.sub("", text[:_HEAD_CHARS]).strip()
    if head.startswith(_REJECTED) or INTERRUPT in head or "Request was aborted" in head:
        return ResultClass.USER_ABORTED
    low = head.lower()
    if "no such tool available" in low or "unknown tool" in low:
        return ResultClass.UNKNOWN_TOOL
    if "modified since read" in low or "exceeds maximum allowed" in low:
        return ResultClass.UNEXPECTED_ENVIRONMENT
    if (
        head.startswith("<tool_use_error>")
        or "inputvalidationerror" in low
        or "string to replace not found" in low
        or "has not been read yet" in low
    ):
        return ResultClass.INVALID_ARGUMENTS
    if "timed out" in low or "timeout" in low[:200]:
        return ResultClass.TIMEOUT
    if "api error" in low or "overloaded" in low or "rate limit" in low:
        return ResultClass.PROVIDER_ERROR
    return ResultClass.UNEXPECTED_ENVIRONMENT


def edit_size(name: str, arguments: Mapping[str, Any]) -> EditSize:
    """Return lines and characters that an edit call adds and removes, common first and last lines left out.

    A Write's old content is not in the transcript, so it removes 0.
    """
    if name == "MultiEdit" and isinstance(arguments.get("edits"), list):
        pairs = [(item.get("old_string"), item.get("new_string")) for item in arguments["edits"] if isinstance(item, dict)]
    elif name == "Edit":
        pairs = [(arguments.get("old_string"), arguments.get("new_string"))]
    else:
        pairs = [("", arguments.get("content", arguments.get("new_source")))]
    return sum((replaced(old, new) for old, new in pairs), EditSize())
