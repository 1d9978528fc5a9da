"""What every command has in common: options, progress, results, logs and the exit code.

Results go to stdout (`--json` for machines), logs and progress to stderr. Progress is a bar with an ETA on a terminal and a
line every few seconds elsewhere, so a log file shows that work goes on. Each stage's `__main__.py` builds a cyclopts app and
hands it to `run`.
"""

import errno
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from cyclopts import App, Parameter

from pipelines.errors import StageError, StorageFull
from pipelines.storage import Home, default_home, write_atomic

if TYPE_CHECKING:
    from pipelines.config import PipelinesConfig  # its models cost a quarter of `--help`'s time, so `tree` loads them

PLAIN_INTERVAL_S: Final = 5.0
"""Seconds between progress lines where there is no terminal."""

Tree = TypeVar("Tree", bound="PipelinesConfig")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every command."""

    config: Annotated[Path | None, Parameter(help="TOML file with settings; default: $TIDEGATE_CONFIG, else built-in defaults.")] = None
    set: Annotated[list[str], Parameter(name="--set", help="Override one setting: section.key=value. Repeatable.", negative="")] = field(
        default_factory=list
    )
    home: Annotated[Path | None, Parameter(help="Folder with all state; default: $TIDEGATE_HOME, else .tidegate here.")] = None
    json: Annotated[bool, Parameter(name="--json", help="Print the result as JSON on stdout.", negative="")] = False
    result: Annotated[Path | None, Parameter(help="Also write the result as JSON to this file.")] = None

    def tree(self, kind: type[Tree]) -> Tree:
        """Load the settings of one stage.

        Raises:
            ConfigError: See `pipelines.config.load`.
        """
        from pipelines.config import load

        from_environment = os.environ.get("TIDEGATE_CONFIG")
        path = self.config or (Path(from_environment) if from_environment else None)
        return load(kind, path, overrides=self.set)

    def place(self) -> Home:
        """Return the folder with all state."""
        return Home(self.home.absolute()) if self.home else default_home()

    def show(self, result: Mapping[str, Any], text: Callable[[], str]) -> None:
        """Print a result: JSON with `--json`, else the text for people; and write it to `--result` if given."""
        if self.result is not None:
            write_atomic(self.result, (json.dumps(result, default=str) + "\n").encode())
        print(json.dumps(result, default=str) if self.json else text())


@contextmanager
def progress(label: str, *, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show that work goes on.

    Args:
        label: What is being done, without a trailing colon.
        total: Units expected; None when unknown.

    Yields:
        `advance(n)`: n more units are done.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=False) as bar:
            task = bar.add_task(label, total=total)
            yield lambda n=1: bar.advance(task, n)
        return
    started = last = time.monotonic()
    done = 0

    def line(now: float) -> None:
        of_total = f"/{total}" if total else ""
        eta = f", about {(now - started) / done * (total - done):.0f} s left" if total and 0 < done < total else ""
        print(f"{label}: {done}{of_total} after {now - started:.0f} s{eta}", file=sys.stderr, flush=True)

    def advance(n: int = 1) -> None:
        nonlocal done, last
        done += n
        now = time.monotonic()
        if now - last >= PLAIN_INTERVAL_S:
            last = now
            line(now)

    print(f"{label} ...", file=sys.stderr, flush=True)
    yield advance
    line(time.monotonic())


@contextmanager
def waiting(label: str) -> Iterator[Callable[[str], None]]:
    """Show that something else is at work, and what it last said.

    Args:
        label: What is waited for, without a trailing colon.

    Yields:
        `tick(note)`: still waiting; `note` is the newest line of whoever works.
    """
    started = last = time.monotonic()
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(label) as spinner:
            yield lambda note: spinner.update(f"{label}: {time.monotonic() - started:.0f} s  [dim]{note[:100].replace('[', '(')}[/dim]")
        return
    said = ""

    def tick(note: str) -> None:
        nonlocal last, said
        now = time.monotonic()
        if now - last >= (PLAIN_INTERVAL_S if note != said else 6 * PLAIN_INTERVAL_S):
            last, said = now, note
            print(f"{label}: {now - started:.0f} s{': ' if note else ''}{note[:160]}", file=sys.stderr, flush=True)

    yield tick


class JsonFormatter(logging.Formatter):
    """One JSON object a line: constant message, level, logger, time, and the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one JSON line."""
        entry = {"at": self.formatTime(record), "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        return json.dumps(entry | getattr(record, "fields", {}), default=str)


class PlainFormatter(logging.Formatter):
    """The message and then the record's `fields`, for people."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line (and its trace, if it has one)."""
        fields = "".join(f", {name}: {value}" for name, value in getattr(record, "fields", {}).items())
        return super().format(record) + fields


def configure_logging() -> None:
    """Send logs to stderr: JSON when `TIDEGATE_LOG=json`, plain otherwise."""
    handler = logging.StreamHandler()
    plain = PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if os.environ.get("TIDEGATE_LOG") == "json" else plain)
    logging.basicConfig(level=os.environ.get("TIDEGATE_LOG_LEVEL", "WARNING"), handlers=[handler], force=True)


def run(app: App, arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code (see `pipelines.errors`); a foreseen failure prints one sentence, no traceback."""
    configure_logging()
    try:
        result = app(arguments, exit_on_error=False, print_error=True, result_action="return_value")
    except StageError as error:
        print(f"tidegate: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("tidegate: interrupted; the same command again goes on where it stopped", file=sys.stderr)
        return 130
    except Exception as error:
        from cyclopts import CycloptsError

        if isinstance(error, CycloptsError):
            return 2
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f" for {error.filename}" if error.filename else ""
            print(f"tidegate: no space left on the disk{where}; free some and run the same command again", file=sys.stderr)
            return StorageFull.exit_code
        if os.environ.get("TIDEGATE_DEBUG"):
            raise
        logging.getLogger(__name__).error("unforeseen failure", exc_info=error)
        what = f"unforeseen {type(error).__name__}: {error}"
        print(f"tidegate: {what}. This is a fault in Tidegate; the log above has the trace", file=sys.stderr)
        return 1
    return result if isinstance(result, int) else 0
