"""`tidegate bench signals` and `tidegate bench fuzz`: options only, so that `--help` loads no Spark."""

from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter

from pipelines.errors import ConfigError
from pipelines.storage import Home
from pipelines.terminal import Common
from signals.config import SignalsConfig

app = App(name="signals", help="How fast one core turns events into rewards, against Spark's own limit.")
fuzz_app = App(name="fuzz", help="Send hostile records and see that each ends in quarantine.")

DEFAULT_SIZES: Final = "100000,1000000"
"""Minutes on a laptop; the third size of the goals is behind --full."""
FULL_SIZES: Final = "100000,1000000,10000000"
Flag = Annotated[bool, Parameter(negative="")]


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read `100000,1000000`.

    Raises:
        ConfigError: Something else than whole numbers.
    """
    try:
        return tuple(int(part) for part in text.replace("_", "").split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(f"--sizes {text!r}: write whole numbers with commas between, such as {DEFAULT_SIZES}") from error


@app.default
def signals(
    *,
    sizes: str = DEFAULT_SIZES,
    full: Flag = False,
    repeats: int = 3,
    seed: int = 0,
    trigger_s: float = 10.0,
    live_s: float = 60.0,
    work: Path | None = None,
    plot: Path | None = None,
    common: Common = Common(),
) -> None:
    """Measure raw Kafka, the JSON-to-Delta limit, the pipeline and per-group Python on the same events, and an event's way to its reward.

    Args:
        sizes: Numbers of events, with commas between.
        full: Measure at a hundred thousand, a million and ten million events: half an hour, 30 GB of disk.
        repeats: Rounds at the smallest size, after one that is dropped.
        seed: Of the generated events.
        trigger_s: How often the continuous job appends and distils while event to reward is measured.
        live_s: How long live sessions are counted; 0 leaves that part out.
        work: Folder for the generated topics, kept for the next run; default: bench/ in the home.
        plot: Draw the result into this file (.svg or .png).
        common: Options of every command.
    """
    from signals import bench, bench_report

    plan = bench.Plan(
        sizes=parse_sizes(FULL_SIZES if full else sizes), repeats=repeats, seed=seed, trigger_s=trigger_s, live_s=live_s
    )  # fmt: skip
    done = bench.run(plan, common.tree(SignalsConfig), _work(work, common))
    if plot is not None:
        bench_report.plot(done, plot)
    common.show(done, lambda: bench_report.text(done))


@fuzz_app.default
def fuzz(*, records: int = 100_000, seed: int = 0, work: Path | None = None, common: Common = Common()) -> None:
    """Send hostile records through the append job and compare each verdict with the codec's: in quarantine with the same reason.

    Honest records and spoilt ones that are events all the same are among them, and have to arrive.

    Args:
        records: How many hostile ones; a hundred thousand take minutes.
        seed: Other seeds give other records.
        work: Folder for broker and lake; default: bench/ in the home.
        common: Options of every command.
    """
    from signals import bench_fuzz

    done = bench_fuzz.run(records, common.tree(SignalsConfig), _work(work, common), seed=seed)

    def text() -> str:
        counts = f"{done['quarantined']} refused, {done['accepted']} events, {done['judged_otherwise']} judged otherwise than by the codec"
        lines = [f"{done['records']} records in {done['seconds']:.0f} s: {counts}"]
        lines += [f"{number:>9}  {reason}" for reason, number in done["reasons"].items()]
        kinds = [f"{counts['refused']:>9} refused {counts['events']:>7} events  {kind}" for kind, counts in done["kinds"].items()]
        return "\n".join([*lines, "by what was done to them:", *kinds])

    common.show(done, text)


def _work(work: Path | None, common: Common) -> Home:
    return Home(work.absolute() if work else common.place().root / "bench")
