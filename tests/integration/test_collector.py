"""`tidegate collect` as clients meet it: real HTTP on loopback, the real broker, hostile senders."""

import base64
import gzip
import json
import logging
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pipelines import kafka
from pipelines.broker import EmbeddedBroker
from pipelines.collector_commands import app
from pipelines.collector_keys import add
from pipelines.config import KafkaConfig, PipelinesConfig
from pipelines.events import EVENT, new_id, pack_ids, pack_logprobs
from pipelines.importers.otlp import SAMPLE
from pipelines.redaction import hasher
from pipelines.storage import Home
from pipelines.terminal import run
from tests.support.collector import Collecting

pytestmark = pytest.mark.kafka

AWAY = KafkaConfig(bootstrap_servers="127.0.0.1:1")


def feedback(session: str = "s1", score: float = 0.5, **fields: Any) -> dict[str, Any]:
    """A native record with only what a client must say."""
    return {
        "event_id": new_id(), "type": "feedback", "session_id": session, "turn_id": "t1", "occurred_at_ms": 1_764_000_000_000,
        "payload": {"source": "app", "score": score},
    } | fields  # fmt: skip


def arrived(home: Home, config: KafkaConfig) -> list[dict[str, Any]]:
    return [json.loads(record.value) for record in kafka.read_all(PipelinesConfig(kafka=config), home)]


@pytest.fixture(scope="module")
def shared(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collecting]:
    """One collector without keys for the tests that do not change it; each looks for its own session."""
    config = KafkaConfig(bootstrap_servers=broker.bootstrap, topic=f"events-{new_id()}", partitions=2)
    home = Home(tmp_path_factory.mktemp("collector"))
    kafka.ensure_topics(PipelinesConfig(kafka=config), home)
    with Collecting(home, config, ("collector.max_body_bytes=200000", "collector.max_inflated_bytes=1000000")) as running:
        yield running


def of_session(running: Collecting, session: str) -> list[dict[str, Any]]:
    assert running.delivered(), running.log
    return [event for event in arrived(running.home, running.kafka) if event["session_id"] == session]


def test_native_events_in_every_form_reach_the_topic_in_order_with_what_the_collector_knows(shared: Collecting) -> None:
    events = [feedback("forms", score=i / 10) for i in range(6)]
    lines = b"\n".join(json.dumps(event).encode() for event in events[4:6]) + b"\n"
    answers = [
        shared.post("/v1/events", events[0]),
        shared.post("/v1/events", gzip.compress(json.dumps(events[1:3]).encode()), content_encoding="gzip"),
        shared.post("/v1/events", pa.compress(json.dumps([events[3]]).encode(), "zstd", asbytes=True), content_encoding="zstd"),
        shared.post("/v1/events", lines, content_type="application/x-ndjson"),
    ]
    assert [(answer.status_code, answer.json()["accepted"]) for answer in answers] == [(202, 1), (202, 2), (202, 1), (202, 2)]
    found = of_session(shared, "forms")
    assert [event["event_id"] for event in found] == [event["event_id"] for event in events]
    assert {(event["origin"], event["consent"], event["client"]["name"], event["arm"]) for event in found} == {
        ("live", "measure", "collector:local", "serving")
    }
    assert {event["user_key"] for event in found} == {hasher(shared.home)("user", "key:local")}
    for event in found:
        assert abs(event["recorded_at_ms"] - time.time() * 1000) < 60_000
        EVENT.validate_python(event)


def test_one_bad_record_never_spoils_its_batch_and_each_is_named_with_its_reason(shared: Collecting) -> None:
    good = feedback("mixed")
    batch = [
        good, 7, feedback("mixed", type="nonsense"), feedback("mixed", occurred_at_ms=10**30), feedback("mixed", origin="simulated"),
        feedback("mixed", payload={"source": "app", "score": 9}), feedback("mixed", occurred_at_ms=int(time.time() * 1000) + 10**8),
        feedback("mixed", session_id=""), feedback("mixed", payload=None), {}, None, [], good,
    ]  # fmt: skip
    answer = shared.post("/v1/events", batch)
    assert answer.status_code == 202
    assert answer.json()["accepted"] == 2, "a repeat is taken: the lake keeps one event an id"
    assert [(item["index"], item["reason"]) for item in answer.json()["rejected"]] == [
        (1, "malformed_json"), (2, "unknown_type"), (3, "invalid_field"), (4, "origin_not_allowed"), (5, "invalid_field"),
        (6, "future_dated"), (7, "invalid_field"), (8, "invalid_field"), (9, "missing_field"), (10, "malformed_json"),
        (11, "malformed_json"),
    ]  # fmt: skip
    assert [event["event_id"] for event in of_session(shared, "mixed")] == [good["event_id"]] * 2
    alone = shared.post("/v1/events", batch[1:6])
    assert (alone.status_code, alone.json()["accepted"]) == (422, 0)


