"""A real gateway with real engine processes: swap, rollback, crash, refusal, and what clients see."""

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from deploy.release.ledger import Ledger
from pipelines import codec
from pipelines.broker import EmbeddedBroker
from pipelines.config import KafkaConfig, PipelinesConfig
from pipelines.events import Completion, Event, SessionStarted, ToolCall, TurnStarted, unpack_ids, unpack_logprobs
from pipelines.kafka import ensure_topics, read_all
from pipelines.storage import Home
from tests.support.serving import Served, plain_logprobs, promote, serving_checkpoint

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture
def recorded(pair_home: Home, broker: EmbeddedBroker, kafka_config: KafkaConfig) -> Iterator[tuple[Served, Callable[[int], list[Event]]]]:
    """A gateway that writes to the shared broker, and a reader of its topic that waits for a number of completions."""
    config = PipelinesConfig(kafka=kafka_config)
    ensure_topics(config, broker.home)
    overrides = tuple(
        f"kafka.{name}={value!r}" for name, value in kafka_config.model_dump(include={"bootstrap_servers", "topic", "partitions"}).items()
    )
    gateway = Served(pair_home, overrides=overrides)

    def events(completions: int) -> list[Event]:
        deadline = time.monotonic() + 60
        while True:
            decoded = [codec.decode(record.value, config.kafka.max_event_bytes) for record in read_all(config, broker.home)]
            found = [event for event in decoded if isinstance(event, Event.__args__[0].__args__)]
            if sum(isinstance(event, Completion) for event in found) >= completions:
                return found
            assert time.monotonic() < deadline, Counter(type(event).__name__ for event in found)
            time.sleep(0.3)

    try:
        yield gateway.start(), events
    finally:
        gateway.stop()


@pytest.mark.kafka
def test_what_reaches_kafka_is_what_was_sampled(recorded: tuple[Served, Callable[[int], list[Event]]]) -> None:
    gateway, events = recorded
    headers = {
        "X-Session-Id": "s-1", "X-Turn-Id": "t-1", "X-Turn-Index": "3", "X-Step": "2", "X-User": "ada", "X-Consent": "train",
        "X-Origin": "simulated", "X-Task-Bucket": "rename", "X-Surface": "simulator",
    }  # fmt: skip
    answer = gateway.chat("Rename x to total", headers=headers, temperature=0.8, max_tokens=12)
    assert answer.status_code == 200
    (event,) = events(1)
    assert isinstance(event, Completion)
    capture = event.payload
    prompt, response = unpack_ids(capture.prompt_ids or ""), unpack_ids(capture.response_ids or "")
    logprobs = unpack_logprobs(capture.behaviour_logprobs or "")
    folder = gateway.home.store / capture.model
    assert logprobs == pytest.approx(plain_logprobs(folder, prompt.tolist(), response.tolist(), temperature=0.8), abs=1e-4)
    assert capture.capture_error is None
    assert (event.session_id, event.turn_id, capture.step, event.origin, event.consent) == ("s-1", "t-1", 2, "simulated", "train")
    assert (event.policy_version, event.arm, capture.temperature, capture.top_p, capture.top_k) == (1, "serving", 0.8, 1.0, 0)
    assert event.user_key
    assert event.user_key != "ada"
    assert answer.headers["X-Completion-Id"] == capture.completion_id == answer.json()["id"]
    assert (answer.headers["X-Policy-Version"], answer.headers["X-Arm"]) == ("1", "serving")
    assert capture.response_tokens == len(response) == answer.json()["usage"]["completion_tokens"]


@pytest.mark.kafka
def test_a_plain_client_gets_its_session_turn_and_completion_recorded(recorded: tuple[Served, Callable[[int], list[Event]]]) -> None:
    gateway, events = recorded
    answer = gateway.chat("hello there")
    assert Counter(type(event) for event in events(1)) == {SessionStarted: 1, TurnStarted: 1, Completion: 1}
    assert {event.session_id for event in events(1)} == {answer.headers["X-Session-Id"]}
    assert not [event for event in events(1) if isinstance(event, ToolCall)]


def _load(gateway: Served, stop: threading.Event, worker: int, *, out: list[httpx.Response]) -> None:
    session, sent = 0, 0
    while not stop.is_set():
        headers = {"X-Session-Id": f"w{worker}-s{session}", "X-Turn-Id": f"t{sent}", "X-Consent": "train", "X-Origin": "simulated"}
        sent += 1
        if sent % 4 == 0:
            headers["X-Session-Done"] = "true"
            session += 1
        out.append(gateway.chat(f"message {worker} {sent}", headers=headers, max_tokens=24))


