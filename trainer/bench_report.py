"""The trainer bench's result, and a plan's, for people: a table and a picture.

Takes: the dicts that `bench.run` and `planner.table` give. Gives: text, and an SVG or PNG. Leaves out: measuring. matplotlib is loaded
only to draw.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

NAMES: Final = {
    "ours": "tidegate", "ours_reference": "tidegate, reference scored too", "trl": "TRL GRPO step", "bare_single": "bare, row by row",
    "bare_packed": "bare, packed",
}  # fmt: skip
BUSY: Final = 0.9
"""Below this share of its threads' time a way did not have the machine for itself."""


def text(done: Mapping[str, Any]) -> str:
    """Return the bench's result as lines."""
    plan = done["plan"]
    setting = (
        f"{plan['adapter']}, {plan['dtype']}, {plan['threads']} threads, activation checkpointing {_on(plan['activation_checkpointing'])}"
    )
    lines = [f"one optimizer step on {plan['rows']} rows ({setting}); generation left out everywhere"]
    busy = False
    for histogram, goals in done["goals"].items():
        block = done[histogram]
        lines.append(f"{histogram}: {block['tokens']} tokens, {block['trained_tokens']} of them trained")
        lines.append(f"  {'':32} {'trained tok/s':>13} {'slowest to fastest':>20} {'all tok/s':>10} {'peak GB':>8}")
        for way, figures in block["ways"].items():
            low, high = figures["spread"]
            busy |= figures["cores"] < BUSY
            lines.append(
                f"  {NAMES.get(way, way):32} {figures['trained_tok_s']:>13.1f} {f'{low:.1f} to {high:.1f}':>20} "
                f"{figures['total_tok_s']:>10.0f} {figures['peak_bytes'] / 1e9:>8.2f}"
            )
        relative = ", ".join(f"{NAMES.get(way, way)} {gap:.1e}" for way, gap in block["gradient_parity_relative"].items())
        lines.append(f"  gradients in fp32 apart from the plain model's, over the largest: {relative}")
        rounded = ", ".join(f"{NAMES.get(way, way)} {gap:.3f}" for way, gap in block["gradient_error"].items())
        lines.append(f"  gradients in {plan['dtype']} apart from those in fp32, over their norm, worst weight: {rounded}")
        lines += [f"  {_WORDS[met]:12} {goal}{_figure(goal, block)}" for goal, met in goals.items()]
    lines += [_prediction(entry) for entry in done["planner"]]
    if busy:
        lines.append(
            f"the machine was busy: a way got less than {BUSY:.0%} of its threads' time, so speeds are lower than they are on a free one"
        )
    lines += dict.fromkeys(reason for histogram in done["goals"] for reason in done[histogram]["left_out"].values())
    return "\n".join(lines)


_WORDS: Final = {True: "met", False: "missed", None: "not measured"}


def _on(setting: object) -> str:
    return "on" if setting else "off"


def _figure(goal: str, block: Mapping[str, Any]) -> str:
    """Return the figure that a goal was judged by."""
    speed, memory = block["trained_tok_s"], block["peak_bytes"]
    if goal.startswith("trained tok/s") and speed["trl"]:
        return f": {speed['ours'] / speed['trl']:.2f}"
    if goal.startswith("peak memory") and memory["trl"]:
        return f": {memory['ours'] / memory['trl']:.2f}"
    if goal.startswith("packing efficiency"):
        return f": {block['packing_efficiency']:.3f}"
    if goal.startswith("2 ranks") and block["rank_scaling"]:
        return f": {block['rank_scaling']:.2f}"
    share = block["share_of_bare"].get(goal.split()[0])
    return "" if share is None else f": {share:.2f}"


def _prediction(entry: Mapping[str, Any]) -> str:
    speed, memory = entry["trained_tok_s"], entry["peak_bytes"]
    rate = "calibrated here" if entry["calibrated_on"] else f"{speed['predicted']:.1f} trained tok/s, {speed['error']:+.0%} off"
    return (
        f"planner, {entry['histogram']} {NAMES[entry['way']]}: {rate}; {memory['predicted'] / 1e9:.2f} GB, {memory['error']:+.0%} off"
    )  # fmt: skip


def plot(done: Mapping[str, Any], path: Path) -> None:
    """Draw speed and memory of each way, a row of pictures a histogram; the name's ending says which format."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    histograms = list(done["goals"])
    figure, axes = plt.subplots(len(histograms), 2, figsize=(12, 3.2 * len(histograms)), layout="constrained", squeeze=False)
    for histogram, (left, right) in zip(histograms, axes, strict=True):
        ways = done[histogram]["ways"]
        names = [NAMES.get(way, way) for way in ways][::-1]
        speeds, peaks = ([figures[key] for figures in ways.values()][::-1] for key in ("trained_tok_s", "peak_bytes"))
        colours = ["#f58518" if way == "trl" else "#4c78a8" if way.startswith("ours") else "#b0b0b0" for way in ways][::-1]
        left.bar_label(left.barh(names, speeds, color=colours), fmt="{:,.1f}", padding=3)
        left.set(xlabel="trained tokens / s", title=f"{histogram}: speed")
        right.bar_label(right.barh(names, [peak / 1e9 for peak in peaks], color=colours), fmt="{:,.2f}", padding=3)
        right.set(xlabel="GB", title=f"{histogram}: peak memory")
        left.margins(x=0.2)
        right.margins(x=0.2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def plan_text(plan: Mapping[str, Any]) -> str:
    """Return a plan as lines."""
    lines = [
        f"{plan['model']} ({plan['parameters'] / 1e9:.2f} B weights), {plan['adapter']}, {plan['gpus']} x {plan['gpu']}, "
        f"{plan['micro_batch_tokens']} tokens a micro-batch, activation checkpointing {_on(plan['activation_checkpointing'])}, "
        f"MFU {plan['mfu']:.0%} (assumed)",
        f"  {'ZeRO':>4} {'trained tok/s':>14} {'all tok/s':>12} {'GB a GPU':>9}  fits {plan['gpu_gb']:.0f} GB "
        f"{'hours for':>10} {plan['rows']:,} rows",
    ]
    for entry in plan["stages"]:
        fits = "yes" if entry["fits"] else "no"
        lines.append(
            f"  {entry['zero_stage']:>4} {entry['trained_tok_s']:>14,.0f} {entry['total_tok_s']:>12,.0f} "
            f"{entry['bytes_per_gpu'] / 1e9:>9.1f}  {fits:>4} {entry['hours']:>19.2f}"
        )
    return "\n".join(lines)
