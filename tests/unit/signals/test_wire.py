"""Events as columns: one flat payload, generated from the models."""

import pyarrow as pa
import pytest

from pipelines.events import PAYLOADS
from signals import wire
from signals.tables import TABLES


def test_a_payload_field_that_two_types_share_has_one_type() -> None:
    kinds: dict[str, set[type]] = {}
    for model in PAYLOADS.values():
        for name, field in model.model_fields.items():
            kinds.setdefault(name, set()).add(wire.scalar_type(field.annotation))
    assert {name: found for name, found in kinds.items() if len(found) > 1} == {}


def test_every_payload_field_is_a_column() -> None:
    names = {name for model in PAYLOADS.values() for name in model.model_fields}
    assert set(wire.payload_columns()) == names


def test_the_column_text_names_types_as_spark_does() -> None:
    ddl = wire.json_ddl("_bad")
    assert ddl.startswith("type STRING, event_id STRING, schema_version BIGINT, session_id STRING")
    assert "client STRUCT<name: STRING, version: STRING>" in ddl
    assert "survival_no_revert: DOUBLE" in ddl
    assert "arguments_valid: BOOLEAN" in ddl
    assert ddl.endswith("_bad STRING")


def test_a_field_that_is_no_scalar_is_refused() -> None:
    with pytest.raises(TypeError, match="scalars"):
        wire.scalar_type(list[int])


def test_every_column_of_every_distilled_table_says_what_it_is() -> None:
    silent = [
        f"{name}.{field.name}"
        for name, table in TABLES.items()
        if name not in ("events", "samples")
        for field in table.schema
        if not (field.metadata or {}).get(b"doc")
    ]
    assert silent == []
    assert TABLES["events"].schema.field("payload").type.field("duration_ms").type == pa.float64()
