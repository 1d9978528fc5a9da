"""Fixtures: harness. A real sandbox, and a real HTTP server on loopback that answers chat completions from a script."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deploy.harness.client import GatewayClient
from deploy.harness.config import HarnessConfig, SimulationConfig
from deploy.harness.demonstrations import DONE, call_text
from deploy.harness.sandbox import Bubblewrap, Limits
from deploy.harness.session import Services
from deploy.harness.tasks import Form, Split, Task, make_task
from deploy.serving.toolcalls import openai_calls, parse
from pipelines.events import Event

Policy = Callable[[dict[str, Any], dict[str, str]], "str | Scripted"]


@dataclass(frozen=True, kw_only=True)
class Scripted:
    """A scripted answer that is more than a text."""

    content: str = ""
    status: int = 200
    finish_reason: str = "stop"
    policy_version: int = 3
    error_code: str = ""
    """OpenAI's code beside a status that is not 200."""


@dataclass
class ListSink:
    """Keeps events."""

    events: list[Event] = field(default_factory=list)

    def record(self, event: Event, /) -> None:
        self.events.append(event)

    def of(self, kind: str) -> list[Any]:
        return [event for event in self.events if event.type == kind]


class ScriptedGateway:
    """Answers completions as a policy function says; keeps what it was asked."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 20  # a client that forgot to close must not hang the test

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                headers = {name.lower(): value for name, value in self.headers.items()}
                outer.requests.append((headers, body))
                answer = outer.policy(body, headers)
                outer._reply(self, answer if isinstance(answer, Scripted) else Scripted(content=answer), len(outer.requests))

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = False  # closing the server joins its threads, so no socket outlives a test
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def _reply(self, handler: BaseHTTPRequestHandler, answer: Scripted, number: int) -> None:
        completion_id = f"c{number}"
        calls = openai_calls(parse(answer.content), completion_id=completion_id)
        message = {"role": "assistant", "content": answer.content} | ({"tool_calls": calls} if calls else {})
        body = {
            "id": completion_id,
            "choices": [{"index": 0, "message": message, "finish_reason": answer.finish_reason}],
            "usage": {"prompt_tokens": 100, "completion_tokens": max(1, len(answer.content) // 4)},
        }
        if answer.error_code:
            body = {"error": {"message": "no", "code": answer.error_code}}
        data = json.dumps(body).encode()
        handler.send_response(answer.status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.send_header("X-Completion-Id", completion_id)
        handler.send_header("X-Policy-Version", str(answer.policy_version))
        handler.send_header("X-Arm", "serving")
        handler.end_headers()
        handler.wfile.write(data)

    def __enter__(self) -> "ScriptedGateway":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def edit_text(task: Task, form: Form) -> str:
    """The right call for a task."""
    return call_text("edit_file", {"old": task.change.old, "new": task.change.new(form, task.ticket), "path": task.path})


def knowing_policy(form: Form, *, split: Split, seed: int, number: int = 200) -> Policy:
    """A policy that knows every task of a run and cites the ticket as it likes, whatever users say."""
    known = {task.request: task for task in (make_task(split, seed, index) for index in range(number))}

    def answer(body: dict[str, Any], _headers: dict[str, str]) -> str:
        last = body["messages"][-1]
        if last["role"] == "tool" and last["content"] == "ok":
            return DONE
        asked = [request for message in body["messages"] if message["role"] == "user" for request in known if request in message["content"]]
        return edit_text(known[asked[-1]], form)

    return answer


@pytest.fixture(scope="session")
def sandbox() -> Bubblewrap:
    """The real sandbox; a machine where it does not work fails these tests and says why."""
    box = Bubblewrap(limits=Limits(wall_s=5.0, memory_bytes=256 * 1024 * 1024))
    box.preflight()
    return box


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    path = tmp_path / "workspace"
    path.mkdir()
    return path


@pytest.fixture
def scripted() -> Iterator[Callable[[Policy], ScriptedGateway]]:
    """Start scripted gateways; they stop with the test."""
    started: list[ScriptedGateway] = []

    def start(policy: Policy) -> ScriptedGateway:
        gateway = ScriptedGateway(policy)
        gateway.__enter__()
        started.append(gateway)
        return gateway

    yield start
    for gateway in started:
        gateway.__exit__()


@pytest.fixture
def services(sandbox: Bubblewrap) -> Iterator[Callable[..., Services]]:
    """Build the parts of a run against a gateway's address."""
    clients: list[GatewayClient] = []

    def build(url: str, sink: ListSink, **simulation: Any) -> Services:
        harness = HarnessConfig()
        client = GatewayClient(url, timeout_s=20.0, tries=1)
        clients.append(client)
        return Services(
            client=client,
            sandbox=sandbox,
            sink=sink,
            key_of=lambda raw: f"key-{raw}",
            harness=harness,
            simulation=SimulationConfig(**simulation),
        )

    yield build
    for client in clients:
        client.__exit__()
