"""Commands of the event pipeline: `tidegate import`."""

import getpass
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from cyclopts import App, Parameter

from pipelines.config import PipelinesConfig
from pipelines.errors import ConfigError, ContractViolation
from pipelines.importers import registry, sniffing
from pipelines.terminal import Common, progress, run

if TYPE_CHECKING:
    from pipelines.events import Event
    from pipelines.importers.engine import Counts
    from pipelines.storage import Home

FACTS: Final = ("user_messages", "tool_calls", "tool_errors", "tool_rejections", "edits", "interrupts")
SHOWN_UNKNOWN: Final = 20
"""Files of no known format that are named; the rest is only counted."""

User = Annotated[str | None, Parameter(help="Whose sessions these are; only a keyed hash leaves. Default: you.")]
Allowed = Annotated[
    Literal["train", "measure", "none"] | None, Parameter(help="What may be done with them. Default: privacy.default_consent.")
]
DryRun = Annotated[bool, Parameter(name="--dry-run", negative="", help="Count and check, send nothing.")]

app = App(name="import", help="Turn transcripts you already have into session events.")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return "local"


@app.default
def sniffed(
    *paths: Path,
    listing: Annotated[bool, Parameter(name="--list", negative="", help="Show the formats that can be imported.")] = False,
    user: User = None,
    consent: Allowed = None,
    dry_run: DryRun = False,
    common: Common = Common(),
) -> int:
    """Import transcripts of any known format: files, or folders in which each file is looked at.

    A file's content says what it is, its name only where the content does not. Files of no known format are counted and shown.
    Events carry no token ids: they feed rewards, monitoring and calibration, never on-policy training. Importing the same
    transcripts again is harmless: the same records give the same event ids.
    """
    if listing:
        common.show({"formats": _formats()}, _table)
        return 0
    config, home = common.tree(PipelinesConfig), common.place()
    if not paths:
        raise ConfigError("tidegate import: name transcripts or folders of them, or --list to see the formats")
    files, unknown = _sort(paths)
    total: dict[str, Counts] = {}
    for name, group in files.items():
        total[name] = _import(name, group, config=config, home=home, user=user, consent=consent, dry_run=dry_run)
    for path, seen in unknown[:SHOWN_UNKNOWN]:
        print(f"not imported: {path}: {seen}", file=sys.stderr)
    if len(unknown) > SHOWN_UNKNOWN:
        print(f"... and {len(unknown) - SHOWN_UNKNOWN} more files of no known format", file=sys.stderr)
    counts = _sum(total.values())
    result = counts.as_dict() | {"formats": {name: each.as_dict() for name, each in total.items()}, "unknown_files": len(unknown)}
    common.show(result, lambda: _text_of_many(result, sent=not dry_run))
    return _verdict(counts)


def _named(name: str) -> Callable[..., int]:
    """Return the command of one format."""
    known = registry.FORMATS[name]

    def command(*paths: Path, user: User = None, consent: Allowed = None, dry_run: DryRun = False, common: Common = Common()) -> int:
        from pipelines.importers.engine import find_files

        config, home = common.tree(PipelinesConfig), common.place()
        if not paths:
            raise ConfigError(f"tidegate import {name}: name at least one transcript or folder, for example {known.files}")
        order = getattr(registry.load(name), "order", str)
        files = find_files([path.expanduser() for path in paths], names=known.names, where=known.files, order=order)
        counts = _import(name, files, config=config, home=home, user=user, consent=consent, dry_run=dry_run)
        common.show(counts.as_dict(), lambda: _text(counts.as_dict(), sent=not dry_run))
        return _verdict(counts)

    command.__doc__ = f"""Import {known.title}: {known.files}.

    Events carry no token ids: they feed rewards, monitoring and calibration, never on-policy training. Importing the same
    transcripts again is harmless: the same records give the same event ids.
    """
    return command


for _name in registry.FORMATS:
    app.command(_named(_name), name=_name)


def _formats() -> list[dict[str, str]]:
    return [{"name": name, "title": known.title, "files": known.files} for name, known in registry.FORMATS.items()]


def _table() -> str:
    rows = [("format", "what", "files"), *((row["name"], row["title"], row["files"]) for row in _formats())]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{name:{widths[0]}}  {title:{widths[1]}}  {files}" for name, title, files in rows)


