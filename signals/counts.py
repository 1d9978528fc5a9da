"""The table `ledger_counts`: how many turns had which outcome, and whether that adds up.

A distil adds what its turns are to what was counted before and takes off what they were, so that it costs what changed. It may do so only
where the counts are those of the turns it found: the commit of the counts carries the version of `turns` it belongs to, as a Delta
transaction. Where that is another one (a run was killed in between, a user was forgotten, files were merged), all turns are counted again.

Takes: the lake. Gives: rows of `ledger_counts`, sums, problems. Leaves out: what an outcome is (`outcomes.py`).
"""

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from pipelines.errors import ContractViolation
from pipelines.storage import Home
from signals import lake
from signals.tables import DAY, TABLES

TABLE: Final = "ledger_counts"
KEYS: Final = tuple(name for name in TABLES[TABLE].schema.names if name != "turns")
"""Columns of `turns` that are counted by."""
BELONGS_TO: Final = "turns"
"""The transaction whose number is a version of `turns`."""


def recount(home: Home, days: Sequence[date]) -> list[dict[str, Any]]:
    """Count the turns of some days."""
    turns = lake.scan(home, "turns", KEYS, ds.field(DAY).isin(list(days)))
    return counted(turns).to_pylist()


def counted(turns: pa.Table) -> pa.Table:
    """Count rows of `turns`: the columns `KEYS` and `turns`."""
    return turns.select(KEYS).group_by(list(KEYS)).aggregate([([], "count_all")]).rename_columns([*KEYS, "turns"])


def version(home: Home) -> int:
    """Return the version of `turns` as it is now."""
    return lake.open_table(home, "turns").version()


def update(home: Home, before: int, *, added: Sequence[Mapping[str, Any]], taken: pa.Table | None) -> None:
    """Bring the counts up to what `turns` holds now.

    Args:
        home: The deployment.
        before: The version of `turns` before it was changed.
        added: Turns that came, by `KEYS`.
        taken: Rows of `turns` that went, with the columns `KEYS`; None when none did.

    Raises:
        ContractViolation: A table cannot be read.
        StorageFull: No space left.
    """
    after = version(home)
    if lake.open_table(home, TABLE).transaction_version(BELONGS_TO) != before or after > before + 1:
        held = [lake.scan(home, name, [DAY])[DAY].unique().to_pylist() for name in ("turns", TABLE)]
        days = sorted({day for own in held for day in own})
        lake.replace_days(home, TABLE, recount(home, days), days, transaction=(BELONGS_TO, after))
        return
    schema = lake.nullable(pa.schema([TABLES[TABLE].schema.field(name) for name in (*KEYS, "turns")])).remove_metadata()
    came = pa.Table.from_pylist([dict(row) for row in added], schema=schema)
    went = counted(taken if taken is not None else came.slice(0, 0))
    went = went.set_column(len(KEYS), "turns", pc.negate(went["turns"]))
    days = sorted({*came[DAY].to_pylist(), *went[DAY].to_pylist()})
    known = lake.scan(home, TABLE, [*KEYS, "turns"], ds.field(DAY).isin(days)).select(schema.names)
    whole = pa.concat_tables([known.cast(schema), came, went.cast(schema)]).group_by(list(KEYS)).aggregate([("turns", "sum")])
    rows = whole.filter(pc.greater(whole["turns_sum"], 0)).rename_columns([*KEYS, "turns"]).to_pylist()
    lake.replace_days(home, TABLE, rows, days, transaction=(BELONGS_TO, after))


def outcomes(home: Home) -> dict[str, int]:
    """Return all turns of the lake by outcome.

    Raises:
        ContractViolation: They are more or fewer than the rows of `turns`.
    """
    found: dict[str, int] = {}
    for row in lake.counts(home):
        found[row["outcome"]] = found.get(row["outcome"], 0) + row["turns"]
    if (number := lake.count(home, "turns")) != sum(found.values()):
        raise ContractViolation(
            f"the lake at {home.lake} holds {number} turn rows and counts {sum(found.values())} outcomes; "
            "run: tidegate signals run --once --everything"
        )
    return dict(sorted(found.items()))


def not_one(home: Home) -> tuple[int, int, int]:
    """Return how many rows `turns` has, of how many turns, and how many of them have no outcome; looks at all of them."""
    turns = lake.scan(home, "turns", ["session_id", "turn_id", "outcome"])
    return turns.num_rows, turns.group_by(["session_id", "turn_id"]).aggregate([]).num_rows, turns["outcome"].null_count
