"""The embedded broker: a real Kafka that starts, serves, keeps its data, and leaves nothing behind however it ends."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pipelines import kafka
from pipelines.broker import EmbeddedBroker, address, running
from pipelines.config import KafkaConfig, PipelinesConfig
from pipelines.errors import BrokerUnavailable, Busy, ConfigError, MissingDependency
from pipelines.java import find_java, jars_folder
from pipelines.storage import Home, write_atomic
from tests.support.processes import runs

pytestmark = pytest.mark.kafka

HOLDER = """
import sys, time
from pathlib import Path
from pipelines.broker import EmbeddedBroker
from pipelines.storage import Home
with EmbeddedBroker(Home(Path(sys.argv[1]))) as broker:
    print(broker.bootstrap, flush=True)
    time.sleep(600)
"""


def eventually(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.05)
    return False


def end_offsets(config: KafkaConfig, home: Home) -> dict[int, int]:
    return kafka.end_offsets(PipelinesConfig(kafka=config), home)


def send(config: KafkaConfig, home: Home, count: int) -> None:
    with kafka.Producer(PipelinesConfig(kafka=config), home) as producer:
        for number in range(count):
            producer.send(f'{{"n": {number}}}'.encode(), f"session-{number}")


def test_it_listens_on_loopback_only(broker: EmbeddedBroker) -> None:
    found = running(broker.home)
    assert found is not None
    listening = {c.laddr.ip for c in psutil.Process(found.pid).net_connections() if c.status == psutil.CONN_LISTEN}
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}


def test_a_second_start_in_the_same_home_is_refused_while_the_first_serves(broker: EmbeddedBroker) -> None:
    with pytest.raises(Busy, match=r"runs already \(pid \d+, 127\.0\.0\.1:\d+\)"):
        EmbeddedBroker(broker.home).start()
    assert address(broker.home) == broker.bootstrap


def test_a_topic_nobody_created_is_not_made_by_asking_for_it(broker: EmbeddedBroker, kafka_config: KafkaConfig, home: Home) -> None:
    with pytest.raises(BrokerUnavailable):
        end_offsets(kafka_config, home)


def test_data_and_port_survive_a_restart(home: Home) -> None:
    config = KafkaConfig(partitions=1)
    first = EmbeddedBroker(home)
    with first:
        kafka.ensure_topics(PipelinesConfig(kafka=config), home)
        send(config, home, 25)
        before = first.bootstrap
    assert address(home) is None
    with EmbeddedBroker(home) as second:
        assert second.bootstrap == before
        assert end_offsets(config, home) == {0: 25}


def test_acknowledged_events_survive_a_killed_broker(home: Home) -> None:
    config = KafkaConfig(partitions=1)
    killed = EmbeddedBroker(home)
    found = killed.start(detached=True)
    kafka.ensure_topics(PipelinesConfig(kafka=config), home)
    send(config, home, 10)
    os.kill(found.pid, signal.SIGKILL)
    assert eventually(lambda: address(home) is None)
    with pytest.raises(BrokerUnavailable, match="start it with: tidegate up"):
        _ = killed.bootstrap
    with EmbeddedBroker(home):
        assert end_offsets(config, home) == {0: 10}


def test_an_attached_broker_dies_with_a_killed_parent_and_the_next_start_goes_on(home: Home) -> None:
    parent = subprocess.Popen([sys.executable, "-c", HOLDER, str(home.root)], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        bootstrap = parent.stdout.readline().strip()
        found = running(home)
        assert found is not None
        assert found.bootstrap == bootstrap
        parent.kill()
    with EmbeddedBroker(home) as broker:
        assert not runs(found.pid, started_s=found.started_s)
        assert broker.bootstrap == bootstrap


def test_a_detached_broker_outlives_its_starter_and_is_stopped_by_another_process(home: Home) -> None:
    start = "import sys; from pathlib import Path; from pipelines.broker import EmbeddedBroker; from pipelines.storage import Home; "
    start += "EmbeddedBroker(Home(Path(sys.argv[1]))).start(detached=True)"
    subprocess.run([sys.executable, "-c", start, str(home.root)], check=True)
    found = running(home)
    assert found is not None
    EmbeddedBroker(home).stop()
    assert not runs(found.pid)
    assert address(home) is None
    assert not (home.run / "broker.json").exists()


def test_stopping_what_does_not_run_does_nothing(home: Home) -> None:
    EmbeddedBroker(home).stop()
    assert address(home) is None


def test_a_record_that_names_another_process_counts_as_not_running(home: Home) -> None:
    write_atomic(
        home.run / "broker.json", f'{{"bootstrap": "127.0.0.1:1", "pid": {os.getpid()}, "started_s": 1.0, "parent": null}}'.encode()
    )
    assert address(home) is None


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"bootstrap": "x"}', b'{"bootstrap": "x", "pid": 1, "started_s": 1, "parent": null, "more": 2}']
)
def test_a_damaged_record_counts_as_not_running(home: Home, text: bytes) -> None:
    write_atomic(home.run / "broker.json", text)
    assert address(home) is None


def test_a_taken_port_is_named(home: Home) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken"):
            EmbeddedBroker(home, port=port).start()
    assert address(home) is None


def test_a_broker_that_cannot_start_says_what_its_log_says_and_leaves_no_process(home: Home) -> None:
    (home.broker / "data").mkdir(parents=True)
    (home.broker / "data" / "meta.properties").write_text("version=1\ncluster.id=another\nnode.id=77\n")
    broker = EmbeddedBroker(home)
    with pytest.raises(BrokerUnavailable, match=r"(?s)ended while starting.*broker\.log ends with:.*node.id") as raised:
        broker.start()
    assert "\tat " not in str(raised.value)
    assert not [p for p in psutil.Process().children(recursive=True) if str(home.root) in " ".join(_command_line(p))]


def _command_line(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def test_without_java_the_message_says_which_command_installs_it(tmp_path: Path) -> None:
    with pytest.raises(MissingDependency, match=r"Java 17\.0\.11 or later is not installed.*apt-get install openjdk-17-jre-headless"):
        find_java({"PATH": str(tmp_path)})


def test_an_old_java_is_refused_by_version(tmp_path: Path) -> None:
    old = tmp_path / "java"
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.22\" 2024-01-16' >&2\n")
    old.chmod(0o755)
    with pytest.raises(MissingDependency, match=r"is Java 11\.0\.22, 17\.0\.11 is needed"):
        find_java({"PATH": str(tmp_path)})


def test_the_pinned_jars_are_where_setup_puts_them() -> None:
    assert next(jars_folder("kafka").glob("kafka_2.13-*.jar")).name == "kafka_2.13-4.3.1.jar"
    assert next(jars_folder("spark").glob("delta-spark_*.jar")).name == "delta-spark_4.2_2.13-4.4.0.jar"