def _sort(paths: Sequence[Path]) -> tuple[dict[str, list[Path]], list[tuple[Path, str]]]:
    """Look at each file and return the files by format, and those of none with what they look like.

    Raises:
        ConfigError: None of them is of a known format.
    """
    from pipelines.importers.engine import find_files

    known: dict[str, list[Path]] = {}
    unknown: list[tuple[Path, str]] = []
    for path in find_files([path.expanduser() for path in paths], names=(), where="see tidegate import --list"):
        try:
            head = sniffing.look(path)
        except OSError as error:
            unknown.append((path, f"not readable, {error.strerror or error}"))
            continue
        name = registry.recognise(head)
        if name is None:
            unknown.append((path, sniffing.describe(head)))
        else:
            known.setdefault(name, []).append(path)
    if not known:
        shown = "; ".join(f"{path} is {seen}" for path, seen in unknown[:3])
        more = f"; and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise ConfigError(
            f"no known transcript among {len(unknown)} files: {shown}{more}. Known formats: {', '.join(registry.FORMATS)} "
            "(tidegate import --list); to read a file as one of them, name the format: tidegate import FORMAT PATH"
        )
    for name, files in known.items():
        files.sort(key=getattr(registry.load(name), "order", str))
    return {name: known[name] for name in registry.FORMATS if name in known}, unknown


def _import(
    name: str, files: Sequence[Path], *, config: PipelinesConfig, home: "Home", user: str | None, consent: Any, dry_run: bool
) -> "Counts":
    """Import files of one format, and show what was wrong with them."""
    from pipelines.importers.engine import Importer
    from pipelines.importers.sessions import Stamp

    module, privacy = registry.load(name), config.privacy
    stamp = Stamp.of(
        home,
        user=user or _user(),
        consent=consent or privacy.default_consent,
        keep_text=privacy.keep_text,
        format=name,
        version=module.VERSION,
    )
    total = sum(path.stat().st_size for path in files if path.exists())
    with progress(f"importing {len(files)} transcripts (bytes)", total=total) as advance:
        importer = Importer(module.read, module.Mapper(stamp), advance=advance)
        events = importer.events(files)
        if dry_run:
            for _ in events:
                pass
        else:
            _deliver(config, home, events)
    _complain(importer.counts)
    return importer.counts


def _deliver(config: PipelinesConfig, home: "Home", events: "Iterable[Event]") -> None:
    from pipelines import kafka
    from pipelines.codec import encode

    kafka.ensure_topics(config, home)
    with kafka.Producer(config, home) as producer:
        for event in events:
            producer.send(encode(event), event.session_id)


def _complain(counts: "Counts") -> None:
    """Show damaged records and unreadable files, each in one line."""
    for fault in counts.faults:
        print(fault, file=sys.stderr)
    if counts.fault_count > len(counts.faults):
        print(f"... and {counts.fault_count - len(counts.faults)} more damaged lines", file=sys.stderr)
    for item in counts.unreadable:
        print(f"not read: {item}", file=sys.stderr)


def _sum(counts: "Iterable[Counts]") -> "Counts":
    from pipelines.importers.engine import Counts

    total = Counts()
    for each in counts:
        total.add(each)
    return total


def _verdict(counts: "Counts") -> int:
    """Return the exit code.

    Raises:
        ContractViolation: Not one record could be used.
    """
    if counts.lines and counts.accepted + counts.duplicates == 0 and counts.fault_count == counts.lines:
        raise ContractViolation(f"none of the {counts.lines} lines is JSON of a transcript; check the paths")
    return 1 if counts.unreadable else 0


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


def _text_of_many(result: dict[str, Any], *, sent: bool) -> str:
    rows = [
        f"{name}: {each['lines']} lines in {each['files']} files, {each['accepted']} accepted, {sum(each['events'].values())} events"
        for name, each in result["formats"].items()
    ]
    if result["unknown_files"]:
        rows.append(f"{result['unknown_files']} files of no known format")
    return "\n".join([*rows, _text(result, sent=sent)])


if __name__ == "__main__":
    sys.exit(run(app))
