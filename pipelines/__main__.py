"""Commands of the event pipeline: `tidegate import`."""

import getpass
import sys
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from cyclopts import App, Parameter

from pipelines.config import PipelinesConfig
from pipelines.errors import ConfigError, ContractViolation
from pipelines.terminal import Common, progress, run

FACTS: Final = ("user_messages", "tool_calls", "tool_errors", "tool_rejections", "edits", "interrupts")

app = App(name="import", help="Turn transcripts you already have into session events.")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return "local"


@app.command(name="claude-code")
def claude_code(
    *paths: Path,
    user: Annotated[str | None, Parameter(help="Whose sessions these are; only a keyed hash leaves. Default: you.")] = None,
    consent: Annotated[
        Literal["train", "measure", "none"] | None, Parameter(help="What may be done with them. Default: privacy.default_consent.")
    ] = None,
    dry_run: Annotated[bool, Parameter(name="--dry-run", negative="", help="Count and check, send nothing.")] = False,
    common: Common = Common(),
) -> int:
    """Import Claude Code transcripts: files (*.jsonl) or folders such as ~/.claude/projects.

    Events carry no token ids: they feed rewards, monitoring and calibration, never on-policy training. Importing the same
    transcripts again is harmless: the same lines give the same event ids.
    """
    from pipelines.importers.claude_code import Importer, find_files
    from pipelines.importers.claude_lines import Stamp

    config = common.tree(PipelinesConfig)
    home = common.place()
    if not paths:
        raise ConfigError("tidegate import claude-code: name at least one transcript or folder, for example ~/.claude/projects")
    files = find_files([path.expanduser() for path in paths])
    stamp = Stamp.of(home, user=user or _user(), consent=consent or config.privacy.default_consent, keep_text=config.privacy.keep_text)
    total = sum(path.stat().st_size for path in files if path.exists())
    with progress(f"importing {len(files)} transcripts (bytes)", total=total) as advance:
        importer = Importer(stamp, advance=advance)
        events = importer.events(files)
        if dry_run:
            for _ in events:
                pass
        else:
            _deliver(config, home, events)
    counts = importer.counts
    _complain(counts)
    common.show(counts.as_dict(), lambda: _text(counts.as_dict(), sent=not dry_run))
    if counts.lines and counts.accepted + counts.duplicates == 0 and counts.fault_count == counts.lines:
        raise ContractViolation(f"none of the {counts.lines} lines is JSON of a transcript; check the paths")
    return 1 if counts.unreadable else 0


def _deliver(config: PipelinesConfig, home: Any, events: Any) -> None:
    from pipelines import kafka
    from pipelines.codec import encode

    kafka.ensure_topics(config, home)
    with kafka.Producer(config, home) as producer:
        for event in events:
            producer.send(encode(event), event.session_id)


def _complain(counts: Any) -> None:
    """Show damaged lines and unreadable files, each in one line."""
    for fault in counts.faults:
        print(fault, file=sys.stderr)
    if counts.fault_count > len(counts.faults):
        print(f"... and {counts.fault_count - len(counts.faults)} more damaged lines", file=sys.stderr)
    for item in counts.unreadable:
        print(f"not read: {item}", file=sys.stderr)


def _text(result: dict[str, Any], *, sent: bool) -> str:
    rows = [
        f"{result['lines']} lines in {result['files']} files: {result['accepted']} accepted, {result['duplicates']} duplicates, "
        f"{sum(result['rejected'].values())} rejected",
        *(f"  rejected {reason}: {count}" for reason, count in result["rejected"].items()),
        f"{sum(result['events'].values())} events {'sent' if sent else '(dry run, none sent)'}: "
        + ", ".join(f"{kind} {count}" for kind, count in result["events"].items()),
        ", ".join(f"{name.replace('_', ' ')} {result[name]}" for name in FACTS),
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(run(app))
