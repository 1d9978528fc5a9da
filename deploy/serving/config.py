"""Settings of serving."""

from pipelines.config import Section


class ServingConfig(Section):
    """Engines and the gateway."""