def test_a_broken_line_is_rejected_alone_and_a_broken_array_whole(shared: Collecting) -> None:
    good = json.dumps(feedback("lines"))
    answer = shared.post("/v1/events", f'{good}\n{{"cut": \n\n{good}\n{good[:40]}'.encode(), content_type="application/x-ndjson")
    assert answer.status_code == 202
    assert [(item["index"], item["reason"]) for item in answer.json()["rejected"]] == [(1, "malformed_json"), (3, "malformed_json")]
    assert shared.post("/v1/events", f"{good}\n{good}".encode()).json()["accepted"] == 2, "lines sent as application/json"
    whole = shared.post("/v1/events", f"[{good}, {good[:50]}]".encode())
    assert (whole.status_code, whole.json()["error"]["code"]) == (400, "malformed_json")


def test_telemetry_becomes_the_same_events_as_an_import_of_it_and_a_resend_the_same_ids(shared: Collecting) -> None:
    requests = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    for _ in range(2):
        for request in requests:
            path = "/v1/traces" if "resourceSpans" in request else "/v1/logs"
            if "resourceSpans" in request or "resourceLogs" in request:
                answer = shared.post(path, request)
                assert answer.status_code == 200, answer.text
    assert answer.json() == {"partialSuccess": {"rejectedLogRecords": "1", "errorMessage": "missing_field:survival_rate: 1"}}
    conversation = of_session(shared, "conv-7f3a")
    kinds = Counter(event["type"] for event in {event["event_id"]: event for event in conversation}.values())
    assert kinds == {"session_started": 1, "turn_started": 1, "completion": 2, "tool_call": 2, "tool_result": 2, "evaluation": 2}
    by_id = {event["event_id"]: {**event, "recorded_at_ms": 0} for event in conversation}
    assert all({**event, "recorded_at_ms": 0} == by_id[event["event_id"]] for event in conversation), "the same id is the same event"
    assert {event["user_key"] for event in conversation} == {hasher(shared.home)("user", "mira")}
    (opening,) = [event for event in conversation if event["type"] == "turn_started"]
    assert "mira@example.org" not in opening["payload"]["message"]
    window = of_session(shared, "6f1c0f2e-window")
    survived = {
        (event["payload"]["horizon_s"], event["payload"]["survival_no_revert"]) for event in window if event["type"] == "edit_survival"
    }
    assert survived == {(5, 1.0), (30, 0.5)}


def test_the_protocols_edges_are_answered_as_otlp_wants(shared: Collecting) -> None:
    assert shared.post("/v1/traces", {}).json() == {}
    assert shared.post("/v1/traces", {"resourceSpans": []}).json() == {}
    assert shared.post("/v1/logs", [1]).json()["code"] == 3
    assert shared.post("/v1/logs", b"{}", content_type="text/plain").status_code == 415
    assert shared.client.get("/v1/traces").status_code == 404
    assert "is not served" in shared.client.get("/admin").json()["error"]["message"]


