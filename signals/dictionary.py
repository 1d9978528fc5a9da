"""The data dictionary: every table and column of the lake and every field of an event, with type, unit and meaning.

Made from the contracts themselves (`tables.py`, `samples.py`, `pipelines/events.py`), so it cannot say something else than they do:
`tidegate signals dictionary --markdown signals/DICTIONARY.md` writes the committed copy, and a test compares the two.

Takes: nothing. Gives: records, and the same as Markdown. Leaves out: values (`tidegate signals tables` counts rows).
"""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import pyarrow as pa

from pipelines import events
from signals.tables import TABLES
from signals.wire import payload_columns

UNITS: Final = (
    ("_ms", "milliseconds"),
    ("_s", "seconds"),
    ("_bytes", "bytes"),
    ("_tokens", "tokens"),
    ("_chars", "characters"),
    ("_ids", "token ids"),
    ("_logprobs", "nats"),
)
"""Units are the ends of names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table, or one field of an event."""

    name: str
    type: str
    unit: str
    """Empty where there is none."""
    doc: str
    used_by: tuple[str, ...] = ()
    """Event types that have the field; empty for columns of every row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One table."""

    name: str
    row: str
    """What one row is."""
    partitioned_by: tuple[str, ...]
    columns: tuple[Column, ...]


def unit(name: str, kind: pa.DataType) -> str:
    """Return the unit that a column's name and type say."""
    if pa.types.is_timestamp(kind):
        return "instant, UTC"
    if pa.types.is_date(kind):
        return "UTC day"
    if name.startswith("chars_"):
        return "characters"
    return next((unit for end, unit in UNITS if name.endswith(end)), "")


@cache
def event_docs() -> dict[str, dict[str, str]]:
    """Return what the event models say of their fields: class -> field -> text, read from the contract's source."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(Path(events.__file__).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            own = found.setdefault(node.name, {})
            for item, after in zip(node.body, node.body[1:], strict=False):
                if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
                    continue
                match after:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        own[item.target.id] = re.sub(r"\s+", " ", text).strip()
                    case _:
                        pass
    return found


def payload_fields() -> list[Column]:
    """Return the fields of all event types in one list; a field of several types is said once for each meaning."""
    docs = event_docs()
    found: list[Column] = []
    for name, kind in payload_columns().items():
        said: dict[str, list[str]] = {}
        for event_type, model in events.PAYLOADS.items():
            if name in model.model_fields:
                said.setdefault(docs.get(model.__name__, {}).get(name, ""), []).append(event_type)
        text = " / ".join(f"{doc} ({', '.join(types)})" if len(said) > 1 else doc for doc, types in said.items())
        types = tuple(event_type for own in said.values() for event_type in own)
        arrow = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}[kind]
        found.append(Column(name=f"payload.{name}", type=str(arrow), unit=unit(name, arrow), doc=text, used_by=types))
    return found


def _event_columns(field: pa.Field) -> list[Column]:
    """Return the columns of one field of the table `events`."""
    docs = event_docs()
    if field.name == "payload":
        return payload_fields()
    if field.name == "client":
        return [
            Column(name=f"client.{own.name}", type=str(own.type), unit="", doc=docs["Client"].get(own.name, "")) for own in list(field.type)
        ]
    text = "Type of the event: " + ", ".join(events.PAYLOADS) + "." if field.name == "type" else docs["Envelope"].get(field.name, "")
    return [Column(name=field.name, type=str(field.type), unit=unit(field.name, field.type), doc=text)]


def entries() -> tuple[Entry, ...]:
    """Return every table."""
    found: list[Entry] = []
    for table in TABLES.values():
        columns: list[Column] = []
        for field in table.schema:
            text = (field.metadata or {}).get(b"doc", b"").decode()
            if text:
                columns.append(Column(name=field.name, type=str(field.type), unit=unit(field.name, field.type), doc=text))
            else:
                columns += _event_columns(field)
        found.append(Entry(name=table.name, row=table.row, partitioned_by=table.partition_by, columns=tuple(columns)))
    return tuple(found)


def markdown() -> str:
    """Return the dictionary as Markdown."""
    lines = [
        "# Data dictionary",
        "",
        "Tables of the lake (Delta over Parquet, one folder each under `lake/`), made from the contracts by",
        "`tidegate signals dictionary --markdown signals/DICTIONARY.md`. A test compares this file with them. All instants are UTC.",
        "How to read them: `signals/lake.py`.",
        "",
    ]
    for entry in entries():
        partitions = f" Partitioned by {', '.join(f'`{name}`' for name in entry.partitioned_by)}." if entry.partitioned_by else ""
        lines += [f"## {entry.name}", "", f"One row: {entry.row}.{partitions}", ""]
        lines += ["| column | type | unit | meaning |", "|---|---|---|---|"]
        for column in entry.columns:
            used = f" In {', '.join(column.used_by)}." if column.used_by else ""
            cells = (f"`{column.name}`", column.type, column.unit, f"{column.doc}{used}")
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)
