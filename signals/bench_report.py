"""The bench's result for people: a few lines and a picture.

Takes: the dict that `bench.run` gives. Gives: text, and an SVG or PNG. Leaves out: measuring. matplotlib is loaded only to draw.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any


def text(done: Mapping[str, Any]) -> str:
    """Return the result as lines."""
    speeds, ratios = done["events_per_s_core"], done["ratios"]
    lines = [f"events a second on one core ({done['headline_size']} events; per-group Python on the smallest size)"]
    for name, rate in speeds.items():
        spread = done["spread"][name]
        lines.append(f"  {name:18} {'not measured' if rate is None else f'{rate:>9.0f}   {spread[0]:.0f} to {spread[1]:.0f}'}")
    lines.append("pipeline by size: " + ", ".join(f"{size}: {rate:.0f}" for size, rate in done["by_size"].items()))
    shares = ", ".join(f"{size}: {share:.2f}" for size, share in ratios["pipeline_to_passthrough"].items())
    lines.append(f"pipeline / passthrough: {shares}")
    if ratios["pipeline_to_per_group_python"] is not None:
        alone = f"{ratios['distil_to_per_group_python']:.1f}"
        lines.append(f"pipeline / per-group Python: {ratios['pipeline_to_per_group_python']:.1f} (its distil part alone: {alone})")
    lines.append(f"peak memory (driver, JVM, workers): {done['peak_rss_bytes'] / 1e9:.2f} GB")
    delay = done["event_to_reward_s"]
    if delay["p95"] is not None:
        lines.append(f"event to reward: p50 {delay['p50']:.1f} s, p95 {delay['p95']:.1f} s, with a trigger every {done['trigger_s']:g} s")
    words = {True: "met", False: "missed", None: "not measured"}
    lines += [f"goal {goal}: {words[met]}" for goal, met in done["goals"].items()]
    return "\n".join(lines)


def plot(done: Mapping[str, Any], path: Path) -> None:
    """Draw speeds by subject, the pipeline by size, where its time goes and its memory; the name's ending says which format."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, ((left, middle), (below, right)) = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    speeds = {name: rate for name, rate in done["events_per_s_core"].items() if rate is not None}
    bars = left.barh(list(speeds)[::-1], list(speeds.values())[::-1], color="#4c78a8")
    left.bar_label(bars, fmt="{:,.0f}", padding=3)
    fastest = max(speeds.values())
    left.set(xscale="log", xlabel="events / s / core", title=f"{done['headline_size']:,} events", xlim=(None, fastest * 5))
    rates = {int(size): rate for size, rate in done["by_size"].items()}
    middle.plot(list(rates), list(rates.values()), marker="o", color="#f58518")
    middle.set(xscale="log", xlabel="events", ylabel="events / s / core", title="pipeline by size", ylim=(0, max(rates.values()) * 1.2))
    own = [item for item in done["measures"] if item["subject"] == "pipeline"]
    names = [f"{size:,}" for size in rates]
    bottom = [0.0] * len(rates)
    for name in ("append", "distil"):
        costs = [median(item["parts_s"][name] / item["records"] * 1e6 for item in own if item["size"] == size) for size in rates]
        below.bar(names, costs, bottom=bottom, label=name)
        bottom = [a + b for a, b in zip(bottom, costs, strict=True)]
    below.set(ylabel="µs / event", title="where the pipeline's time goes", ylim=(0, max(bottom) * 1.25))
    below.legend(loc="upper right", ncols=2)
    peaks = [max(item["peak_rss_bytes"] for item in own if item["size"] == size) / 1e9 for size in rates]
    right.bar_label(right.bar(names, peaks, color="#72b7b2"), fmt="{:.2f}", label_type="center")
    right.axhline(4.0, color="grey", linestyle="--", linewidth=1)
    right.set(ylabel="GB", title="peak memory (dashed: goal)", ylim=(0, max(4.0, *peaks) * 1.2))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
