"""A real HTTP server on the loopback address that speaks as much of the OpenAI chat API as a judge asks for."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server:
    """Answers chat requests with what `reply` makes of their number; keeps what it was asked."""

    def __init__(self) -> None:
        self.reply: Callable[[int], tuple[int, Any]] = lambda _: (200, answer("NO"))
        self.asked: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                owner.asked.append({"path": self.path} | body)
                owner.headers.append(self.headers.get("Authorization"))
                status, content = owner.reply(len(owner.asked))
                raw = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def answer(text: str, tokens: int | None = 50) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}}]} | ({} if tokens is None else {"usage": {"total_tokens": tokens}})
