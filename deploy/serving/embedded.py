"""The embedded engine: one checkpoint served over HTTP by this process, from start to end (`python -m deploy.serving.embedded`).

Speaks the part of vLLM's API that the gateway uses, so that either can stand behind it:

    GET  /health                {"ready", "checkpoint", "dtype", "load"}
    POST /v1/chat/completions   OpenAI's body, plus prompt_token_ids, token_ids, logprobs as sampled, timings
    POST /score                 log-probabilities of given responses (the gateway's fingerprint, the gate's self-check)

Takes: a checkpoint folder. Gives: completions with their tokens. Leaves out: who may ask, events, tool calls (the gateway's).
This process may import torch and transformers; nothing else under `deploy` does. Thread settings come before torch is loaded,
because OpenMP reads them once.
"""

import asyncio
import ctypes
import json
import os
import secrets
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Final

import uvicorn
from cyclopts import App, Parameter
from jinja2 import TemplateError
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from deploy.serving.batching import BatchEngine, Generation
from deploy.serving.hangup import unless_hung_up
from deploy.serving.protocol import ChatRequest, RequestRefused, ScoreRequest, error_body, parse_chat
from deploy.serving.scheduler import PrefixMemory, Sampling
from pipelines.errors import ConfigError, EngineUnavailable
from pipelines.storage import write_atomic
from pipelines.terminal import run
from trainer.candidates import checkpoint_id
from trainer.chat import Chat
from trainer.chat import load as load_chat

PR_SET_PDEATHSIG: Final = 1
"""prctl(2): the kernel sends this process a signal when its parent dies."""

DEFAULT_MAX_TOKENS: Final = 256


class Engine:
    """A batch engine with the checkpoint's template and tokenizer in front."""

    def __init__(self, batch: BatchEngine, chat: Chat, *, checkpoint: str, dtype: str) -> None:
        self._batch = batch
        self._chat = chat
        self._checkpoint = checkpoint
        self._dtype = dtype

    async def health(self, _request: Request) -> Response:
        """Say whether the decoding thread lives."""
        body = {"ready": self._batch.alive, "checkpoint": self._checkpoint, "dtype": self._dtype, "load": self._batch.load}
        return JSONResponse(body, status_code=200 if self._batch.alive else 503)

    async def chat(self, request: Request) -> Response:
        """Answer one chat completion."""
        asked = parse_chat(await request.body())
        prompt = self._render(asked)
        sampling = Sampling(
            temperature=1.0 if asked.temperature is None else asked.temperature, top_p=asked.top_p or 1.0, top_k=max(0, asked.top_k or 0),
            max_tokens=asked.limit or DEFAULT_MAX_TOKENS, seed=secrets.randbits(48) if asked.seed is None else asked.seed,
        )  # fmt: skip
        try:
            future = self._batch.submit(prompt, sampling)
        except ValueError as error:
            raise RequestRefused(400, str(error), code="context_length_exceeded") from error
        done = await unless_hung_up(request, asyncio.wrap_future(future))
        return JSONResponse(self._body(prompt, done)) if done else Response(status_code=499)

    async def score(self, request: Request) -> Response:
        """Score given responses."""
        try:
            asked = ScoreRequest.model_validate_json(await request.body())
        except ValidationError as error:
            raise RequestRefused(400, f"rows: {error.errors()[0]['msg']}", code="invalid_request") from error
        rows = [(row.prompt_ids, row.response_ids, row.temperature) for row in asked.rows]
        return JSONResponse({"logprobs": _finite(await asyncio.wrap_future(self._batch.score(rows)))})

    def _render(self, asked: ChatRequest) -> list[int]:
        try:
            return self._chat.ids(asked.rendered(), tools=asked.tools, prompt=True)
        except (TemplateError, KeyError, TypeError, ValueError) as error:
            raise RequestRefused(400, f"the chat template refuses these messages: {error}", code="invalid_messages") from error

    def _body(self, prompt: list[int], done: Generation) -> dict[str, Any]:
        shown = done.response_ids[:-1] if done.finish_reason == "stop" else done.response_ids
        content = self._chat.tokenizer.decode(shown, skip_special_tokens=False)
        pieces = [self._chat.tokenizer.id_to_token(token) or "" for token in done.response_ids]
        logprobs = [
            {"token": piece, "logprob": value, "bytes": None, "top_logprobs": []}
            for piece, value in zip(pieces, done.logprobs, strict=True)
        ]  # fmt: skip
        return {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._checkpoint,
            "prompt_token_ids": prompt,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": content},
                    "finish_reason": done.finish_reason,
                    "token_ids": done.response_ids,
                    "logprobs": {"content": logprobs},
                }
            ],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(done.response_ids),
                "total_tokens": len(prompt) + len(done.response_ids),
                "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
            },
            "timings": {"ttft_ms": done.ttft_ms, "duration_ms": done.duration_ms},
        }

    def app(self) -> Starlette:
        """Return the HTTP application."""
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/score", self.score, methods=["POST"]),
            ],
            exception_handlers={RequestRefused: _refused, EngineUnavailable: _unavailable},
        )


