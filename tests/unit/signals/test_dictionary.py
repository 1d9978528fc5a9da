"""The data dictionary says what the contracts say, of every column."""

from pathlib import Path

import pytest

from pipelines.events import PAYLOADS
from signals import dictionary
from signals.tables import TABLES

COMMITTED = Path(dictionary.__file__).with_name("DICTIONARY.md")


def test_the_committed_dictionary_is_the_one_the_contracts_give() -> None:
    assert COMMITTED.read_text(encoding="utf-8") == dictionary.markdown(), (
        "write it again: tidegate signals dictionary --markdown signals/DICTIONARY.md"
    )


def test_every_column_of_every_table_and_every_field_of_every_event_is_explained() -> None:
    entries = dictionary.entries()
    assert [entry.name for entry in entries] == list(TABLES)
    assert [(entry.name, column.name) for entry in entries for column in entry.columns if not column.doc] == []
    (events,) = [entry for entry in entries if entry.name == "events"]
    named = {column.name for column in events.columns}
    assert {f"payload.{name}" for model in PAYLOADS.values() for name in model.model_fields} <= named


@pytest.mark.parametrize(
    ("table", "column", "unit"),
    [
        ("turns", "sampling_ms", "milliseconds"), ("turns", "started_at", "instant, UTC"), ("turns", "prompt_tokens", "tokens"),
        ("edits", "horizon_s", "seconds"), ("edits", "chars_added", "characters"), ("samples", "behaviour_logprobs", "nats"),
        ("turns", "date", "UTC day"), ("turns", "outcome", ""),
    ],
)  # fmt: skip
def test_units_follow_from_names_and_types(table: str, column: str, unit: str) -> None:
    (entry,) = [entry for entry in dictionary.entries() if entry.name == table]
    assert [found.unit for found in entry.columns if found.name == column] == [unit]


def test_a_field_that_means_two_things_says_both_with_their_events() -> None:
    (duration,) = [column for column in dictionary.payload_fields() if column.name == "payload.duration_ms"]
    assert duration.used_by == ("completion", "tool_result")
    assert "(completion) / " in duration.doc