def test_protobuf_is_taken_like_json_and_answered_in_protobuf(shared: Collecting) -> None:
    kind = {"content_type": "application/x-protobuf"}
    request = json.loads(strange().replace("conv-odd", "conv-proto").replace("odd-", "proto-").replace("0dd92f", "0aa92f"))
    for span in request["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for name in ("traceId", "spanId", "parentSpanId"):
            if name in span:
                span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    message = ParseDict(request, ExportTraceServiceRequest()).SerializeToString()
    answer = shared.post("/v1/traces", gzip.compress(message), content_encoding="gzip", **kind)
    assert (answer.status_code, answer.headers["content-type"], answer.content) == (200, "application/x-protobuf", b"")
    kinds = Counter(event["type"] for event in of_session(shared, "conv-proto"))
    assert kinds == {"session_started": 1, "turn_started": 1, "completion": 2, "tool_call": 2, "tool_result": 2, "evaluation": 1}

    nameless = {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"timeUnixNano": "1", "eventName": "gen_ai.evaluation.result"}]}]}]}
    refused = shared.post("/v1/logs", ParseDict(nameless, ExportLogsServiceRequest()).SerializeToString(), **kind)
    partial = ExportLogsServiceResponse.FromString(refused.content).partial_success
    assert (partial.rejected_log_records, partial.error_message) == (1, "missing_field:gen_ai.evaluation.name: 1")
    broken = shared.post("/v1/traces", b"\xff" * 50, **kind)
    assert (broken.status_code, broken.content[:2]) == (400, b"\x08\x03")
    assert b"is not an OTLP request" in broken.content
    many = shared.post("/v1/traces", b"\x0a\x02\x12\x00" * 20_000, **kind)
    assert many.status_code == 413
    assert shared.post("/v1/traces", b"", **kind).status_code == 200


def strange() -> str:
    """The sample's first request, about a conversation that no other test looks at."""
    text = SAMPLE.read_text().splitlines()[0]
    return text.replace("conv-7f3a", "conv-odd").replace("resp-", "odd-").replace("4bf92f3577b34da6", "0dd92f3577b34da6")


@cache
def hostile() -> list[tuple[str, bytes, dict[str, str]]]:
    return list(_hostile())


def _hostile() -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """Bodies made to break a reader: name, bytes, headers."""
    good = json.dumps([feedback("hostile")]).encode()
    bomb = gzip.compress(b"[" + b" " * 20_000_000 + b"]")
    for name, body in {
        "nothing": b"", "space": b"   ", "nulls": b"\0" * 1000, "random": os.urandom(5000), "cut": good[:-5], "surrogate": b'["\\ud800"]',
        "not utf-8": b'["\xff\xfe"]', "nan": b'[{"occurred_at_ms": NaN}]', "infinity": b"[Infinity]",
        "long number": b"[" + b"9" * 100_000 + b"]",
        "exponent": b"[1e999999]", "deep list": b"[" * 90_000, "deep object": b'{"a":' * 30_000, "closed deep": b"[" * 3_000 + b"]" * 3_000,
        "many keys": json.dumps({f"k{i}": i for i in range(15_000)}).encode(), "scalar": b"7", "text": b'"x"', "true": b"true",
        "one list": json.dumps([[[[]]]] * 1_000).encode(), "array of strings": json.dumps(["x" * 100] * 1_000).encode(),
        "comma": b"[,]", "bom": b"\xef\xbb\xbf[]", "two": b"[] []", "key twice": b'[{"type":"feedback","type":7}]',
    }.items():  # fmt: skip
        yield name, body, {}
    for name, body in {
        "cut gzip": gzip.compress(good)[:-10], "no gzip": good, "bomb": bomb, "bomb in bomb": gzip.compress(bomb),
        "gzip and rubbish": gzip.compress(good) + b"rubbish", "empty gzip": b"", "gzip header": b"\x1f\x8b\x08\x00",
    }.items():  # fmt: skip
        yield name, body, {"content_encoding": "gzip"}
    squeezed = pa.compress(b"[" + b" " * 20_000_000 + b"]", "zstd", asbytes=True)
    for name, body in {"zstd bomb": squeezed, "cut zstd": squeezed[:100], "no zstd": good, "empty zstd": b""}.items():
        yield name, body, {"content_encoding": "zstd"}
    for encoding in ("br", "gzip, gzip", "deflate", "x" * 300):
        yield f"encoding {encoding[:10]}", good, {"content_encoding": encoding}


@pytest.mark.parametrize("path", ["/v1/events", "/v1/traces", "/v1/logs"])
def test_hostile_bodies_are_answered_and_never_stop_it(shared: Collecting, path: str) -> None:
    for name, body, headers in hostile():
        status = shared.post(path, body, **headers).status_code
        assert status in (200, 202, 400, 413, 415, 422), (name, status)
    rng = random.Random(5)
    sample = strange().encode()
    for _ in range(60):
        noise = bytearray(sample)
        for _ in range(rng.randrange(1, 30)):
            noise[rng.randrange(len(noise))] = rng.randrange(256)
        assert shared.post(path, bytes(noise)).status_code in (200, 202, 400, 422)
    assert shared.client.get("/health").json()["ready"] is True
    assert "Traceback" not in shared.log
    assert shared.post("/v1/events", feedback("after")).status_code == 202


