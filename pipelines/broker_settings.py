"""How the embedded Kafka node is set up: the JVM's options, its logging, and `server.properties`.

Takes: the settings tree's Kafka section, folders and ports. Gives: texts. Leaves out: the process itself (`broker.py`).
"""

from pathlib import Path
from typing import Final

from pipelines.config import KafkaConfig
from pipelines.topics import BATCH_OVERHEAD_BYTES

HOST: Final = "127.0.0.1"
"""The only address the node listens on: it has no authentication."""

JVM_OPTIONS: Final = (
    "-Xms64m",
    "-Xmx512m",
    "-XX:+UseSerialGC",  # a small heap on few cores: no parallel collector threads
    "-XX:TieredStopAtLevel=1",  # half the start-up time; peak speed does not matter at one agent fleet's event rate
    "-XX:+ExitOnOutOfMemoryError",
    "-Djava.awt.headless=true",
    "-Dfile.encoding=UTF-8",
)

LOG4J: Final = """\
status = error
appender.console.type = Console
appender.console.name = STDOUT
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = [%d] %p %m (%c)%n
rootLogger.level = warn
rootLogger.appenderRef.stdout.ref = STDOUT
logger.server.name = kafka.server
logger.server.level = info
"""


def properties(data: Path, config: KafkaConfig, *, port: int, controller_port: int) -> str:
    """Return the broker's `server.properties`.

    Args:
        data: Folder of the logs.
        config: Retention, event size and partitions.
        port: For clients.
        controller_port: For the node's own controller.
    """
    values = {
        "process.roles": "broker,controller",
        "node.id": 1,
        "controller.quorum.voters": f"1@{HOST}:{controller_port}",
        "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
        "controller.listener.names": "CONTROLLER",
        "log.dirs": data,
        # Topics are data with settings (topics.py); a misspelled name must fail, not appear.
        "auto.create.topics.enable": "false",
        "num.partitions": config.partitions,
        "log.retention.hours": config.retention_hours,
        "message.max.bytes": config.max_event_bytes + BATCH_OVERHEAD_BYTES,
        # One node: acknowledged events reach the disk within a second even if the machine loses power.
        "log.flush.interval.ms": 1_000,
        "log.flush.scheduler.interval.ms": 500,
        "log.segment.bytes": 128 * 1024 * 1024,
        "log.index.size.max.bytes": 1024 * 1024,
        "log.cleaner.dedupe.buffer.size": 16 * 1024 * 1024,
        # Internal topics, sized for one node.
        "offsets.topic.num.partitions": 1,
        "offsets.topic.replication.factor": 1,
        "transaction.state.log.num.partitions": 1,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "share.coordinator.state.topic.num.partitions": 1,
        "share.coordinator.state.topic.replication.factor": 1,
        "share.coordinator.state.topic.min.isr": 1,
        "group.initial.rebalance.delay.ms": 0,
        # After a kill the node waits this long for its former self before it serves again; Kafka's 9 s are for networks.
        "broker.session.timeout.ms": 3_000,
        "broker.heartbeat.interval.ms": 500,
        "num.network.threads": 2,
        "num.io.threads": 4,
        "background.threads": 2,
        "num.recovery.threads.per.data.dir": 2,
        # No telemetry and no JMX.
        "metric.reporters": "",
    }
    return "".join(f"{key}={value}\n" for key, value in values.items())
