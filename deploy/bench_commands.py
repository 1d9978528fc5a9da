"""`tidegate bench`: the stages' benches under one verb, each loaded only when it is called.

Takes: nothing. Gives: the app. Leaves out: the benches, which belong to their stages.
"""

from typing import Final

from cyclopts import App

app = App(name="bench", help="Measure speed and memory of a stage on this machine.")

BENCHES: Final = (
    ("signals", "signals.bench_commands:app", "How fast one core turns events into rewards, against Spark's own limit."),
    ("trainer", "trainer.bench_commands:app", "Trained tokens a second and peak memory of one step, beside TRL's and the bare limit."),
    ("fuzz", "signals.bench_commands:fuzz_app", "Send hostile records through the stream; each has to end in quarantine."),
)
"""Name, where it lives, and its line in `tidegate bench --help`."""

for name, place, line in BENCHES:
    app.command(place, name=name, help=line)