def test_odd_telemetry_is_answered_field_by_field_and_never_stops_it(shared: Collecting) -> None:
    request = json.loads(strange())
    span = request["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    for field in list(span):
        for value in (None, 0, -1, 2**70, 1.5, "", "x", "9" * 400, True, [], {}, [[]], [None], {"key": 1}, [{"key": []}], [{"key": "a"}]):
            altered = {"resourceSpans": [{"resource": value, "scopeSpans": [value, {"spans": [span | {field: value}, value]}]}]}
            assert shared.post("/v1/traces", altered).status_code == 200, (field, value)
    for value in (
        {"intValue": "x"},
        {"doubleValue": "NaN"},
        {"arrayValue": 7},
        {"kvlistValue": {"values": [7]}},
        {"bytesValue": "!"},
        {},
        7,
    ):
        altered = span | {"attributes": [*span["attributes"], *({"key": item["key"], "value": value} for item in span["attributes"])]}
        assert shared.post("/v1/traces", {"resourceSpans": [{"scopeSpans": [{"spans": [altered]}]}]}).status_code == 200
    assert "Traceback" not in shared.log


def test_bodies_over_the_limit_are_refused_declared_or_not(shared: Collecting) -> None:
    large = b"[" + b" " * 300_000 + b"]"
    declared = shared.post("/v1/events", large)
    assert (declared.status_code, declared.json()["error"]["code"]) == (413, "body_too_large")

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(large), 10_000):
            yield large[start : start + 10_000]

    chunked = httpx.post(f"{shared.url}/v1/events", content=pieces(), headers={"content-type": "application/json"}, trust_env=False)
    assert chunked.status_code == 413
    assert shared.post("/v1/events", [None] * 10_001).json()["error"]["code"] == "too_many_records"


def test_web_pages_cannot_send_to_a_collector_without_keys(shared: Collecting) -> None:
    assert shared.post("/v1/events", feedback(), origin="https://evil.example").status_code == 403
    assert shared.post("/v1/events", feedback(), host="evil.example:4318").status_code == 403
    assert shared.post("/v1/events", json.dumps(feedback()).encode(), content_type="text/plain").status_code == 415
    assert shared.post("/v1/events", feedback("host"), host=f"localhost:{shared.port}").status_code == 202


