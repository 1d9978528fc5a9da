"""Large events that travel as a claim check, read back in bulk: the record is replaced by the file it names.

Native Spark: files are read as binary, hashed, and joined to the records by the hash, so a file that was altered joins nothing.

Takes: records of a batch that are claims. Gives: the same records with the event's bytes as value, and a fault where there are none.
Leaves out: what a claim is and who writes it (`pipelines/claims.py`), what the event is worth (`intake.py`, asked here).
"""

from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from pipelines import claims
from pipelines.storage import Home
from signals import intake
from signals.config import SignalsConfig

MISSING: Final = "claim_missing"
MISMATCH: Final = "claim_mismatch"
FOREIGN: Final = "claim_foreign"
FAULTS: Final = (MISSING, MISMATCH, FOREIGN)
"""The file is gone; its bytes are others; it lies outside the configured folder, where a record must not make us read."""


def is_claim(value: str) -> Column:
    """Return whether a record's value is a claim."""
    return F.substring(F.col(value), 1, len(claims.MARK)) == F.lit(claims.MARK)


def are_claims(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return for each record's value whether it is a claim."""
    return pc.fill_null(pc.starts_with(values.cast(pa.large_binary()), claims.MARK), False)


def hadoop_uri(uri: str) -> str:
    """Return the address as Spark's file systems know it."""
    return f"s3a://{uri.removeprefix('s3://')}" if uri.startswith("s3://") else uri


def redeem(spark: SparkSession, records: DataFrame, *, root: str) -> tuple[DataFrame, dict[str, DataFrame]]:
    """Replace claims by what they name.

    Args:
        spark: The session.
        records: Records that are claims: `key`, `value`, `topic`, `partition`, `offset`, `timestamp`.
        root: The address all files must be under.

    Returns:
        The records whose event was found, with its bytes as `value`; and by fault those that have none, unchanged.
    """
    text = F.col("value").cast("string")
    named = records.withColumns({"_uri": F.get_json_object(text, "$.claim.uri"), "_sha": F.get_json_object(text, "$.claim.sha256")})
    named = named.localCheckpoint()
    addresses = sorted(row["_uri"] or "" for row in named.select("_uri").distinct().collect())
    allowed = [uri for uri in addresses if uri.startswith(f"{root}/") and ".." not in urlsplit(uri).path.split("/")]
    present = [uri for uri in allowed if _exists(spark, hadoop_uri(uri))]
    columns = records.columns
    permitted = F.coalesce(F.col("_uri").isin(allowed), F.lit(False)) if allowed else F.lit(False)
    known = F.coalesce(F.col("_uri").isin(present), F.lit(False)) if present else F.lit(False)
    fault = F.when(~permitted, FOREIGN).when(~known, MISSING).when(F.col("_content").isNull(), MISMATCH)
    if present:
        files = spark.read.format("binaryFile").load([hadoop_uri(uri) for uri in present])
        hashed = files.select(F.sha2("content", 256).alias("_sha"), F.col("content").alias("_content")).dropDuplicates(["_sha"])
        joined = named.join(hashed, "_sha", "left")
    else:
        joined = named.withColumn("_content", F.lit(None).cast("binary"))
    judged = joined.withColumn("_fault", fault).localCheckpoint()
    whole = judged.where("_fault IS NULL").withColumn("value", F.col("_content")).select(*columns)
    return whole, {name: judged.where(F.col("_fault") == name).select(*columns) for name in FAULTS}


def redeemed(judged: DataFrame, config: SignalsConfig, home: Home) -> DataFrame:
    """Put events that lie in files in the place of the records that name them.

    Args:
        judged: From `intake.judged`, for which a claim is no event.
        config: Limits.
        home: The deployment.

    Returns:
        The same records and columns; a claim whose event cannot be had is refused with its fault as the reason.
    """
    claim = is_claim("raw") & F.col("reason").isNotNull()
    place = ("topic", "partition", "offset")
    records = judged.where(claim).select("key", F.col("raw").alias("value"), *place, F.col("arrived_at").alias("timestamp"))
    whole, lost = redeem(judged.sparkSession, records, root=claims.root(config.kafka, home))
    limits = intake.limits(config)
    found = judged.where(~claim).unionByName(intake.judged(whole, replace(limits, max_bytes=config.kafka.max_claim_bytes)))
    for fault, frame in lost.items():
        found = found.unionByName(intake.judged(frame, limits).withColumn("reason", F.lit(fault)))
    return found


def _exists(spark: SparkSession, uri: str) -> bool:
    session: Any = spark
    path = session.sparkContext._jvm.org.apache.hadoop.fs.Path(uri)
    return bool(path.getFileSystem(session._jsparkSession.sessionState().newHadoopConf()).exists(path))
