"""A real gateway with real engine processes: swap, rollback, crash, refusal, and what clients see."""

import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from deploy.release.ledger import Ledger
from pipelines import codec
from pipelines.broker import EmbeddedBroker
from pipelines.config import KafkaConfig, PipelinesConfig
from pipelines.errors import Rejected
from pipelines.events import Completion, Event, SessionStarted, TurnStarted, unpack_ids, unpack_logprobs
from pipelines.kafka import ensure_topics, read_all
from pipelines.storage import Home
from tests.support.processes import runs
from tests.support.serving import Served, pair_home, plain_logprobs, promote, serving_checkpoint

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.kafka]


@dataclass(frozen=True)
class Recorded:
    """A gateway that writes to the shared broker, and a reader of its topic."""

    gateway: Served
    config: PipelinesConfig
    broker_home: Home

    def events(self, sessions: str, *, completions: int) -> list[Event]:
        """Return the events of sessions whose id begins with `sessions`, once there are that many completions."""
        deadline = time.monotonic() + 60
        while True:
            records = read_all(self.config, self.broker_home)
            decoded = [codec.decode(record.value, self.config.kafka.max_event_bytes) for record in records]
            found = [event for event in decoded if not isinstance(event, Rejected) and event.session_id.startswith(sessions)]
            if sum(isinstance(event, Completion) for event in found) >= completions:
                return found
            assert time.monotonic() < deadline, Counter(type(event).__name__ for event in decoded)
            time.sleep(0.3)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny_pair: tuple[Path, str, str], broker: EmbeddedBroker) -> Iterator[Recorded]:
    """One gateway for this module. Tests leave its first checkpoint serving."""
    kafka = KafkaConfig(bootstrap_servers=broker.bootstrap, topic=f"gateway-{uuid.uuid4().hex[:8]}", partitions=2)
    config = PipelinesConfig(kafka=kafka)
    ensure_topics(config, broker.home)
    overrides = tuple(f"kafka.{name}={getattr(kafka, name)!r}" for name in ("bootstrap_servers", "topic", "partitions"))
    gateway = Served(pair_home(tmp_path_factory.mktemp("gateway"), tiny_pair), overrides=overrides)
    try:
        yield Recorded(gateway.start(), config, broker.home)
    finally:
        gateway.stop()


@pytest.fixture
def served(recorded: Recorded) -> Served:
    """The module's gateway, with its first checkpoint serving and every engine up."""
    recorded.gateway.wait(lambda status: serving_checkpoint(status) is not None)
    return recorded.gateway


def test_what_reaches_kafka_is_what_was_sampled(recorded: Recorded, served: Served) -> None:
    headers = {
        "X-Session-Id": "s-1", "X-Turn-Id": "t-1", "X-Turn-Index": "3", "X-Step": "2", "X-User": "ada", "X-Consent": "train",
        "X-Origin": "simulated", "X-Task-Bucket": "rename", "X-Surface": "simulator",
    }  # fmt: skip
    answer = served.chat("Rename x to total", headers=headers, temperature=0.8, max_tokens=12)
    assert answer.status_code == 200
    (event,) = recorded.events("s-1", completions=1)
    assert isinstance(event, Completion)
    capture = event.payload
    prompt, response = unpack_ids(capture.prompt_ids or ""), unpack_ids(capture.response_ids or "")
    logprobs = unpack_logprobs(capture.behaviour_logprobs or "")
    folder = served.home.store / capture.model
    assert logprobs == pytest.approx(plain_logprobs(folder, prompt.tolist(), response.tolist(), temperature=0.8), abs=1e-4)
    assert capture.capture_error is None
    assert (event.session_id, event.turn_id, capture.step, event.origin, event.consent) == ("s-1", "t-1", 2, "simulated", "train")
    assert (event.policy_version, event.arm, capture.temperature, capture.top_p, capture.top_k) == (1, "serving", 0.8, 1.0, 0)
    assert event.user_key
    assert event.user_key != "ada"
    assert answer.headers["X-Completion-Id"] == capture.completion_id == answer.json()["id"]
    assert (answer.headers["X-Policy-Version"], answer.headers["X-Arm"]) == ("1", "serving")
    assert capture.response_tokens == len(response) == answer.json()["usage"]["completion_tokens"]


def test_a_plain_client_gets_its_session_turn_and_completion_recorded(recorded: Recorded, served: Served) -> None:
    answer = served.chat("hello there")
    events = recorded.events(answer.headers["X-Session-Id"], completions=1)
    assert Counter(type(event) for event in events) == {SessionStarted: 1, TurnStarted: 1, Completion: 1}