@dataclass(frozen=True)
class Done:
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture
def command(home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """The command in this process: starting Python for every key would cost seconds each."""
    for name in [name for name in os.environ if name.startswith("TIDEGATE_")]:
        monkeypatch.delenv(name)
    handlers, level = list(logging.root.handlers), logging.root.level

    def call(*arguments: str) -> Done:
        code = run(app, [*arguments, "--home", str(home.root)])
        out = capsys.readouterr()
        return Done(returncode=code, stdout=out.out, stderr=out.err)

    yield call
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.fixture
def keyed(home: Home, kafka_config: KafkaConfig) -> Iterator[Collecting]:
    """A collector that has keys from the start."""
    kafka.ensure_topics(PipelinesConfig(kafka=kafka_config), home)
    add(home, "first", origin="live", consent="measure", namespace=None, tokens=False, now_ms=1)
    with Collecting(home, kafka_config) as running:
        yield running


def make(home: Home, name: str, **rights: Any) -> dict[str, str]:
    """Make a key and return its header."""
    rights = {"origin": "live", "consent": "measure", "namespace": None, "tokens": False} | rights
    return {"authorization": f"Bearer {add(home, name, now_ms=int(time.time() * 1000), **rights)}"}


def test_a_key_bounds_what_its_holder_may_claim(keyed: Collecting) -> None:
    home, user = keyed.home, hasher(keyed.home)
    app, simulator, engine = (
        make(home, "app"), make(home, "sim", origin="simulated", consent="train", namespace="shared"),
        make(home, "engine", consent="train", namespace="", tokens=True),
    )  # fmt: skip
    arrays = {
        "completion_id": "c1", "prompt_ids": pack_ids([1]), "response_ids": pack_ids([2, 3]),
        "behaviour_logprobs": pack_logprobs([-1.0, -2.0]),
    }  # fmt: skip
    claims = {"user_key": "mira", "consent": "train"}
    completion = claims | {"type": "completion", "payload": arrays}
    for headers, fields in ((app, claims), (simulator, claims), (engine, claims), (app, completion), (engine, completion)):
        assert keyed.post("/v1/events", feedback("bounds", **fields), **headers).json()["accepted"] == 1
    assert keyed.post("/v1/events", feedback("bounds", origin="live"), **simulator).json()["rejected"][0]["reason"] == "origin_not_allowed"
    found = of_session(keyed, "bounds")
    stamps = [(event["type"], event["origin"], event["consent"], event["user_key"]) for event in found]
    assert stamps == [
        ("feedback", "live", "measure", user("user", "app/mira")),
        ("feedback", "simulated", "train", user("user", "shared/mira")),
        ("feedback", "live", "train", user("user", "mira")),
        ("completion", "live", "measure", user("user", "app/mira")),
        ("completion", "live", "train", user("user", "mira")),
    ]
    dropped, kept = found[3]["payload"], found[4]["payload"]
    assert {name for name in arrays if name in dropped} == {"completion_id"}
    assert dropped["capture_error"] == "not_captured_by_us"
    assert {name: kept[name] for name in arrays} == arrays


def test_requests_need_a_valid_key_and_a_revoked_one_is_refused_at_once(keyed: Collecting, command: Command) -> None:
    headers = make(keyed.home, "short-lived")
    assert keyed.post("/v1/events", feedback(), **headers).status_code == 202
    for wrong in ({}, {"authorization": "Bearer tgc_wrong"}, {"authorization": headers["authorization"].replace("Bearer", "Basic")}):
        refused = keyed.post("/v1/events", feedback(), **wrong)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_key")
    assert keyed.post("/v1/traces", {}).json()["code"] == 16
    done = command("keys", "revoke", "short-lived")
    assert done.returncode == 0
    assert keyed.post("/v1/events", feedback(), **headers).status_code == 401
    assert keyed.client.get("/health").status_code == keyed.client.get("/metrics").status_code == 200


def test_keys_are_made_shown_once_listed_and_revoked_by_command(home: Home, command: Command) -> None:
    made = command("keys", "add", "ci", "--origin", "benchmark", "--consent", "none", "--json")
    key = json.loads(made.stdout)["key"]
    assert key.startswith("tgc_")
    stored = home.keys / "collector.json"
    assert key not in stored.read_text()
    assert stored.stat().st_mode & 0o077 == 0
    listed = command("keys", "list").stdout
    assert listed.startswith("ci: origin benchmark, consent at most none, users of ci, made ")
    again = command("keys", "add", "ci")
    assert (again.returncode, "there is a key named 'ci'" in again.stderr) == (2, True)
    assert "Traceback" not in again.stderr


def test_it_listens_to_the_network_only_with_keys(command: Command) -> None:
    refused = command("--set", "collector.host=0.0.0.0", "--set", "collector.port=0")
    assert refused.returncode == 2
    assert "collect keys add" in refused.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = command("--set", f"collector.port={taken.getsockname()[1]}")
    assert busy.returncode == 2
    assert "cannot listen on" in busy.stderr


def test_a_key_over_its_rate_is_told_when_to_come_back_and_others_are_not_held_up(home: Home) -> None:
    limits = ("collector.rate_events_per_s=2", "collector.burst_events=3")
    one, other = make(home, "one"), make(home, "other")
    with Collecting(home, AWAY, limits) as running:
        assert running.post("/v1/events", [feedback()] * 5, **one).status_code == 202, "a batch over the burst is taken once"
        refused = running.post("/v1/events", feedback(), **one)
        assert refused.status_code == 429
        wait_s = int(refused.headers["retry-after"])
        assert 1 <= wait_s <= 2
        assert running.post("/v1/traces", {}, **one).status_code == 429
        assert running.post("/v1/events", feedback(), **other).status_code == 202
        time.sleep(wait_s)
        assert running.post("/v1/events", feedback(), **one).status_code == 202
        assert running.metric('tidegate_collector_requests_total{path="events",status="429"}') == 1


def read_all(connection: socket.socket) -> bytes:
    """Return what a connection gives until it is closed."""
    data = b""
    while chunk := connection.recv(65_536):
        data += chunk
    return data


def test_slow_senders_lose_their_connection_and_leave_room_for_others(home: Home) -> None:
    limits = ("collector.header_timeout_s=0.3", "collector.body_timeout_s=0.6", "collector.max_requests=1")
    with Collecting(home, AWAY, limits) as running:
        place = ("127.0.0.1", running.port)
        begun = time.monotonic()
        with socket.create_connection(place, timeout=10) as silent, socket.create_connection(place, timeout=10) as slow:
            slow.sendall(b"POST /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n")
            assert read_all(silent) == read_all(slow) == b""
            assert time.monotonic() - begun < 5
        head = b"POST /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n["
        with socket.create_connection(place, timeout=10) as held:
            held.sendall(head)
            while not running.metric("tidegate_collector_in_flight"):
                time.sleep(0.01)
            crowded = running.post("/v1/events", feedback())
            assert (crowded.status_code, crowded.json()["error"]["code"], crowded.headers["retry-after"]) == (503, "busy", "1")
            assert held.recv(65_536).startswith(b"HTTP/1.1 408 ")
        for _ in range(2):  # a second request on the same connection has the same time
            assert running.post("/v1/events", feedback()).status_code == 202


def test_what_was_taken_survives_kill_9_and_what_finds_no_room_is_refused(home: Home, kafka_config: KafkaConfig) -> None:
    with Collecting(home, AWAY.model_copy(update={"spool_max_bytes": 2_000})) as running:
        taken = [
            event for event in (feedback("kept", score=i / 10) for i in range(4)) if running.post("/v1/events", event).status_code == 202
        ]
        assert len(taken) == 4
        batch = [feedback("kept", score=i / 10) for i in range(10)]
        full = running.post("/v1/events", batch)
        assert (full.status_code, full.headers["retry-after"]) == (503, "10")
        accepted = full.json()["accepted"]
        assert 0 < accepted < 10
        assert [item["index"] for item in full.json()["rejected"]] == list(range(accepted, 10))
        assert {item["reason"] for item in full.json()["rejected"]} == {"spool_full"}
        assert running.client.get("/health").status_code == 503
        assert running.post("/v1/logs", json.loads(SAMPLE.read_text().splitlines()[1])).status_code == 503
        running.stop(signal.SIGKILL)
    kafka.ensure_topics(PipelinesConfig(kafka=kafka_config), home)
    (home.run / "collector.json").unlink()
    with Collecting(home, kafka_config) as running:
        assert running.delivered()
        assert running.post("/v1/events", batch).status_code == 202, "the client sends its batch again"
        assert running.delivered()
    ids = Counter(event["event_id"] for event in arrived(home, kafka_config))
    assert set(ids) == {event["event_id"] for event in taken + batch}


def test_a_stop_lets_requests_finish_delivers_what_was_taken_and_leaves_no_state(home: Home, kafka_config: KafkaConfig) -> None:
    kafka.ensure_topics(PipelinesConfig(kafka=kafka_config), home)
    with Collecting(home, kafka_config) as running:
        events = [feedback("stop", score=i / 1000) for i in range(500)]
        assert running.post("/v1/events", events).json()["accepted"] == 500
        assert running.stop(signal.SIGTERM) == 0
        assert not (home.run / "collector.json").exists()
    assert [event["event_id"] for event in arrived(home, kafka_config)] == [event["event_id"] for event in events]
    assert not list(home.spool.rglob("*.jsonl"))


def test_every_metric_and_event_is_accounted_for(shared: Collecting) -> None:
    before = shared.metric('tidegate_collector_records_total{path="events",fate="accepted"}')
    shared.post("/v1/events", [feedback("count"), 7, feedback("count")])
    assert shared.metric('tidegate_collector_records_total{path="events",fate="accepted"}') == before + 2
    assert shared.delivered()
    assert shared.metric("tidegate_collector_events_total") == shared.metric('tidegate_recorder_events{fate="recorded"}')
    assert shared.metric('tidegate_recorder_events{fate="dropped"}') == 0
    assert Path(shared.home.run / "collector.json").exists()
