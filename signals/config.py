"""Settings of the signal stage."""

from pipelines.config import PipelinesConfig, Section


class SparkConfig(Section):
    """How Spark runs."""

    master: str = "local[2]"
    driver_memory: str = "2g"


class JobsConfig(Section):
    """The append and distil jobs."""


class RewardsConfig(Section):
    """Weights and windows of the reward."""


class SignalsConfig(PipelinesConfig):
    """Settings up to the signal stage."""

    spark: SparkConfig = SparkConfig()
    signals: JobsConfig = JobsConfig()
    rewards: RewardsConfig = RewardsConfig()
