"""The whole settings tree: every stage's sections and those of serving, harness, gate and schedule."""

from deploy.harness.config import BenchmarkConfig, HarnessConfig, SimulationConfig
from deploy.release.config import GateConfig, ReleaseConfig, ScheduleConfig
from deploy.serving.config import ServingConfig
from trainer.config import TrainerConfig


class Config(TrainerConfig):
    """All settings of a deployment."""

    serving: ServingConfig = ServingConfig()
    harness: HarnessConfig = HarnessConfig()
    simulation: SimulationConfig = SimulationConfig()
    benchmark: BenchmarkConfig = BenchmarkConfig()
    gate: GateConfig = GateConfig()
    release: ReleaseConfig = ReleaseConfig()
    schedule: ScheduleConfig = ScheduleConfig()
