"""What the user said, in a model call's or an agent's own words: the last message of a user among those that went to the model. Pure.

Takes: signals whose content was captured, in the conventions' form, older forms, OpenLLMetry's and OpenInference's numbered attributes,
and what programs add around a user's words. Gives: `Said`. Leaves out: what the model answered.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipelines.importers.otlp_wire import Signal
from pipelines.importers.records import BAD, parse

_INPUT: Final = (
    "gen_ai.input.messages", "gen_ai.prompt", "llm.input_messages", "ai.prompt.messages", "input.value", "gen_ai.request.messages",
)  # fmt: skip
_ASKED: Final = ("userRequest", "user_query")
"""Tags in which VS Code Copilot puts the user's own words into its prompt."""
_PROGRAM: Final = re.compile(r"\s*<(?:system[_-](?:notification|reminder)|environment_info)>")
"""Beginnings of messages that Copilot writes in the user's name."""
_FLAT: Final = re.compile(r"(?:gen_ai\.prompt|llm\.input_messages)\.(\d{1,4})\.(?:message\.)?(role|content)\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The user's side of a model call."""

    text: str | None = None
    users: int = 0
    """User messages in the call's history."""
    images: int = 0


def user_said(signal: Signal) -> Said:
    """Return what the user's last message in a model call's history says, as far as the content was captured."""
    typed = _typed(signal.text("copilot_chat.user_request"))
    messages = _messages(signal)
    asked = [message for message in messages if message.get("role") in ("user", "human")]
    asked = [message for message in asked if not _of_program(message)] or asked
    if not asked:
        return Said(text=typed, users=0)
    content = asked[-1].get("parts", asked[-1].get("content"))
    return Said(text=typed or _typed(content_text(content)), users=len(asked), images=_images(content))


def _typed(text: str | None) -> str | None:
    """Return a user's own words where a prompt marks them among what the program added; they may be a list of parts, as text."""
    text = content_text(text)
    for tag in _ASKED:
        if text is not None and (start := text.rfind(f"<{tag}>")) >= 0:
            return text[start + len(tag) + 2 :].partition(f"</{tag}>")[0].strip()
    return text


def _of_program(message: Mapping[str, Any]) -> bool:
    text = content_text(message.get("parts", message.get("content")))
    return text is not None and bool(_PROGRAM.match(text)) and not any(f"<{tag}>" in text for tag in _ASKED)


def _messages(signal: Signal) -> list[Mapping[str, Any]]:
    raw = signal.get(*_INPUT)
    if isinstance(raw, str):
        parsed = parse(raw) if raw.lstrip()[:1] in ("[", "{") else BAD
        raw = [{"role": "user", "content": raw}] if parsed is BAD and "gen_ai.prompt" in signal.attributes else parsed
    if isinstance(raw, dict):
        raw = raw.get("messages", raw.get("contents"))
    if isinstance(raw, list):
        return [message for message in raw if isinstance(message, dict)]
    flat: dict[int, dict[str, Any]] = {}
    for name, value in signal.attributes.items():
        if found := _FLAT.match(name):
            flat.setdefault(int(found[1]), {})[found[2]] = value
    return [flat[index] for index in sorted(flat)]


def content_text(content: object) -> str | None:
    """Return the text of a message: a text, or the text parts of a list."""
    if isinstance(content, str):
        if content[:2] == "[{" and isinstance(parts := parse(content), list):
            return content_text(parts)
        return content
    if not isinstance(content, list):
        return None
    found = [text for part in content if (text := _part(part)) is not None]
    return "\n".join(found) if found else None


def _part(part: object) -> str | None:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type", "text") not in ("text", "input_text"):
        return None
    text = part.get("content", part.get("text"))
    return text if isinstance(text, str) else None


def _images(content: object) -> int:
    parts = content if isinstance(content, list) else ()
    return sum(
        isinstance(part, dict) and (part.get("modality") == "image" or part.get("type") in ("image", "image_url", "input_image"))
        for part in parts
    )
