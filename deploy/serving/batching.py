"""The engine's loop: one thread that reads prompts, decodes all sequences together, and lets them join and leave between steps.

On a CPU a step of 32 sequences costs about six times a step of one, so batching is most of the throughput; joining between
steps (continuous batching) keeps the batch full without anyone waiting for a stranger's long answer.

Takes: token ids and sampling wishes. Gives: futures of `Generation`. Leaves out: text, HTTP (`embedded.py`), tensors (`decoder.py`).
Source: Yu et al., Orca: a distributed serving system for transformer-based generative models, OSDI 2022, section 3.
"""

import logging
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Protocol, Self

import numpy as np

from deploy.serving.scheduler import Prefix, PrefixMemory, Sampling, common_prefix
from pipelines.errors import EngineUnavailable

log = logging.getLogger(__name__)

IDLE_WAIT_S: Final = 0.5
"""How long an idle loop sleeps before it looks for a stop; requests wake it at once."""


class Rows(Protocol):
    """What the loop needs of a decoder (`decoder.Decoder`, or a test's small one)."""

    end_ids: frozenset[int]

    def prefill(self, row: int, ids: Sequence[int], *, start: int) -> Any:
        """Read prompt tokens into a row; return logits after the last."""

    def step(self, tokens: Sequence[int], lengths: Sequence[int]) -> Any:
        """Run one token of each row; return logits [n, V]."""

    def copy(self, row: int, *, length: int) -> Any:
        """Return a copy of a row."""

    def paste(self, row: int, stored: Any, *, length: int) -> None:
        """Fill a row from a copy."""

    def move(self, source: int, target: int, *, length: int) -> None:
        """Copy a row over another one."""

    def score(self, prompt_ids: Sequence[int], response_ids: Sequence[int], *, temperature: float) -> list[float]:
        """Return log-probabilities of a given response."""
        ...


