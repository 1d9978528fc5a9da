"""Render messages to the token ids of a checkpoint: its `tokenizer.json` and `chat_template.jinja`, without torch or transformers.

Gives the same text and ids as `transformers.apply_chat_template` (held by a test), so a process that only prepares rows stays
small. The ids of messages[:k] + generation header are an exact prefix of the ids of messages[:k+1] (`publish.role_safe`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from pipelines.errors import CheckpointInvalid, ContractViolation
from trainer.candidates import TEMPLATE_FILE

ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""What a message's sender may be called, and what the template calls it (`developer` is OpenAI's newer word)."""
END: Final = "<|im_end|>"
"""Ends every message; the last token a policy samples in a completion that finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """How one checkpoint writes and reads text."""

    tokenizer: Tokenizer
    template: Any
    """A compiled jinja template."""
    end_id: int

    def text(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None, prompt: bool = False) -> str:
        """Render messages, with the header of the next assistant message when `prompt`."""
        return self.template.render(messages=list(messages), tools=list(tools) if tools else None, add_generation_prompt=prompt)

    def ids(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None, prompt: bool = False
    ) -> list[int]:
        """Render messages to token ids."""
        return self.encode(self.text(messages, tools=tools, prompt=prompt))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, special tokens recognised, none added."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def normalised(message: Any) -> dict[str, str]:
    """Return a message of a chat in OpenAI's shape as the model writes it: calls as text behind what was said, parts joined.

    Raises:
        ContractViolation: It is no such message; the sentence says what is wrong with it.
    """
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ROLES:
        raise ContractViolation(f"a message's role is one of {', '.join(ROLES)}, not {role!r}")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            raise ContractViolation("only text parts can be learned from; this message has another part")
        content = "".join(part["text"] for part in content)
    calls = message.get("tool_calls") or []
    if not isinstance(content, str | None) or not isinstance(calls, list) or (content is None and not calls):
        raise ContractViolation("a message has content (a text, text parts) or tool_calls, and this one has neither")
    written = [_written(call) for call in calls]
    return {"role": ROLES[role], "content": "\n".join([*([content] if content else []), "".join(written)] if written else [content or ""])}


def named_tool(tool: Any) -> bool:
    """Tell whether this is a tool's description, in OpenAI's wrapping or bare."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _written(call: Any) -> str:
    if not named_tool(call):
        raise ContractViolation("a tool call has no function name")
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise ContractViolation(f"the arguments of a call of {function['name']} are not JSON") from error
    return f"<tool_call>{json.dumps({'name': function['name'], 'arguments': arguments}, ensure_ascii=False)}</tool_call>"


def _tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself, no class below it, for a missing and for a broken file
        raise CheckpointInvalid(f"{path} is no usable tokenizer: {error}") from error


def load(folder: Path) -> Chat:
    """Load tokenizer and template of a checkpoint folder.

    Raises:
        CheckpointInvalid: A file is missing, or the tokenizer has no end token.
    """
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    tokenizer = _tokenizer(folder / "tokenizer.json")
    try:
        template = environment.from_string((folder / TEMPLATE_FILE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, TemplateError) as error:
        raise CheckpointInvalid(f"{folder} has no usable {TEMPLATE_FILE}: {error}") from error
    end_id = tokenizer.token_to_id(END)
    if end_id is None:
        raise CheckpointInvalid(f"{folder / 'tokenizer.json'} has no token {END}")
    return Chat(tokenizer=tokenizer, template=template, end_id=end_id)


def supervised(
    chat: Chat, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None
) -> tuple[list[int], list[int]]:
    """Render a dialogue and find the tokens that a policy would have sampled.

    Returns:
        Token ids up to the last assistant message's end token, and the offsets of every assistant message's tokens, end token
        included.

    Raises:
        ContractViolation: There is no assistant message, or a prompt is no prefix of what follows it.
    """
    full = chat.ids(messages, tools=tools)
    trained: list[int] = []
    for k, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = len(chat.ids(messages[:k], tools=tools, prompt=True))
        through = chat.ids(messages[: k + 1], tools=tools)
        stop = len(through) - through[::-1].index(chat.end_id)
        if chat.ids(messages[:k], tools=tools, prompt=True) != full[:start] or through[:stop] != full[:stop]:
            raise ContractViolation("the chat template does not render a dialogue's beginning as a prefix of the dialogue")
        trained += range(start, stop)
    if not trained:
        raise ContractViolation("a demonstration has no assistant message, so there is nothing to learn from it")
    return full[: trained[-1] + 1], trained
