"""How session events look as columns: one flat payload for all types, made from the models in `pipelines.events`.

Takes: the payload models. Gives: Arrow types for the lake, and Spark DDL for `from_json`, which the bench compares with. Leaves out: Spark
itself, and what the values mean.
"""

from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

import pyarrow as pa
from pydantic import BaseModel

from pipelines.events import PAYLOADS, Client, Envelope

SCALARS: Final[dict[type, tuple[str, pa.DataType]]] = {
    bool: ("BOOLEAN", pa.bool_()),
    int: ("BIGINT", pa.int64()),
    float: ("DOUBLE", pa.float64()),
    str: ("STRING", pa.string()),
}


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