def _load(served: Served, stop: threading.Event, worker: int, *, out: list[httpx.Response]) -> None:
    session, sent = 0, 0
    while not stop.is_set():
        headers = {"X-Session-Id": f"load-w{worker}-s{session}", "X-Turn-Id": f"t{sent}", "X-Consent": "train", "X-Origin": "simulated"}
        sent += 1
        if sent % 4 == 0:
            headers["X-Session-Done"] = "true"
            session += 1
        out.append(served.chat(f"message {worker} {sent}", headers=headers, max_tokens=24))


def test_a_swap_and_a_rollback_under_load_drop_nothing_and_mix_nothing(
    recorded: Recorded, served: Served, tiny_pair: tuple[Path, str, str]
) -> None:
    ledger = Ledger(served.home.ledger)
    _, first, second = tiny_pair
    stop, workers = threading.Event(), 24
    answers: list[list[httpx.Response]] = [[] for _ in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(_load, served, stop, worker, out=answers[worker]) for worker in range(workers)]
        try:
            time.sleep(1)
            promote(ledger, second)
            served.wait(lambda status: serving_checkpoint(status) == second)
            time.sleep(1.5)
            ledger.rollback("test", holder="test")
            served.wait(lambda status: serving_checkpoint(status) == first)
            time.sleep(1)
        finally:
            stop.set()
        for future in running:
            future.result(60)

    flat = [answer for of_worker in answers for answer in of_worker]
    assert len(flat) >= 200
    assert Counter(answer.status_code for answer in flat) == {200: len(flat)}
    by_version = Counter(answer.headers["X-Policy-Version"] for answer in flat)
    policies = ledger.policies()
    assert {policies[int(version)] for version in by_version} == {first, second}

    captured = {
        event.payload.completion_id: event for event in recorded.events("load-", completions=len(flat)) if isinstance(event, Completion)
    }
    assert captured.keys() == {answer.headers["X-Completion-Id"] for answer in flat}
    for answer in flat:
        event = captured[answer.headers["X-Completion-Id"]]
        assert str(event.policy_version) == answer.headers["X-Policy-Version"]
        assert event.payload.model == policies[event.policy_version or 0]
    for event in list(captured.values())[:: max(1, len(captured) // 150)]:
        prompt, response = unpack_ids(event.payload.prompt_ids or ""), unpack_ids(event.payload.response_ids or "")
        own = plain_logprobs(served.home.store / event.payload.model, prompt.tolist(), response.tolist())
        assert np.allclose(unpack_logprobs(event.payload.behaviour_logprobs or ""), own, atol=1e-4)
    of_session: dict[str, list[int]] = {}
    for event in sorted(captured.values(), key=lambda event: event.occurred_at_ms):
        of_session.setdefault(event.session_id, []).append(event.policy_version or 0)
    assert all(len(set(versions)) == 1 for versions in of_session.values()), "a session moved although nothing drained it"


def test_a_killed_engine_is_restarted_and_requests_that_met_its_death_are_answered(served: Served) -> None:
    before = served.status()["replicas"][0]
    pid = before["pid"]
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(served.chat, f"question {number}", max_tokens=200) for number in range(8)]
        time.sleep(0.15)
        os.kill(pid, signal.SIGKILL)
        answers = [future.result(120) for future in waiting]
    assert [answer.status_code for answer in answers] == [200] * 8
    # On a fast machine the answers are there before the death is noticed, and the state is still the old engine's.
    status = served.wait(lambda status: status["replicas"][0]["pid"] != pid and status["replicas"][0]["state"] == "serving")
    assert status["replicas"][0]["restarts"] == before["restarts"] + 1


def _altered_copy(home: Home, identity: str, *, scale: float) -> str:
    """Seal a copy of a checkpoint whose weights are multiplied by `scale` while its probe stays, as if export had gone wrong."""
    from safetensors.torch import load_file, save_file

    from trainer.candidates import MANIFEST, file_entries, read_manifest, seal

    staged = home.store / ".staged"
    shutil.copytree(home.store / identity, staged)
    (staged / MANIFEST).unlink()
    weights = staged / "model.safetensors"
    save_file({name: tensor * scale for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})
    manifest = read_manifest(home.store / identity).model_copy(update={"kind": "sabotage", "files": file_entries(staged)})
    return seal(staged, home.store, manifest)[0]


def _damaged_copy(home: Home, identity: str) -> str:
    broken = _altered_copy(home, identity, scale=0.5)
    weights = home.store / broken / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    return broken


def test_a_candidate_with_broken_weights_gets_no_traffic_and_the_old_one_goes_on(served: Served) -> None:
    first = serving_checkpoint(served.status())
    assert first is not None
    ledger = Ledger(served.home.ledger)
    cases = {
        _altered_copy(served.home, first, scale=math.nan): "cannot score|differ by nan",
        _altered_copy(served.home, first, scale=1.5): "log-probabilities differ by",
        _damaged_copy(served.home, first): "differs from its manifest",
    }
    for broken, reason in cases.items():
        if ledger.frozen():
            ledger.thaw("test")
        promote(ledger, broken)
        status = served.wait(lambda status, broken=broken: (status["refused"] or {}).get("checkpoint") == broken)
        assert re.search(reason, status["refused"]["reason"])
        assert serving_checkpoint(status) == first
        assert served.chat("still there?").headers["X-Policy-Version"] == "1"
        assert "tidegate_gateway_target_refused 1" in served.http.get("/metrics").text
        ledger.rollback("test", holder="test")
    ledger.thaw("test")


def test_requests_that_are_not_served_are_refused_in_openais_shape(served: Served) -> None:
    def refusal(answer: httpx.Response) -> tuple[int, str]:
        assert set(answer.json()["error"]) == {"message", "type", "code", "param"}
        return answer.status_code, answer.json()["error"]["code"]

    path = "/v1/chat/completions"
    assert refusal(served.http.post(path, json={}, headers={"Authorization": "Bearer wrong-key-here"})) == (401, "invalid_api_key")
    assert refusal(served.http.post(path, content=b"not json")) == (400, "invalid_request")
    assert refusal(served.http.post(path, json={"messages": []})) == (400, "invalid_request")
    assert refusal(served.chat("x", stream=True)) == (400, "unsupported")
    assert refusal(served.chat("x", headers={"X-Origin": "imported"})) == (400, "invalid_header")
    assert refusal(served.chat("x", headers={"X-Consent": "maybe"})) == (400, "invalid_header")
    assert refusal(served.chat("x", headers={"X-Session-Id": "a b"})) == (400, "invalid_header")
    assert refusal(served.chat("word " * 2000)) == (400, "context_length_exceeded")
    assert refusal(served.http.post(path, content=b"x" * 10_000_000)) == (413, "body_too_large")
    assert refusal(served.http.get("/v1/unknown")) == (404, "not_found")
    assert served.chat("and then it still answers").status_code == 200


def test_a_pinned_gateway_stamps_its_own_arm_and_without_a_broker_its_events_wait_on_disk(
    served: Served, tiny_pair: tuple[Path, str, str], tmp_path: Path
) -> None:
    first = serving_checkpoint(served.status())
    store, *pair = tiny_pair  # the served home may hold copies that another test broke
    second = store / next(name for name in pair if name != first)
    pinned = Served(Home(tmp_path / "pinned"), arguments=("--pin", str(second), "--policy-version", "7", "--arm", "candidate"))
    try:
        answers = [pinned.start().chat("hi"), pinned.chat("hi")]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert (answers[0].headers["X-Policy-Version"], answers[0].headers["X-Arm"]) == ("7", "candidate")
        assert pinned.http.get("/v1/models").json()["data"][0]["id"] == second.name
        status = pinned.wait(lambda status: status["events"]["spooled"] == 6)
        assert status["events"]["dropped"] == 0
        pid = status["replicas"][0]["pid"]
        assert pinned.stop() == 0
        assert not runs(pid)
        assert not pinned.state.exists()
        assert list((pinned.home.run / "replicas").iterdir()) == []
    finally:
        pinned.stop()


def test_no_engine_outlives_a_killed_gateway(served: Served, tmp_path: Path) -> None:
    folder = served.home.store / (serving_checkpoint(served.status()) or "")
    pinned = Served(Home(tmp_path / "killed"), arguments=("--pin", str(folder), "--policy-version", "1"))
    try:
        engine = psutil.Process(pinned.start().status()["replicas"][0]["pid"])
        assert pinned.process is not None
        pinned.process.kill()
        _, alive = psutil.wait_procs([engine], timeout=10)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    finally:
        pinned.stop()


def _serve(home: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "deploy.serving", "--home", str(home), *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stderr


def test_a_gateway_that_cannot_start_says_why(tmp_path: Path, served: Served) -> None:
    code, text = _serve(tmp_path / "empty")
    assert code == 6
    assert "names no serving checkpoint" in text
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, text = _serve(tmp_path / "other", "--port", str(taken.getsockname()[1]))
    assert code == 2
    assert "free the port" in text
    code, text = _serve(served.home.root)
    assert code == 3
    assert "already running" in text
    assert _serve(tmp_path / "other", "--pin", str(tmp_path / "nothing"), "--policy-version", "1")[0] == 1
    assert _serve(tmp_path / "other", "--policy-version", "1")[0] == 2
