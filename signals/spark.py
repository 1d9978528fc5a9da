"""The Spark session of the signal stage, and how Spark's own failures become ours.

Takes: settings and the deployment's home. Gives: one session with exact versions, own jars, quiet logs and the Delta settings
that keep the tables readable by others (no deletion vectors, no column mapping). Leaves out: what is computed with it.
"""

import importlib.metadata
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException, PySparkException, PySparkTypeError, PySparkValueError
from pyspark.sql import SparkSession

from pipelines import java
from pipelines.errors import BrokerUnavailable, ContractViolation, MissingDependency, StorageFull, TransientError
from pipelines.storage import Home
from signals.config import SparkConfig

VERSIONS: Final = {"pyspark": "4.2.0", "delta-spark": "4.4.0"}
"""Delta breaks across Spark patch releases (delta-io/delta#6867, #6888), so anything else is refused."""
JARS: Final = (
    "delta-spark_4.2_2.13-4.4.0.jar",
    "delta-storage-4.4.0.jar",
    "spark-sql-kafka-0-10_2.13-4.2.0.jar",
    "spark-token-provider-kafka-0-10_2.13-4.2.0.jar",
)
"""Jars without which nothing works; their dependencies lie in the same folder."""

ONE_THREAD: Final = ("POLARS_MAX_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""What a Python task computes with starts a thread for every core, unless these say 1; Spark runs as many tasks as there are cores."""

LOG4J: Final = """\
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = {folder}/spark.log
appender.file.filePattern = {folder}/spark.log.%i
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{yyyy-MM-dd HH:mm:ss}} %p %c{{1}}: %m%n%ex
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 20MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 3
"""


def check_versions(jars: Path) -> None:
    """Refuse combinations that are known to break, before Spark starts.

    Raises:
        MissingDependency: A package, a jar or Java is missing or of another version; says how to install it.
    """
    for package, wanted in VERSIONS.items():
        found = importlib.metadata.version(package)
        if found != wanted:
            raise MissingDependency(f"{package} {found} is installed but {wanted} is needed exactly; run infra/scripts/setup")
    if missing := [name for name in JARS if not (jars / name).exists()]:
        raise MissingDependency(f"{jars} lacks {missing[0]}; run infra/scripts/setup, or set spark.jars to a folder that has it")
    java.find_java()


def jars_folder(config: SparkConfig) -> Path:
    """Return the folder with the connector jars."""
    return Path(config.jars) if config.jars else java.jars_folder("spark")


def settings(config: SparkConfig, home: Home, jars: Path) -> dict[str, str]:
    """Return every Spark setting of a session, by name."""
    local = config.master.startswith("local")
    options = (
        f"-Dlog4j2.configurationFile=file:{home.logs.absolute() / 'spark-log4j2.properties'} "
        f"-Djava.io.tmpdir={home.streams.absolute() / 'tmp'}"
    )
    if local:
        # The serial collector and the first compiler tier: two cores are shared with everything else, and a run is short.
        options += " -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
    return {
        "spark.jars": ",".join(str(path.absolute()) for path in sorted(jars.glob("*.jar"))),
        "spark.driver.memory": config.driver_memory,
        "spark.driver.extraJavaOptions": options,
        **({"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"} if local else {}),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.pyspark.python": sys.executable,
        "spark.pyspark.driver.python": sys.executable,
        **{f"spark.executorEnv.{name}": "1" for name in ONE_THREAD},
        "spark.local.dir": str(home.streams.absolute() / "tmp"),
        "spark.sql.warehouse.dir": str(home.streams.absolute() / "tmp" / "warehouse"),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(config.shuffle_partitions),
        "spark.sql.adaptive.enabled": "false" if local else "true",
        "spark.sql.autoBroadcastJoinThreshold": "-1" if local else "10485760",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # A batch for a Python worker is bounded by its bytes too: ten thousand records of the largest size are ten gigabytes.
        "spark.sql.execution.arrow.maxBytesPerBatch": str(32 * 2**20),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "2",
        "spark.databricks.delta.properties.defaults.enableDeletionVectors": "false",
        "spark.databricks.delta.schema.autoMerge.enabled": "false",
        "spark.cleaner.referenceTracking.cleanCheckpoints": "true",
        **config.conf,
    }


@contextmanager
def session(config: SparkConfig, home: Home) -> Iterator[SparkSession]:
    """Start Spark for the life of the block.

    Raises:
        MissingDependency: See `check_versions`.
        StorageFull: No space for Spark's own files (it copies its jars).
        TransientError: Spark does not start; the message names its log.
    """
    jars = jars_folder(config)
    check_versions(jars)
    home.logs.mkdir(parents=True, exist_ok=True)
    (home.streams / "tmp").mkdir(parents=True, exist_ok=True)
    (home.logs / "spark-log4j2.properties").write_text(LOG4J.format(folder=home.logs.absolute()), encoding="utf-8")
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # What a batch raises comes back as the query's failure and is said there, in one sentence; py4j would print it with its stack as well.
    logging.getLogger("py4j.clientserver").setLevel(logging.CRITICAL)
    builder = SparkSession.builder.appName("tidegate-signals").master(config.master)
    for name, value in settings(config, home, jars).items():
        builder = builder.config(name, value)
    with boundary("starting Spark"):
        spark = builder.getOrCreate()
        spark.sparkContext.setLogLevel("WARN")
    try:
        yield spark
    finally:
        spark.stop()


@contextmanager
def boundary(what: str) -> Iterator[None]:
    """Turn Spark's failures inside the block into ours.

    Args:
        what: What was being done, for the message.

    Raises:
        BrokerUnavailable: Kafka stopped answering.
        ContractViolation: Kafka lost offsets that were not read yet.
        StorageFull: The disk is full.
        TransientError: Any other failure inside Spark; the message names its log.
    """
    try:
        yield
    except (PySparkTypeError, PySparkValueError, AnalysisException):
        raise  # A mistake in our own code, not a failure of Spark.
    except (PySparkException, Py4JError) as error:
        text = str(error)
        if re.search(r"OffsetOutOfRange|failOnDataLoss|data loss|may have been lost|were aged out", text, re.IGNORECASE):
            raise ContractViolation(
                f"{what}: Kafka no longer has events that were not read yet; to go on without them add --accept-gap"
            ) from error
        if re.search(
            r"kafka.*(Timeout|timed out)|Timeout(Exception)? .*(kafka|partition|node|metadata)|UnknownTopicOrPartition", text, re.DOTALL
        ):
            raise BrokerUnavailable(
                f"{what}: the Kafka cluster stopped answering; the same command again goes on where it stopped"
            ) from error
        if re.search(r"No space left on device|Disk quota exceeded", text):
            raise StorageFull(f"{what}: no space left on the disk; free some and run the same command again") from error
        first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
        raise TransientError(f"{what}: Spark failed ({first[:300]}); see spark.log in the deployment's logs") from error
