"""Which transcripts can be imported, and how to tell them apart.

Takes: a file's name and its beginning. Gives: the format's name, and its module when it is used; nothing is loaded before. A format's
module holds:

- `read(path, file, advance) -> Iterator[records.Record]`: a binary file as records (`records.json_lines` for one object a line);
- `Mapper(stamp)`: an `engine.Mapper`, which turns records into events.

To add one, write that module and an entry in `FORMATS`. Content decides before names do: a sniff function looks at the parsed
beginning of a file (`sniffing.Head`) and answers whether it is this format; names are asked only where no content answered.
Leaves out: reading (`engine.py`).
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from pipelines.errors import ConfigError
from pipelines.importers import otlp_sniffing, sniffing
from pipelines.importers.sniffing import Head


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One kind of transcript."""

    module: str
    """Imported when the format is used."""
    title: str
    files: str
    """Where its files are found, for people."""
    names: tuple[str, ...]
    """Patterns of file names (or ends of paths) that a folder is searched for when the format is named."""
    sniff: Callable[[Head], bool]
    """Whether a file's beginning is of this format; fast, and false rather than wrong."""
    telling: tuple[str, ...] = ()
    """Patterns of names that no other program uses: they decide where the content does not (an empty or cut file)."""


FORMATS: Final[dict[str, Format]] = {
    "claude-code": Format(
        module="pipelines.importers.claude_code",
        title="Claude Code transcripts",
        files="*.jsonl under ~/.claude/projects",
        names=("*.jsonl",),
        sniff=sniffing.claude_code,
        telling=(".claude/projects/*.jsonl",),
    ),
    "codex": Format(
        module="pipelines.importers.codex",
        title="Codex CLI rollouts",
        files="rollout-*.jsonl under ~/.codex/sessions",
        names=("rollout-*.jsonl",),
        sniff=sniffing.codex,
        telling=("rollout-????-??-??T*.jsonl",),
    ),
    "gemini-cli": Format(
        module="pipelines.importers.gemini_cli",
        title="Gemini CLI sessions",
        files="chats/session-*.json and .jsonl under ~/.gemini/tmp",
        names=("session-*.json", "session-*.jsonl", "chats/*.jsonl", "chats/*/*.jsonl"),
        sniff=sniffing.gemini_cli,
        telling=(".gemini/tmp/*/chats/*",),
    ),
    "swe-agent": Format(
        module="pipelines.importers.swe_agent",
        title="SWE-agent trajectories",
        files="*.traj under trajectories/",
        names=("*.traj",),
        sniff=sniffing.swe_agent,
        telling=("*.traj",),
    ),
    "openhands": Format(
        module="pipelines.importers.openhands",
        title="OpenHands events",
        files="events/*.json under ~/.openhands/sessions, exported trajectories, output.jsonl of evaluations",
        names=("events/*.json", "event-*.json", "*trajectory*.json", "output*.jsonl"),
        sniff=sniffing.openhands,
        telling=(".openhands/sessions/*/events/*.json",),
    ),
    "continue": Format(
        module="pipelines.importers.continue_dev",
        title="Continue development data 0.2.0",
        files="*.jsonl under ~/.continue/dev_data/0.2.0",
        names=("*.jsonl",),
        sniff=sniffing.continue_dev,
        telling=(".continue/dev_data/0.2.0/*.jsonl",),
    ),
    "aider": Format(
        module="pipelines.importers.aider",
        title="aider chat histories",
        files=".aider.chat.history.md in a project",
        names=("*aider.chat.history*.md",),
        sniff=sniffing.aider,
        telling=(".aider.chat.history.md",),
    ),
    "aider-analytics": Format(
        module="pipelines.importers.aider_analytics",
        title="aider analytics logs",
        files="the file given to aider --analytics-log",
        names=("*analytics*.jsonl",),
        sniff=sniffing.aider_analytics,
    ),
    "otlp": Format(
        module="pipelines.importers.otlp",
        title="OpenTelemetry GenAI traces and logs (OTLP/JSON), VS Code Copilot's among them",
        files="*.json or *.jsonl of the collector's file exporter, or Copilot's otel.outfile",
        names=("*.json", "*.jsonl"),
        sniff=otlp_sniffing.otlp,
    ),
    "langfuse": Format(
        module="pipelines.importers.langfuse",
        title="Langfuse exports: traces, observations, scores",
        files="*.json or *.jsonl that the interface exports or the public API returns",
        names=("*.json", "*.jsonl"),
        sniff=otlp_sniffing.langfuse,
    ),
    "langsmith": Format(
        module="pipelines.importers.langsmith",
        title="LangSmith exports: runs",
        files="*.json or *.jsonl of runs",
        names=("*.json", "*.jsonl"),
        sniff=otlp_sniffing.langsmith,
    ),
}
"""Name on the command line -> format. The order is that of the questions; no file of one format answers yes for two (tested)."""


def load(name: str) -> Any:
    """Return a format's module.

    Raises:
        ConfigError: No such format.
    """
    if name not in FORMATS:
        raise ConfigError(f"{name!r} is no format that can be imported; known: {', '.join(FORMATS)}")
    return importlib.import_module(FORMATS[name].module)


def matches(path: Path, pattern: str) -> bool:
    """Whether a path's name, or its end where the pattern has folders, fits a pattern."""
    return fnmatch(path.as_posix(), f"*/{pattern}") or fnmatch(path.name, pattern)


def recognise(head: Head) -> str | None:
    """Return the format of a file: by its content, else by a telling name; None when neither says."""
    for name, known in FORMATS.items():
        if known.sniff(head):
            return name
    for name, known in FORMATS.items():
        if any(matches(head.path, pattern) for pattern in known.telling):
            return name
    return None