@pytest.mark.kafka
def test_a_swap_and_a_rollback_under_load_drop_nothing_and_mix_nothing(recorded: tuple[Served, Callable[[int], list[Event]]]) -> None:
    gateway, events = recorded
    ledger = Ledger(gateway.home.ledger)
    first = serving_checkpoint(gateway.status())
    second = next(path.name for path in gateway.home.store.iterdir() if path.name != first)
    stop, workers = threading.Event(), 24
    answers: list[list[httpx.Response]] = [[] for _ in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(_load, gateway, stop, worker, out=answers[worker]) for worker in range(workers)]
        try:
            time.sleep(1)
            promote(ledger, second)
            gateway.wait(lambda status: serving_checkpoint(status) == second)
            time.sleep(1.5)
            ledger.rollback("test", holder="test")
            gateway.wait(lambda status: serving_checkpoint(status) == first)
            time.sleep(1)
        finally:
            stop.set()
        for future in running:
            future.result(60)

    flat = [answer for of_worker in answers for answer in of_worker]
    assert len(flat) >= 200
    assert Counter(answer.status_code for answer in flat) == {200: len(flat)}
    by_version = Counter(answer.headers["X-Policy-Version"] for answer in flat)
    assert set(by_version) == {"1", "2"}
    assert gateway.status()["swaps"] == 2

    policies = ledger.policies()
    captured = {event.payload.completion_id: event for event in events(len(flat)) if isinstance(event, Completion)}
    assert captured.keys() == {answer.headers["X-Completion-Id"] for answer in flat}
    for answer in flat:
        event = captured[answer.headers["X-Completion-Id"]]
        assert str(event.policy_version) == answer.headers["X-Policy-Version"]
        assert event.payload.model == policies[event.policy_version or 0]
    for event in list(captured.values())[:: max(1, len(captured) // 150)]:
        prompt, response = unpack_ids(event.payload.prompt_ids or ""), unpack_ids(event.payload.response_ids or "")
        own = plain_logprobs(gateway.home.store / event.payload.model, prompt.tolist(), response.tolist())
        assert np.allclose(unpack_logprobs(event.payload.behaviour_logprobs or ""), own, atol=1e-4)
    of_session: dict[str, list[int]] = {}
    for event in sorted(captured.values(), key=lambda event: event.occurred_at_ms):
        of_session.setdefault(event.session_id, []).append(event.policy_version or 0)
    assert all(len(set(versions)) == 1 for versions in of_session.values()), "a session moved although nothing drained it"


def test_a_killed_engine_is_restarted_and_requests_that_met_its_death_are_answered(served: Served) -> None:
    pid = served.status()["replicas"][0]["pid"]
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(served.chat, f"question {number}", max_tokens=200) for number in range(8)]
        time.sleep(0.15)
        os.kill(pid, signal.SIGKILL)
        answers = [future.result(120) for future in waiting]
    assert [answer.status_code for answer in answers] == [200] * 8
    status = served.wait(lambda status: status["replicas"][0]["state"] == "serving")
    assert status["replicas"][0]["restarts"] == 1
    assert status["replicas"][0]["pid"] != pid


def test_no_engine_outlives_a_killed_gateway(served: Served) -> None:
    pid = served.status()["replicas"][0]["pid"]
    assert served.process is not None
    served.process.kill()
    served.process.wait()
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


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


@pytest.mark.parametrize("scale", [math.nan, 1.5])
def test_a_candidate_whose_fingerprint_is_wrong_gets_no_traffic_and_the_old_one_goes_on(served: Served, scale: float) -> None:
    first = serving_checkpoint(served.status())
    assert first is not None
    broken = _altered_copy(served.home, first, scale=scale)
    promote(Ledger(served.home.ledger), broken)
    status = served.wait(lambda status: status["refused"])
    assert status["refused"]["checkpoint"] == broken
    assert "log-probabilities differ by" in status["refused"]["reason"] or "cannot score" in status["refused"]["reason"]
    assert serving_checkpoint(status) == first
    assert served.chat("still there?").headers["X-Policy-Version"] == "1"
    assert "tidegate_gateway_target_refused 1" in served.http.get("/metrics").text


def test_a_damaged_candidate_is_refused_and_repairing_the_pointer_clears_the_way(served: Served) -> None:
    first = serving_checkpoint(served.status())
    second = next(path.name for path in served.home.store.iterdir() if path.name != first)
    weights = served.home.store / second / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    ledger = Ledger(served.home.ledger)
    promote(ledger, second)
    status = served.wait(lambda status: status["refused"])
    assert "differs from its manifest" in status["refused"]["reason"]
    assert serving_checkpoint(status) == first
    ledger.rollback("damaged", holder="test")
    assert served.chat("still there?").status_code == 200


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


def test_without_a_broker_requests_are_answered_and_events_wait_on_disk(served: Served) -> None:
    assert [served.chat("hi").status_code for _ in range(3)] == [200, 200, 200]
    status = served.wait(lambda status: status["events"]["spooled"] == 9)
    assert status["events"]["dropped"] == 0


def test_a_pinned_gateway_stamps_its_own_policy_and_arm_beside_the_serving_one(served: Served) -> None:
    first = serving_checkpoint(served.status())
    second = next(path for path in served.home.store.iterdir() if path.name != first)
    pinned = Served(Home(served.home.root / "pinned"), arguments=("--pin", str(second), "--policy-version", "7", "--arm", "candidate"))
    try:
        answer = pinned.start().chat("hi")
        assert (answer.headers["X-Policy-Version"], answer.headers["X-Arm"]) == ("7", "candidate")
        assert pinned.http.get("/v1/models").json()["data"][0]["id"] == second.name
        assert pinned.stop() == 0
    finally:
        pinned.stop()


def _serve(home: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "deploy.serving", "--home", str(home), *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stderr


def test_a_gateway_that_cannot_start_says_why(tmp_path: Path, pair_home: Home) -> None:
    code, text = _serve(tmp_path / "empty")
    assert code == 6
    assert "names no serving checkpoint" in text
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, text = _serve(pair_home.root, "--port", str(taken.getsockname()[1]))
    assert code == 2
    assert "free the port" in text
    assert _serve(pair_home.root, "--pin", str(pair_home.store / "nothing"), "--policy-version", "1")[0] == 1
    assert _serve(pair_home.root, "--policy-version", "1")[0] == 2


def test_a_second_gateway_on_the_same_home_is_refused_and_a_stopped_one_leaves_nothing(served: Served) -> None:
    code, text = _serve(served.home.root)
    assert code == 3
    assert "already running" in text
    pid = served.status()["replicas"][0]["pid"]
    assert served.stop() == 0
    assert not psutil.pid_exists(pid)
    assert not served.state.exists()
    assert json.dumps([path.name for path in (served.home.run / "replicas").iterdir()]) == "[]"