Sampler = Callable[[Any, Sequence[Sampling], Sequence[float]], tuple[list[int], list[float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What one request got."""

    response_ids: list[int]
    """The end token included when it was sampled."""
    logprobs: list[float]
    """Nats, at logits / temperature over the whole vocabulary, one per response id."""
    finish_reason: str
    """stop or length."""
    cached_tokens: int
    """Prompt tokens that were not computed again."""
    ttft_ms: float
    """From arrival to the first token."""
    duration_ms: float
    """From arrival to the last token."""


@dataclass(slots=True, kw_only=True)
class Running:
    """A request on its way through the batch."""

    prompt_ids: list[int]
    sampling: Sampling
    limit: int
    """Response tokens at most: `max_tokens`, or less when the context ends earlier."""
    future: "Future[Generation]"
    arrived: float
    rng: random.Random
    cached: int = 0
    first_at: float = 0.0
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def filled(self) -> int:
        """Positions of its row that are computed: all but the newest token."""
        return len(self.prompt_ids) + len(self.response) - 1

    @property
    def broken(self) -> bool:
        """Whether the newest log-probability is not a number, so that going on is senseless."""
        return not math.isfinite(self.logprobs[-1])

    @property
    def known(self) -> list[int]:
        """The token ids of those positions."""
        return self.prompt_ids + self.response[:-1]


@dataclass(slots=True, kw_only=True)
class _Score:
    rows: list[tuple[list[int], list[int], float]]
    future: "Future[list[list[float]]]"


class BatchEngine:
    """Owns the decoder's thread for the life of the block."""

    def __init__(self, decoder: Rows, sampler: Sampler, *, rows: int, context: int, prefill_tokens: int, memory: PrefixMemory) -> None:
        self._decoder = decoder
        self._sampler = sampler
        self._rows = rows
        self.context = context
        self._prefill_tokens = prefill_tokens
        self._memory = memory
        self._inbox: queue.SimpleQueue[Running | _Score] = queue.SimpleQueue()
        self._active: list[Running] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop the thread; what is unfinished fails."""
        self._stop.set()
        self._inbox.put(_Score(rows=[], future=Future()))  # wakes an idle loop
        self._thread.join(timeout=30)

    @property
    def alive(self) -> bool:
        """Whether the thread still decodes."""
        return self._thread.is_alive()

    @property
    def load(self) -> int:
        """Sequences being decoded or waiting."""
        return len(self._active) + self._inbox.qsize()

    def submit(self, prompt_ids: list[int], sampling: Sampling) -> "Future[Generation]":
        """Queue a request; cancelling the future takes it out of the batch at the next step.

        Raises:
            ValueError: The prompt is empty or leaves no room for one token.
        """
        room = self.context - len(prompt_ids)
        if not prompt_ids or room < 1:
            raise ValueError(f"the prompt has {len(prompt_ids)} tokens; this model takes 1 to {self.context - 1}, shorten the conversation")
        future: Future[Generation] = Future()
        self._inbox.put(
            Running(
                prompt_ids=prompt_ids, sampling=sampling, limit=min(sampling.max_tokens, room), future=future,
                arrived=time.monotonic(), rng=random.Random(sampling.seed),
            )
        )  # fmt: skip
        return future

    def score(self, rows: list[tuple[list[int], list[int], float]]) -> "Future[list[list[float]]]":
        """Queue rows (prompt ids, response ids, temperature) to be scored between two steps."""
        future: Future[list[list[float]]] = Future()
        self._inbox.put(_Score(rows=rows, future=future))
        return future

    def _run(self) -> None:
        waiting: list[Running] = []
        while not self._stop.is_set():
            idle = not self._active and not waiting
            self._receive(waiting, wait_s=IDLE_WAIT_S if idle else 0.0)
            try:
                self._admit(waiting)
                self._leave(lambda sequence: sequence.future.cancelled())
                if self._active:
                    self._decode()
            except RuntimeError as error:  # torch's only error class: out of memory, a kernel that does not exist, ...
                log.error("a decoding step failed", exc_info=error)
                self._fail(self._active, f"the engine failed on this batch: {error}")
                self._active.clear()
        self._fail([*self._active, *waiting], "the engine is stopping; send the request again")

    def _fail(self, sequences: list[Running], sentence: str) -> None:
        for sequence in sequences:
            if sequence.future.set_running_or_notify_cancel():
                sequence.future.set_exception(EngineUnavailable(sentence))

    def _receive(self, waiting: list[Running], *, wait_s: float) -> None:
        try:
            item = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            while True:
                if isinstance(item, _Score):
                    self._score(item)
                else:
                    waiting.append(item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _score(self, job: _Score) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            job.future.set_result([self._decoder.score(prompt, response, temperature=t) for prompt, response, t in job.rows])
        except (RuntimeError, IndexError) as error:
            job.future.set_exception(EngineUnavailable(f"these rows cannot be scored: {error}"))

    def _admit(self, waiting: list[Running]) -> None:
        """Read prompts into free rows, at most `prefill_tokens` of them between two steps so that running answers go on."""
        budget = self._prefill_tokens
        while waiting and len(self._active) < self._rows and budget > 0:
            sequence = waiting.pop(0)
            if sequence.future.cancelled():
                continue
            row = len(self._active)
            self._active.append(sequence)
            sequence.cached = self._reuse(sequence, row)
            fresh = sequence.prompt_ids[sequence.cached :]
            budget -= len(fresh)
            logits = self._decoder.prefill(row, fresh, start=sequence.cached)
            self._extend(logits, [sequence])

    def _reuse(self, sequence: Running, row: int) -> int:
        """Fill the row with the longest known prefix, from a running neighbour or from memory; return its length."""
        wanted = np.asarray(sequence.prompt_ids[:-1], dtype=np.int32)
        shared = [common_prefix(np.asarray(mate.known, dtype=np.int32), wanted) for mate in self._active[:row]]
        neighbour = int(np.argmax(shared)) if shared else -1
        found: Prefix | None = self._memory.find(sequence.prompt_ids)
        if shared and shared[neighbour] >= max(1, found.length if found else 0):
            self._decoder.move(neighbour, row, length=shared[neighbour])
            return shared[neighbour]
        if found:
            self._decoder.paste(row, found.stored, length=found.length)
            return found.length
        return 0

    def _decode(self) -> None:
        logits = self._decoder.step([s.response[-1] for s in self._active], [s.filled for s in self._active])
        self._extend(logits, list(self._active))

    def _extend(self, logits: Any, sequences: list[Running]) -> None:
        """Sample the next token of each sequence, and let go those that are done."""
        uniforms = [sequence.rng.random() for sequence in sequences]
        tokens, logprobs = self._sampler(logits, [s.sampling for s in sequences], uniforms)
        now = time.monotonic()
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            sequence.response.append(token)
            sequence.logprobs.append(logprob)
            sequence.first_at = sequence.first_at or now
        self._leave(lambda s: bool(s.response) and (s.response[-1] in self._decoder.end_ids or len(s.response) >= s.limit or s.broken))

    def _leave(self, done: Callable[[Running], bool]) -> None:
        """Take sequences out of the batch; the last row moves into each gap."""
        for row in range(len(self._active) - 1, -1, -1):
            sequence = self._active[row]
            if not done(sequence):
                continue
            if not sequence.broken and self._memory.wants(sequence.known):
                self._memory.keep(sequence.known, self._decoder.copy(row, length=sequence.filled))
            last = len(self._active) - 1
            if row != last:
                self._decoder.move(last, row, length=self._active[last].filled)
                self._active[row] = self._active[last]
            self._active.pop()
            self._finish(sequence)

    def _finish(self, sequence: Running) -> None:
        if not sequence.future.set_running_or_notify_cancel():
            return
        if not all(map(math.isfinite, sequence.logprobs)):
            sequence.future.set_exception(EngineUnavailable("the checkpoint gives log-probabilities that are not finite; roll back"))
            return
        now = time.monotonic()
        sequence.future.set_result(
            Generation(
                response_ids=sequence.response, logprobs=sequence.logprobs,
                finish_reason="stop" if sequence.response[-1] in self._decoder.end_ids else "length",
                cached_tokens=sequence.cached, ttft_ms=(sequence.first_at - sequence.arrived) * 1000,
                duration_ms=(now - sequence.arrived) * 1000,
            )
        )  # fmt: skip
