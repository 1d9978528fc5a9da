"""What kind of transcript a file is, from its first 64 KiB. Pure but for `look`, which reads them.

Takes: a path. Gives: `Head`, the beginning as bytes and as JSON where it is JSON; one yes-or-no function a format; and `describe`,
which says what an unknown file looks like.
Leaves out: names (`registry.py` asks them last).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Final

HEAD_BYTES: Final = 65_536
"""Enough for the first lines of every format; a first line may be longer (a system prompt), see `Head.opening`."""
_LINES: Final = 8
"""Parsed lines of a head. A format's mark is in its first few lines."""


@dataclass(frozen=True)
class Head:
    """The beginning of a file."""

    path: Path
    data: bytes
    """The first `HEAD_BYTES` bytes, fewer when the file is shorter."""

    @cached_property
    def text(self) -> str:
        """The beginning as text, undecodable bytes replaced, without a byte order mark."""
        return self.data.decode("utf-8-sig", "replace")

    @cached_property
    def lines(self) -> tuple[Mapping[str, Any], ...]:
        """The JSON objects among the first lines."""
        found = []
        for line in islice((line for line in self.text.splitlines() if line.strip() != "{}"), _LINES):
            value = _parsed(line) if line.lstrip()[:1] == "{" else None
            if isinstance(value, dict):
                found.append(value)
        return tuple(found)

    @cached_property
    def whole(self) -> object:
        """The file as one JSON value, when all of it is in the head; else None."""
        return _parsed(self.text) if len(self.data) < HEAD_BYTES and self.text.lstrip()[:1] in ("{", "[") else None

    @cached_property
    def opening(self) -> str:
        """The first 4,096 characters without white space outside words: for marks in documents that are longer than the head."""
        return "".join(self.text[:4_096].split())


def look(path: Path) -> Head:
    """Read a file's beginning.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        return Head(path=path, data=file.read(HEAD_BYTES))


def describe(head: Head) -> str:
    """Say in a few words what an unknown file looks like."""
    if not head.data.strip():
        return "empty"
    if b"\0" in head.data:
        return "binary"
    if len(head.lines) > 1 or (head.lines and head.whole is None):
        return f"JSON lines with {_keys(head.lines[0])}"
    if isinstance(head.whole, dict):
        return f"a JSON object with {_keys(head.whole)}"
    if isinstance(head.whole, list):
        first = head.whole[0] if head.whole else None
        return f"a JSON list of {len(head.whole)} entries" + (f" with {_keys(first)}" if isinstance(first, dict) else "")
    if head.opening[:1] in ("{", "["):
        return "the beginning of a JSON document, or broken JSON"
    return "text that is no JSON"


def claude_code(head: Head) -> bool:
    """Claude Code: a line with `sessionId` and `uuid` beside a message, or its own bookkeeping lines."""
    return any(
        ("sessionId" in line and "uuid" in line and ("message" in line or line.get("type") == "system"))
        or (line.get("type") == "summary" and "leafUuid" in line)
        or (line.get("type") == "file-history-snapshot" and "snapshot" in line)
        for line in head.lines
    )


def codex(head: Head) -> bool:
    """Codex: lines of timestamp, type and payload, or the first versions' bare items under a line with id and timestamp."""
    return any(
        ("payload" in line and line.get("type") in ("session_meta", "response_item", "event_msg", "turn_context", "compacted"))
        or ("record_type" in line and len(line) == 1)
        or ("instructions" in line and "timestamp" in line and "id" in line and "type" not in line)
        for line in head.lines
    )


def gemini_cli(head: Head) -> bool:
    """Gemini CLI: `sessionId` and `projectHash` open a session, in lines and in documents."""
    if any("sessionId" in line and "projectHash" in line for line in head.lines):
        return True
    return head.opening.startswith("{") and '"sessionId":' in head.opening and '"projectHash":' in head.opening


def swe_agent(head: Head) -> bool:
    """SWE-agent: a document with `trajectory` beside `history`, or one that begins with steps of action and observation."""
    if isinstance(head.whole, dict):
        steps = head.whole.get("trajectory")
        return isinstance(steps, list) and ("history" in head.whole or "environment" in head.whole or "info" in head.whole)
    opening = head.opening
    return opening.startswith(('{"trajectory":[{"action":', '{"environment":')) and '"trajectory":[' in opening


def openhands(head: Head) -> bool:
    """OpenHands: events of action or observation with a source, alone, in a list or in a history; or events with a kind."""
    whole = head.whole
    if isinstance(whole, dict) and isinstance(whole.get("trajectory"), list) and len(whole) == 1:
        whole = whole["trajectory"]
    events = whole if isinstance(whole, list) else [whole, *head.lines]
    if any(_is_openhands_event(event) for event in events[:_LINES]):
        return True
    if any(("instance_id" in line or "git_patch" in line) and isinstance(line.get("history"), list) for line in head.lines):
        return True
    return head.text.lstrip()[:1] in "[{" and bool(_OPENHANDS.search(head.text[:20_000]))


def _is_openhands_event(event: object) -> bool:
    if not isinstance(event, dict):
        return False
    kind = event.get("kind")
    if isinstance(kind, str) and kind in _OPENHANDS_KINDS and "source" in event:
        return True
    return (
        "source" in event
        and "timestamp" in event
        and (("action" in event and "args" in event) or ("observation" in event and "content" in event))
    )


_OPENHANDS_KINDS: Final = frozenset({
    "MessageEvent", "ActionEvent", "ObservationEvent", "AgentErrorEvent", "SystemPromptEvent", "UserRejectObservation", "PauseEvent",
    "ConversationStateUpdateEvent", "Condensation",
})  # fmt: skip
_OPENHANDS: Final = re.compile(
    r'"source":\s*"(?:user|agent|environment)",\s*"(?:message|system_prompt|llm_message|thought|tool_name|observation)":'
    r'|"instance_id":.{0,19000}"history":\s*\[\[?\{"id"',
    re.S,
)
"""Marks of documents that are longer than the head."""


def continue_dev(head: Head) -> bool:
    """Continue: lines with an event's name beside a schema version, or those of the first version by their fields."""
    return any("eventName" in line and "schema" in line for line in head.lines)


def aider(head: Head) -> bool:
    """aider: a line that says when a chat started."""
    return bool(_AIDER.search(head.text))


_AIDER: Final = re.compile(r"^# aider chat started at \d{4}-\d\d-\d\d", re.M)


def aider_analytics(head: Head) -> bool:
    """aider's analytics: lines of exactly event, properties, user and time."""
    return any(set(line) == {"event", "properties", "user_id", "time"} for line in head.lines)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _keys(value: Mapping[str, Any]) -> str:
    """Name an object's keys, never its values; keys that may be content are cut."""
    names = [str(name)[:30] for name in list(value)[:6]]
    return f"keys {', '.join(names)}" if names else "no keys"
