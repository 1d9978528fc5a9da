"""How session events look as columns: one flat payload for all types, made from the models in `pipelines.events`.

Takes: the payload models. Gives: Spark DDL for `from_json`, Arrow types for the lake, and the value rules (required fields,
closed sets, ranges) that Spark checks as columns, so that the stream accepts what `pipelines.events` accepts.
Leaves out: Spark itself (`intake.py`) and what the values mean.
"""

from dataclasses import dataclass
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

import annotated_types
import pyarrow as pa
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipelines.events import PAYLOADS, Client, Envelope

SCALARS: Final[dict[type, tuple[str, pa.DataType]]] = {
    bool: ("BOOLEAN", pa.bool_()),
    int: ("BIGINT", pa.int64()),
    float: ("DOUBLE", pa.float64()),
    str: ("STRING", pa.string()),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What one field of an event must satisfy."""

    field: str
    required: bool
    """Whether null is refused."""
    values: tuple[str, ...] = ()
    """The closed set of values; empty when open."""
    at_least: float | None = None
    at_most: float | None = None
    min_chars: int | None = None
    max_chars: int | None = None


def scalar_type(annotation: Any) -> type:
    """Return the JSON scalar behind an annotation: `str` for enums and literals, the type itself without None.

    Raises:
        TypeError: The annotation is none of the kinds that a flat column schema can hold.
    """
    if get_origin(annotation) in (Union, UnionType):
        (inner,) = [part for part in get_args(annotation) if part is not NoneType]
        return scalar_type(inner)
    if get_origin(annotation) is Literal:
        return str
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return str
    if annotation in SCALARS:
        return annotation
    raise TypeError(f"{annotation!r} has no column type; payload fields are scalars (token arrays travel packed)")


def _closed_set(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) in (Union, UnionType):
        return next((found for part in get_args(annotation) if (found := _closed_set(part))), ())
    if get_origin(annotation) is Literal:
        return tuple(get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return tuple(member.value for member in annotation)
    return ()


def rule(name: str, field: FieldInfo) -> Rule:
    """Read the value rule of one model field."""
    nullable = NoneType in get_args(field.annotation)
    bounds: dict[str, Any] = {}
    for item in field.metadata:
        match item:
            case annotated_types.Ge():
                bounds["at_least"] = item.ge
            case annotated_types.Le():
                bounds["at_most"] = item.le
            case annotated_types.MinLen():
                bounds["min_chars"] = item.min_length
            case annotated_types.MaxLen():
                bounds["max_chars"] = item.max_length
            case _:
                raise TypeError(f"{name}: the stream cannot check {item!r}; use ge, le, min_length or max_length")
    return Rule(field=name, required=field.is_required() and not nullable, values=_closed_set(field.annotation), **bounds)


def _columns(model: type[BaseModel]) -> dict[str, type]:
    return {name: scalar_type(field.annotation) for name, field in model.model_fields.items()}


def payload_columns() -> dict[str, type]:
    """Return the fields of all payload types in one flat namespace, in order of first appearance.

    Raises:
        TypeError: One name has two types; rename the field in `pipelines.events`.
    """
    merged: dict[str, type] = {}
    for event_type, model in PAYLOADS.items():
        for name, kind in _columns(model).items():
            if merged.setdefault(name, kind) is not kind:
                raise TypeError(f"payload field {name} of {event_type} is {kind.__name__}, elsewhere {merged[name].__name__}")
    return merged


def envelope_columns() -> dict[str, type]:
    """Return the envelope's scalar fields; `client` and `payload` are structs and not among them."""
    fields = {name: field for name, field in Envelope.model_fields.items() if name != "client"}
    return {"type": str} | {name: scalar_type(field.annotation) for name, field in fields.items()}


def _ddl(columns: dict[str, type]) -> str:
    return ", ".join(f"{name}: {SCALARS[kind][0]}" for name, kind in columns.items())


def json_ddl(corrupt_column: str) -> str:
    """Return the DDL that `from_json` reads an event with.

    Args:
        corrupt_column: Where Spark puts the text of a record that does not fit.
    """
    top = ", ".join(f"{name} {SCALARS[kind][0]}" for name, kind in envelope_columns().items())
    return f"{top}, client STRUCT<{_ddl(_columns(Client))}>, payload STRUCT<{_ddl(payload_columns())}>, {corrupt_column} STRING"


def arrow_fields() -> list[pa.Field]:
    """Return the event's columns as Arrow fields: envelope, client, payload."""
    scalars = [pa.field(name, SCALARS[kind][1]) for name, kind in envelope_columns().items()]
    client = pa.struct([pa.field(name, SCALARS[kind][1]) for name, kind in _columns(Client).items()])
    payload = pa.struct([pa.field(name, SCALARS[kind][1]) for name, kind in payload_columns().items()])
    return [*scalars, pa.field("client", client), pa.field("payload", payload)]


def envelope_rules() -> list[Rule]:
    """Return the rules of the envelope and of `client`."""
    rules = [rule(name, field) for name, field in Envelope.model_fields.items() if name != "client"]
    return rules + [rule(f"client.{name}", field) for name, field in Client.model_fields.items()]


def payload_rules() -> dict[str, list[Rule]]:
    """Return the rules of each event type's payload fields, named `payload.<field>`."""
    return {kind: [rule(f"payload.{name}", field) for name, field in model.model_fields.items()] for kind, model in PAYLOADS.items()}
