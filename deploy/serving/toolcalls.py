"""Find tool calls in what the policy wrote.

The policy writes `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Whatever stands between the tags becomes a call,
also when it is broken: a broken call that vanished here could be neither answered nor scored, and a policy would learn to
break its calls. Pure; never raises.

Takes: the text of a completion. Gives: calls in order. Leaves out: whether the tool exists and its arguments fit (the harness).
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NAME_IN_WRECK: Final = re.compile(r'"name"\s*:\s*"([A-Za-z0-9_.-]{1,64})"')


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """One tool call, well formed or not."""

    name: str
    """The tool's name; best effort when broken, empty when there is none to see."""
    arguments: str
    """JSON object text of a well formed call; the raw text between the tags of a broken one."""
    well_formed: bool


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_no_constant)


def parse(text: str) -> list[ParsedCall]:
    """Return the calls in `text`, in order."""
    calls: list[ParsedCall] = []
    at = text.find(OPEN)
    while at >= 0:
        start = at + len(OPEN)
        call, end = _well_formed(text, start)
        if call is None:
            call, end = _wreck(text, start)
        calls.append(call)
        at = text.find(OPEN, end)
    return calls


def _well_formed(text: str, start: int) -> tuple[ParsedCall | None, int]:
    begin = start + len(text[start:]) - len(text[start:].lstrip())
    try:
        value, stop = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None, start
    rest = text[stop:].lstrip()
    if not rest.startswith(CLOSE) or not isinstance(value, dict):
        return None, start
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(arguments, dict):
        return None, start
    return ParsedCall(name=name, arguments=json.dumps(arguments), well_formed=True), len(text) - len(rest) + len(CLOSE)


def _wreck(text: str, start: int) -> tuple[ParsedCall, int]:
    ends = [position for position in (text.find(CLOSE, start), text.find(OPEN, start)) if position >= 0]
    end = min(ends, default=len(text))
    raw = text[start:end]
    name = _NAME_IN_WRECK.search(raw)
    return ParsedCall(name=name.group(1) if name else "", arguments=raw, well_formed=False), end


def write(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as the policy writes it; `parse` gives it back."""
    return f"{OPEN}{json.dumps({'name': name, 'arguments': dict(arguments)})}{CLOSE}"


def openai_calls(calls: Iterable[ParsedCall], *, completion_id: str) -> list[dict[str, Any]]:
    """Return the calls as OpenAI's `message.tool_calls`, with ids derived from the completion's."""
    return [
        {"id": f"call_{completion_id}_{index}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for index, call in enumerate(calls)
    ]
