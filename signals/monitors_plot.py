"""The reward by hour with its confidence sequence, as a picture.

Takes: the home, settings, a file name. Gives: an SVG or PNG. Leaves out: everything else; matplotlib is loaded here and nowhere else.
"""

from datetime import datetime
from pathlib import Path

import numpy as np
import polars as pl

from pipelines.errors import ConfigError
from pipelines.storage import Home
from signals.config import SignalsConfig
from signals.drift import Floats, sequence_half_width, sequence_rho
from signals.drift_compare import variance_of_mean
from signals.monitors import history
from signals.monitors_facts import load


def hourly_sequence(turns: pl.DataFrame, *, alpha: float, tight_at: float) -> pl.DataFrame:
    """Return by policy version and hour: the hour's mean reward, the mean so far and its half width, valid at every hour.

    Args:
        turns: Turns with `reward`, in time order.
        alpha: Chance that a policy's sequence ever misses its mean.
        tight_at: Observations at which it is tightest.
    """
    rewarded = turns.filter(pl.col("reward").is_not_null()).with_columns(pl.col("started_at").dt.truncate("1h").alias("hour"))
    rho, rows = sequence_rho(tight_at, alpha=alpha), []
    for (version,), own in rewarded.group_by("policy_version", maintain_order=True):
        codes = own["user_key"].rank("dense").to_numpy()
        values = own["reward"].to_numpy()
        for hour in own["hour"].unique(maintain_order=True).to_list():
            t = int((own["hour"] <= hour).sum())
            mean = float(values[:t].mean())
            sigma = float(np.sqrt(variance_of_mean((values[:t] - mean) / t, codes[:t]) * t))
            half = sequence_half_width(t, sigma=sigma, rho=rho, alpha=alpha) if t > 1 else None
            here = float(own.filter(pl.col("hour") == hour)["reward"].mean())  # type: ignore[arg-type]
            rows.append({"policy_version": version, "hour": hour, "n": t, "hour_mean": here, "mean": mean, "half_width": half})
    kinds = {"policy_version": pl.Int64, "hour": pl.Datetime("us", "UTC"), "n": pl.Int64}
    return pl.DataFrame(rows, schema=kinds | dict.fromkeys(("hour_mean", "mean", "half_width"), pl.Float64))


def draw(home: Home, config: SignalsConfig, file: Path, *, now: datetime) -> None:
    """Draw every policy version of the history: dots are hours, the line is the mean so far, the band its confidence sequence.

    Raises:
        ConfigError: The file's ending is no picture that can be written.
        ContractViolation: A table is damaged.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    facts = load(home, config.monitors, since=history(config, now), until=now)
    found = hourly_sequence(facts.turns, alpha=config.monitors.alpha, tight_at=config.monitors.tight_at)
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    try:
        for (version,), own in found.group_by("policy_version", maintain_order=True):
            hours = own["hour"].to_list()
            (line,) = axes.plot(hours, own["mean"].to_list(), label=f"policy {version}")
            axes.plot(hours, own["hour_mean"].to_list(), ".", color=line.get_color(), alpha=0.6)
            mean, half = own["mean"].to_numpy(), own["half_width"].fill_null(2.0).to_numpy()
            low, high = _clipped(mean - half), _clipped(mean + half)
            axes.fill_between(hours, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        axes.set(ylabel="reward", xlabel="hour (UTC)", title=f"Reward by hour; bands hold at every look ({1 - config.monitors.alpha:.0%})")
        if len(found):
            axes.legend()
        figure.autofmt_xdate()
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file)
    except ValueError as error:
        raise ConfigError(f"--plot {file}: cannot write that kind of file ({error}); end it in .svg or .png") from error
    finally:
        pyplot.close(figure)


def _clipped(values: Floats) -> Floats:
    return np.clip(values, -1.0, 1.0)
