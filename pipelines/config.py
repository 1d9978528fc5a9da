"""How Tidegate is configured: one TOML file an environment, `--set` overrides, secrets only from the environment.

Each stage owns its sections as pydantic models and extends the tree of the stage it imports from, so the tree grows in the
direction of the imports: `PipelinesConfig` < `SignalsConfig` < `TrainerConfig` < `deploy.config.Config`. A stage that runs
alone reads the same file and ignores the sections of the stages after it; inside a known section an unknown key is an error.

Takes: a TOML path and overrides. Gives: a frozen tree and its digest. Leaves out: what the values mean.
"""

import difflib
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from pipelines.errors import ConfigError


class Section(BaseModel):
    """A closed, frozen group of settings."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)


class KafkaConfig(Section):
    """Where events go."""

    bootstrap_servers: str = ""
    """Comma-separated host:port; empty means the embedded broker of this deployment."""
    topic: str = "session-events"
    partitions: int = Field(default=4, ge=1)
    replication: int = Field(default=1, ge=1)
    retention_hours: int = Field(default=168, ge=1)
    max_event_bytes: int = Field(default=1_000_000, ge=1_000)
    """Larger events travel as a claim check: a small record that names a file."""
    max_claim_bytes: int = Field(default=32_000_000, ge=0)
    """Events larger than this are spooled to quarantine with reason `oversized`, never sent. Four million tokens, packed."""
    claims: str = ""
    """Where the files of large events lie: an address that producers can write and the signal stage can read (file://, s3://, hdfs://).
    Empty means a folder of this deployment, which is enough while both run on one machine."""
    buffer_events: int = Field(default=10_000, ge=1)
    """Events held in memory before the recorder spools to disk."""
    spool_max_bytes: int = Field(default=1_000_000_000, ge=0)
    """Disk that the spool may take while the broker is away."""
    security: dict[str, str] = Field(default_factory=dict)
    """Extra kafka-python settings (security_protocol, sasl_mechanism, ...); secrets come from TIDEGATE_KAFKA_*."""


class PrivacyConfig(Section):
    """What leaves the process that saw the user's text."""

    keep_text: bool = True
    """Whether redacted user text is kept for consented sessions; else only derived features."""
    default_consent: Literal["train", "measure", "none"] = "measure"


class CollectorConfig(Section):
    """The HTTP collector: events from clients that have no Kafka library."""

    host: str = "127.0.0.1"
    """Anything but a loopback address needs keys (`tidegate collect keys add`), and a TLS proxy in front."""
    port: int = Field(default=4318, ge=0, le=65_535)
    """OTLP's own port, where OpenTelemetry clients send to unless told otherwise; 0 means a free one."""
    max_body_bytes: int = Field(default=16_000_000, ge=1_000)
    """Body as sent. Exporters send 512 spans at a time; with content captured each carries its whole conversation."""
    max_inflated_bytes: int = Field(default=16_000_000, ge=1_000)
    """Body after decompression. JSON of telemetry shrinks to a tenth; a bomb grows a thousandfold."""
    max_events: int = Field(default=10_000, ge=1)
    """Records of one request."""
    rate_events_per_s: float = Field(default=2_000.0, gt=0)
    """Records a second that one key may send for long; a busy agent makes one or two."""
    burst_events: int = Field(default=20_000, ge=1)
    """Records that one key may send at once after a pause, for clients that were offline."""
    max_requests: int = Field(default=32, ge=1)
    """Requests in flight; their bodies are in memory, half a GB at the most. More are told to come back."""
    max_connections: int = Field(default=1_024, ge=1)
    """Open connections, idle ones included."""
    header_timeout_s: float = Field(default=10.0, gt=0)
    """From the first byte of a request to the end of its headers."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    """From there to the end of its body: 16 MB at 5 Mbit/s."""
    idle_timeout_s: int = Field(default=65, ge=1)
    """Between two requests of a connection; exporters send every 5 to 60 s."""


class SurvivalConfig(Section):
    """Following what becomes of edits."""

    horizons_s: tuple[int, ...] = Field(default=(0, 5, 30, 120, 300, 600, 900), min_length=1)
    """Seconds after an edit at which its file is read again: at once (was it applied?), while it is looked at, and until people have
    moved on. Those of 30 s and later are the ones that published trackers use, so that figures compare."""
    max_edits: int = Field(default=500, ge=1)
    """Edits watched at once; more are counted as refused."""
    max_file_bytes: int = Field(default=1_000_000, ge=1)
    """Larger files are not followed: they are data or generated."""
    spool_max_bytes: int = Field(default=64_000_000, ge=1)
    """Disk for the edits that wait, and as much again for those kept."""
    keep_days: int = Field(default=8, ge=0)
    """How long an edit's text stays on this machine after its last horizon, for `tidegate signals survival`; 0: not at all."""
    days: tuple[int, ...] = Field(default=(1, 7), min_length=1)
    """Days after an edit at which git history or snapshots are asked."""

    @field_validator("horizons_s", "days")
    @classmethod
    def _ascending(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if any(value < 0 for value in values) or list(values) != sorted(set(values)):
            raise ValueError("horizons ascend, none twice, none negative")
        return values


class PipelinesConfig(BaseModel):
    """Settings of the event pipeline."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    kafka: KafkaConfig = KafkaConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    collector: CollectorConfig = CollectorConfig()
    survival: SurvivalConfig = SurvivalConfig()


Tree = TypeVar("Tree", bound=PipelinesConfig)

ALL_SECTIONS: tuple[str, ...] = (
    "kafka", "privacy", "collector", "survival", "spark", "signals", "rewards", "followups", "lake", "monitors", "trainer", "pretrain",
    "warmstart", "serving", "harness", "simulation", "benchmark", "gate", "release", "schedule", "mlflow",
)  # fmt: skip
"""Every section of the whole tree; `deploy.config` is tested to define exactly these."""


def parse_override(text: str) -> tuple[list[str], Any]:
    """Split `section.key=value` into its path and its TOML value (a bare word is a string).

    Raises:
        ConfigError: There is no `=` or no dot before it.
    """
    dotted, equals, value = text.partition("=")
    path = dotted.strip().split(".")
    if not equals or len(path) < 2 or not all(path):
        raise ConfigError(f"--set {text!r}: write it as section.key=value, for example --set trainer.steps=4")
    try:
        return path, tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return path, value


def _explain(error: ValidationError, tree: type[PipelinesConfig], source: str) -> str:
    lines: list[str] = []
    for item in error.errors():
        dotted = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            known = _known_keys(tree)
            near = difflib.get_close_matches(dotted, known, n=1, cutoff=0.4)
            lines.append(f"{dotted} is not a setting" + (f"; did you mean {near[0]}?" if near else ""))
        else:
            lines.append(f"{dotted}: {item['msg']}")
    return f"{source}: " + "; ".join(lines)


def _known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _known_keys(field.annotation, f"{prefix}{name}.")
    return keys


def load(tree: type[Tree], path: Path | None = None, *, overrides: Sequence[str] = ()) -> Tree:
    """Read one environment's settings.

    Args:
        tree: The stage's configuration class.
        path: A TOML file; None means the defaults.
        overrides: `section.key=value` texts, applied in order after the file.

    Raises:
        ConfigError: The file is missing or not TOML, a key is unknown (the nearest known one is named), or a value is out of range.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(f"config file {path} does not exist") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"config file {path} is not valid TOML: {error}") from error
    for text in overrides:
        keys, value = parse_override(text)
        target = values
        for key in keys[:-1]:
            child: object = target.setdefault(key, {})
            if not isinstance(child, dict):
                raise ConfigError(f"--set {text!r}: {key} is a value, not a section")
            target = cast("dict[str, Any]", child)
        target[keys[-1]] = value
    later = set(ALL_SECTIONS) - set(tree.model_fields)
    own = {key: value for key, value in values.items() if key not in later}
    try:
        return tree.model_validate(own)
    except ValidationError as error:
        raise ConfigError(_explain(error, tree, str(path) if path else "settings")) from error


def digest(tree: BaseModel | Mapping[str, Any]) -> str:
    """Return the sha256 (hex) of the resolved settings in a canonical form."""
    data = tree.model_dump(mode="json") if isinstance(tree, BaseModel) else dict(tree)
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
