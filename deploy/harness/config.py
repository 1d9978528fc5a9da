"""Settings of the agent harness, its simulated users, and the benchmark that runs on it."""

from typing import Literal

from pydantic import Field

from pipelines.config import Section


class HarnessConfig(Section):
    """Tools, sandbox and agent loop."""

    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    """`none` runs the policy's commands unconfined: it must be typed, and is for machines that are a sandbox themselves."""
    command_timeout_s: float = Field(default=10.0, gt=0)
    """Wall time of one command; small edits and their checks take well under a second."""
    cpu_s: int = Field(default=10, ge=1)
    """CPU time of one process."""
    memory_bytes: int = Field(default=1_073_741_824, ge=33_554_432)
    """Address space of one process, and resident memory of all processes of one command together."""
    processes: int = Field(default=64, ge=1)
    """Processes of one command at once."""
    file_bytes: int = Field(default=16_777_216, ge=1)
    """Largest file that a command may write."""
    output_bytes: int = Field(default=8_192, ge=64)
    """Output of a command or a read that the policy gets to see; a command that writes 64 times this is stopped."""
    max_steps: int = Field(default=4, ge=1)
    """Completions in one turn; a small edit takes two, with a read before it three, so one
    call may be repaired. A small policy repeats a failing call as long as it is let."""
    max_invalid_steps: int = Field(default=3, ge=1)
    """Completions in a row with no valid call after which the turn ends: it was told what is wrong
    and did it again."""
    max_tokens: int = Field(default=128, ge=1)
    """Tokens of one completion; a call that edits one line takes about 60."""
    max_turn_tokens: int = Field(default=512, ge=1)
    """Sampled tokens of one turn."""
    temperature: float = Field(default=1.0, ge=0)
    """1.0 so that the behaviour log-probs are those of the policy itself; top_p and top_k stay off for the same reason."""
    request_timeout_s: float = Field(default=300.0, gt=0)
    """One completion; generous because a CPU engine answers many sessions in one batch."""
    request_tries: int = Field(default=4, ge=1)
    """Tries of one completion while the gateway is unreachable or busy."""


class SimulationConfig(Section):
    """Simulated users and the tasks they bring."""

    users: int = Field(default=24, ge=1)
    """Users a run draws its sessions from, so that intervals can be taken by user."""
    preference: Literal["see", "ref"] = "ref"
    """Hidden from the policy: the word with which these users want a changed line to cite its ticket (see `users.py`)."""
    requests_per_session: int = Field(default=2, ge=1)
    """Most requests that one user brings to one session."""
    max_asks_again: int = Field(default=1, ge=0)
    """How often a user repeats one request before giving it up."""
    patience_s: float = Field(default=120.0, gt=0)
    """Median time a user waits for a turn; a CPU engine that answers a batch needs tens of seconds."""
    horizons_s: tuple[int, ...] = (0, 300, 900)
    """Horizons at which edit survival is told; simulated time is compressed, so all come right after the decision."""


class BenchmarkConfig(Section):
    """Task folders and how often each is tried."""

    attempts: int = Field(default=2, ge=1)
    """Tries of each task folder; each has its own sampling seed."""
    simulated_sessions: int = Field(default=24, ge=0)
    """Held-out simulated sessions, so that rates of calls, asks and edits have a usable n."""
    concurrency: int = Field(default=8, ge=1)
    """Sessions at once; the embedded engine batches them."""
