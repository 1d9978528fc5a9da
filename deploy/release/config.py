"""Settings of gate, release and schedule."""

from pipelines.config import Section


class GateConfig(Section):
    """Checks and margins; hashed into every ship."""


class ReleaseConfig(Section):
    """Leases, retention and freezes."""


class ScheduleConfig(Section):
    """When a cycle runs."""

    interval_hours: float = 5.0
