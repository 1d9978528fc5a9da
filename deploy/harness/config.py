"""Settings of the agent harness, its simulated users, and the benchmark that runs on it."""

from pipelines.config import Section


class HarnessConfig(Section):
    """Tools, sandbox and agent loop."""


class SimulationConfig(Section):
    """Simulated users and the tasks they bring."""


class BenchmarkConfig(Section):
    """Task folders and how often each is tried."""
