"""How long an event takes to become a reward: the continuous job as its own process, a steady stream of sessions, and a look at the lake.

A session here is six events and ends at once, so that its reward is final as soon as it is distilled. Its time runs from the recording of
its last event to the moment a reader finds its row in the table `rewards`.

Takes: settings, a home with a broker. Gives: seconds by session. Leaves out: Spark, which the job's process has.
"""

import json
import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pipelines import codec, kafka
from pipelines.errors import StageError, TransientError
from pipelines.events import EVENT, Event, new_id, pack_ids, pack_logprobs
from pipelines.storage import Home
from signals import lake
from signals.bench_meter import Meter
from signals.bench_topics import KAFKA_PARTITIONS
from signals.config import SignalsConfig

SESSIONS_A_SECOND: Final = 10
"""Sixty events a second: an agent fleet of some hundreds of users."""
LOOK_S: Final = 0.2
START_TIMEOUT_S: Final = 240.0
"""Longest wait for the first reward, with Spark's start in it."""
STOP_TIMEOUT_S: Final = 60.0
PATIENCE_S: Final = 120.0
"""Longest wait for the last rewards, or eight triggers where that is longer."""


@dataclass(slots=True)
class Live:
    """What was seen."""

    trigger_s: float
    seconds: list[float] = field(default_factory=list)
    """Of each session; of those whose reward was not found, the time they were waited for."""
    sent: int = 0
    unseen: int = 0
    """Sessions whose reward did not come while it was waited for."""
    peak_rss_bytes: int = 0
    """Of the job's process, its JVM and its workers."""


def session_events(name: str, now_ms: int) -> list[Event]:
    """Return the six events of a session that was judged good and is over."""
    turn = f"{name}-0"

    def event(kind: str, payload: dict[str, Any], turn_id: str | None = turn) -> Event:
        return EVENT.validate_python({
            "type": kind, "event_id": new_id(now_ms), "session_id": name, "turn_id": turn_id, "occurred_at_ms": now_ms,
            "recorded_at_ms": now_ms, "origin": "live", "policy_version": 1, "user_key": "u", "consent": "train",
            "client": {"name": "bench"}, "payload": payload,
        })  # fmt: skip

    return [
        event("session_started", {"surface": "cli", "task_bucket": "edit"}, None),
        event("turn_started", {"turn_index": 0, "message": "Rename total to amount", "message_chars": 22}),
        event("completion", {
            "completion_id": f"{name}-c", "prompt_ids": pack_ids(range(300)), "response_ids": pack_ids(range(150)),
            "behaviour_logprobs": pack_logprobs([-0.5] * 150), "temperature": 1.0, "top_p": 1.0, "duration_ms": 900.0,
            "finish_reason": "stop", "prompt_tokens": 300, "response_tokens": 150,
        }),
        event("edit_proposed", {"edit_id": f"{name}-e", "path_hash": "p", "chars_added": 120}),
        event("edit_decided", {"edit_id": f"{name}-e", "decision": "accepted"}),
        event("session_ended", {"reason": "done"}, None),
    ]  # fmt: skip


def _command(config: SignalsConfig, home: Home) -> list[str]:
    settings = {
        "kafka.bootstrap_servers": config.kafka.bootstrap_servers,
        "kafka.topic": config.kafka.topic,
        "kafka.partitions": config.kafka.partitions,
        "kafka.max_event_bytes": config.kafka.max_event_bytes,
        "signals.trigger_s": config.signals.trigger_s,
        "signals.distil_s": config.signals.distil_s,
        "spark.master": config.spark.master,
        "spark.driver_memory": config.spark.driver_memory,
    }
    flags = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    return [sys.executable, "-m", "signals", "run", "--home", str(home.root), "--json", *flags]


def _finished(home: Home) -> set[str]:
    """Return the sessions whose reward lies in the lake."""
    rewards = lake.read(home, "rewards", columns=["session_id", "reward"])
    return set(rewards.filter(rewards["reward"].is_valid())["session_id"].to_pylist())


def measure(config: SignalsConfig, home: Home, *, servers: str, trigger_s: float, live_s: float) -> Live:
    """Run the continuous job over live sessions.

    Args:
        config: Settings.
        home: An empty home for the job.
        servers: The brokers to use.
        trigger_s: How often the job appends, and how often it distils, seconds.
        live_s: How long sessions are counted, after the first reward was seen.

    Raises:
        TransientError: The job ended, or no reward came within minutes.
    """
    topic = f"bench-live-{uuid.uuid4().hex[:8]}"
    own = config.model_copy(update={
        "kafka": config.kafka.model_copy(update={"bootstrap_servers": servers, "topic": topic, "partitions": KAFKA_PARTITIONS}),
        "signals": config.signals.model_copy(update={"trigger_s": trigger_s, "distil_s": trigger_s}),
    })  # fmt: skip
    kafka.ensure_topics(own, home)
    home.logs.mkdir(parents=True, exist_ok=True)
    log = home.logs / "job.log"
    with log.open("wb") as out:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        job = subprocess.Popen(_command(own, home), stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
    try:
        with Meter(job.pid) as meter, kafka.Producer(own, home) as producer:
            live = _watch(producer, home, job, log, trigger_s=trigger_s, live_s=live_s)
        live.peak_rss_bytes = meter.peak
        return live
    finally:
        job.terminate()
        try:
            job.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()


def _watch(producer: kafka.Producer, home: Home, job: "subprocess.Popen[bytes]", log: Path, *, trigger_s: float, live_s: float) -> Live:
    """Send sessions and look for their rewards until all that count were found, or patience ended."""
    live, waiting, version = Live(trigger_s=trigger_s), dict[str, float](), 0
    begun, counted_from = time.monotonic(), 0.0
    due, number = begun, 0
    while True:
        if job.poll() is not None:
            raise TransientError(f"the job ended with code {job.returncode} while it was measured; see {log}")
        now = time.monotonic()
        if not counted_from and now - begun > START_TIMEOUT_S:
            raise TransientError(f"no reward appeared within {START_TIMEOUT_S:.0f} s; see {log}")
        sending = not counted_from or now - counted_from < live_s
        while sending and due <= now:
            name = f"live-{number}"
            for event in session_events(name, time.time_ns() // 1_000_000):
                producer.send(codec.encode(event), name)
            if counted_from:
                waiting[name] = time.time()
                live.sent += 1
            number, due = number + 1, due + 1 / SESSIONS_A_SECOND
        if lake.exists(home, "rewards") and (newest := _version(home)) > version:
            version, found, seen_at = newest, _finished(home), time.time()
            if found and not counted_from:
                counted_from = now
            live.seconds += [seen_at - waiting.pop(name) for name in sorted(found & set(waiting))]
        if not sending and (not waiting or now - counted_from > live_s + max(PATIENCE_S, 8 * trigger_s)):
            live.unseen = len(waiting)
            live.seconds += [time.time() - sent_at for sent_at in waiting.values()]
            return live
        time.sleep(LOOK_S)


def _version(home: Home) -> int:
    try:
        return lake.open_table(home, "rewards").version()
    except StageError:
        return 0
