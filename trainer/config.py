"""Settings of the training stage."""

from pipelines.config import Section
from signals.config import SignalsConfig


class UpdateConfig(Section):
    """One on-policy update."""


class WarmstartConfig(Section):
    """Supervised training before reinforcement."""


class MlflowConfig(Section):
    """Where runs are tracked."""

    tracking_uri: str = ""
    """Empty means SQLite under the deployment's home."""


class TrainerConfig(SignalsConfig):
    """Settings up to the training stage."""

    trainer: UpdateConfig = UpdateConfig()
    warmstart: WarmstartConfig = WarmstartConfig()
    mlflow: MlflowConfig = MlflowConfig()
