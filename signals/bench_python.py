"""The reward rules as stateful Python per session: what the columns of `transforms.py` are compared with in the bench.

`applyInPandasWithState` and not `applyInPandas`, because it is what one would write instead of append and distil: it takes events as they
come, keeps the session's earlier ones in its state and gives the session's turns anew. The rules are the pure mirrors in `sessions.py`, so
the numbers it yields are the same. To its advantage it writes turns with rewards only, neither events nor samples.

Takes: Kafka records. Gives: rows (session, turn, outcome, reason, reward). Leaves out: measuring (`bench.py`).
"""

import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from pipelines import codec
from pipelines.errors import Rejected
from signals import sessions
from signals.config import RewardsConfig

ROWS: Final = "session_id string, turn_id string, outcome string, outcome_reason string, reward double"
COLUMNS: Final = ("session_id", "turn_id", "outcome", "outcome_reason", "reward")


def turns(values: Iterable[bytes], config: RewardsConfig, *, max_bytes: int, now_ms: int) -> list[dict[str, Any]]:
    """Distil the records of one session.

    Args:
        values: Records in any order; those that are no events are passed over.
        config: Window and weights.
        max_bytes: Larger records are no events.
        now_ms: The instant that windows are closed against.
    """
    events = [event for value in values if not isinstance(event := codec.decode(value, max_bytes, now_ms=now_ms), Rejected)]
    found = sessions.distil([event.model_dump(mode="json") for event in events], config, now_ms=now_ms)
    return [
        {
            "session_id": t.session_id,
            "turn_id": t.turn_id,
            "outcome": t.outcome.value,
            "outcome_reason": t.outcome_reason,
            "reward": t.reward,
        }
        for t in found
    ]


def per_session(records: DataFrame, config: RewardsConfig, *, max_bytes: int, now_ms: int) -> DataFrame:
    """Return the turns of a stream of Kafka records, recomputed session by session as records come.

    Args:
        records: Spark's Kafka source, streaming.
        config: Window and weights.
        max_bytes: Larger records are no events.
        now_ms: The instant that windows are closed against.
    """
    keyed = records.where("key IS NOT NULL AND value IS NOT NULL").select(F.col("key").cast("string").alias("session"), "value")
    return keyed.groupBy("session").applyInPandasWithState(
        _recompute(config, max_bytes=max_bytes, now_ms=now_ms),
        outputStructType=ROWS,
        stateStructType="seen binary",
        outputMode="append",
        timeoutConf=GroupStateTimeout.NoTimeout,
    )


def _recompute(
    config: RewardsConfig, *, max_bytes: int, now_ms: int
) -> Callable[[tuple[str], Iterator[pd.DataFrame], GroupState], Iterator[pd.DataFrame]]:
    def recompute(_key: tuple[str], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"pyspark\.")  # of pandas, about what Spark does with the rows
        seen: list[bytes] = pickle.loads(state.get[0]) if state.exists else []
        for frame in frames:
            seen += [bytes(value) for value in frame["value"]]
        state.update((pickle.dumps(seen),))  # One column: Spark 4.2 cannot read an array back from the state here
        yield pd.DataFrame(turns(seen, config, max_bytes=max_bytes, now_ms=now_ms), columns=pd.Index(COLUMNS))

    return recompute
