"""Settings of serving."""

import os
from typing import Literal

from pydantic import Field

from pipelines.config import Section


class ServingConfig(Section):
    """Engines and the gateway."""

    host: str = "127.0.0.1"
    """Address the gateway listens on. Loopback by default: whoever opens it to a network does so knowingly."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free port, which is printed and written to run/gateway.json."""
    threads: int = Field(default=0, ge=0)
    """CPU threads an engine uses; 0 takes half the cores, so that both replicas of a swap fit."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 where the machine has instructions for it."""
    rows: int = Field(default=32, ge=1)
    """Sequences an engine decodes at once; throughput on one core still grows from 8 to 32 (113 to 187 tok/s)."""
    context_tokens: int = Field(default=4096, ge=16)
    """Tokens of prompt and response together; the model's own bound applies too."""
    prefill_tokens: int = Field(default=512, ge=1)
    """Prompt tokens an engine reads between two decoding steps: about half a second on one core."""
    prefix_bytes: int = Field(default=1_000_000_000, ge=0)
    """Memory an engine may use for prompts already read: 46 kB a token of SmolLM2-135M."""
    temperature: float = Field(default=1.0, gt=0, le=5)
    """Where the client names none. 1 keeps the behaviour policy equal to the trained one."""
    max_tokens: int = Field(default=256, ge=1)
    """Response tokens where the client names no bound."""
    max_body_bytes: int = Field(default=4_000_000, ge=1_000)
    """Larger requests are refused with 413."""
    request_timeout_s: float = Field(default=300.0, gt=0)
    """From arrival to answer; then 504."""
    retry_s: float = Field(default=60.0, ge=0)
    """How long a request waits for a replica that restarts; then 503."""
    poll_s: float = Field(default=1.0, gt=0)
    """Seconds between two looks at the ledger's pointer."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """A replica that is not ready by then is stopped; a full machine loads 135M parameters in about 10 s."""
    drain_s: float = Field(default=120.0, ge=0)
    """How long sessions that began on the old checkpoint may stay there after a swap."""
    restart_backoff_s: float = Field(default=0.5, gt=0)
    """Wait before a crashed replica is started again; doubles at every crash up to a minute."""
    tolerance_float32: float = Field(default=1e-3, gt=0)
    """Fingerprint: largest mean |difference| of log-probabilities to the checkpoint's own reference, nats."""
    tolerance_bfloat16: float = Field(default=0.15, gt=0)
    """The same where the engine rounds to bfloat16: SmolLM2-135M measures 0.019 to 0.072; weights scaled by 1.5 measure far above. That
    these are the right weights is the manifest's to prove; this proves that they were loaded whole."""

    def engine_threads(self) -> int:
        """Return the threads of one engine on this machine."""
        return self.threads or max(1, len(os.sched_getaffinity(0)) // 2)