def _finite(rows: list[list[float]]) -> list[list[float | None]]:
    """Return the rows with None where JSON has no word for the value (NaN, infinity)."""
    return [[value if value - value == 0 else None for value in row] for row in rows]


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused)
    return JSONResponse(error_body(error.status, error.sentence, code=error.code), status_code=error.status)


async def _unavailable(_request: Request, error: Exception) -> Response:
    return JSONResponse(error_body(500, str(error), code="engine_failed"), status_code=500)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, so that no engine outlives a killed gateway.

    Raises:
        EngineUnavailable: The parent is gone already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise EngineUnavailable("the gateway that started this engine is gone")


def _limit_threads(threads: int) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # a spinning barrier beside busy neighbours makes small operations 50 times slower
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_HUB_OFFLINE"] = "1"

    import torch

    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)


app = App(name="embedded", help="Serve one checkpoint over HTTP.")


@app.default
def serve(
    *,
    checkpoint: Annotated[Path, Parameter(help="Checkpoint folder.")],
    port: Annotated[int, Parameter(help="Port on the loopback address; 0 takes a free one.")] = 0,
    threads: Annotated[int, Parameter(help="CPU threads.")] = 1,
    dtype: Annotated[str, Parameter(help="float32, bfloat16, or auto.")] = "auto",
    rows: Annotated[int, Parameter(help="Sequences decoded at once.")] = 32,
    context: Annotated[int, Parameter(help="Tokens of prompt and response together.")] = 4096,
    prefill_tokens: Annotated[int, Parameter(help="Prompt tokens read between two steps.")] = 512,
    prefix_bytes: Annotated[int, Parameter(help="Memory for prompts already read; 0 turns it off.")] = 500_000_000,
    state: Annotated[Path | None, Parameter(help="Write {url, pid} here once listening.")] = None,
    parent: Annotated[int | None, Parameter(help="Die when this process, our parent, dies.")] = None,
) -> None:
    """Load the checkpoint and serve it until a signal."""
    if parent is not None:
        _die_with(parent)
    _limit_threads(threads)
    from deploy.serving.decoder import choose_dtype, load, sample

    decoder = load(checkpoint, dtype=choose_dtype(dtype), rows=rows)
    memory = PrefixMemory(max_bytes=prefix_bytes, token_bytes=decoder.token_bytes)
    batch = BatchEngine(
        decoder, sample, rows=rows, context=min(context, decoder.positions), prefill_tokens=prefill_tokens, memory=memory
    )  # fmt: skip
    engine = Engine(batch, load_chat(checkpoint), checkpoint=checkpoint_id(checkpoint), dtype=decoder.dtype)
    with batch, socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(f"port {port} is taken ({error.strerror}); choose another or 0 for a free one") from error
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.listen(256)
        if state:
            write_atomic(state, json.dumps({"url": url, "pid": os.getpid()}).encode())
        print(json.dumps({"url": url, "pid": os.getpid()}), flush=True)
        config = uvicorn.Config(
            engine.app(), log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=5, timeout_keep_alive=75
        )
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    sys.exit(run(app))
