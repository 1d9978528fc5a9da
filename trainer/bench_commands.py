"""`tidegate bench trainer` and `tidegate trainer plan`: options only, so that `--help` loads no torch."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from cyclopts import App, Parameter

from pipelines.errors import ConfigError
from pipelines.terminal import Common, progress

if TYPE_CHECKING:
    from trainer import planner

app = App(name="trainer", help="Trained tokens a second and peak memory of one step, beside TRL's and the bare limit.")
plan_app = App(name="plan", help="How fast and how large an update of a model would be on so many GPUs: FLOPs and bytes.")

Flag = Annotated[bool, Parameter(negative="")]
ALL: Final = "trained10,trained60"


@app.default
def trainer(
    *,
    histograms: str = ALL,
    rows: int = 24,
    repeats: int = 3,
    trl_repeats: int = 1,
    threads: int = 2,
    adapter: Literal["full", "lora"] = "full",
    dtype: Literal["bf16", "fp32"] = "bf16",
    max_tokens: int = 2048,
    activation_checkpointing: bool = True,
    grid: Flag = False,
    no_ranks: Flag = False,
    no_trl: Flag = False,
    checkpoint: Path | None = None,
    work: Path | None = None,
    plot: Path | None = None,
    common: Common = Common(),
) -> None:
    """Measure one optimizer step: this trainer, the same model without a trainer, and TRL's GRPO step, on the same rows and threads.

    Args:
        histograms: Which mixes of rows, with commas between: one token in ten trained, six in ten.
        rows: Rows of a step.
        repeats: Of each way, after a warm-up that is dropped.
        trl_repeats: Of TRL, whose step takes minutes.
        threads: Of each way.
        adapter: Train all weights or LoRA adapters, in every way.
        dtype: Arithmetic; TRL computes bf16 from fp32 weights, as its defaults have it.
        max_tokens: Of a packed micro-batch.
        activation_checkpointing: In every way, as TRL has it at its defaults; without it TRL needs more than 20 GB for these rows.
        grid: Also padded or packed, plain or fused head, on all or trained tokens.
        no_ranks: Leave out two ranks against one.
        no_trl: Leave TRL out.
        checkpoint: Folder of a checkpoint; default: the packaged SmolLM2-135M, converted once.
        work: Folder for tasks and raw results; default: bench/trainer in the home.
        plot: Draw the result into this file (.svg or .png).
        common: Options of every command.
    """
    from trainer import bench, bench_report

    plan = bench.Plan(
        checkpoint=(checkpoint or _base(common)).absolute(), histograms=parse_histograms(histograms), rows=rows, repeats=repeats,
        trl_repeats=trl_repeats, threads=threads, adapter=adapter, dtype=dtype, max_tokens=max_tokens,
        activation_checkpointing=activation_checkpointing, grid=grid, ranks=not no_ranks, trl=not no_trl,
    )  # fmt: skip
    done = bench.run(plan, (work or common.place().root / "bench" / "trainer").absolute())
    if plot is not None:
        bench_report.plot(done, plot)
    common.show(done, lambda: bench_report.text(done))


def parse_histograms(text: str) -> tuple[str, ...]:
    """Read `trained10,trained60`.

    Raises:
        ConfigError: There is no such histogram.
    """
    from trainer.bench_rows import HISTOGRAMS

    named = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [name for name in named if name not in HISTOGRAMS]
    if unknown or not named:
        raise ConfigError(f"--histograms {text!r}: {', '.join(unknown) or 'nothing'} is not one of {', '.join(HISTOGRAMS)}")
    return named


def _base(common: Common) -> Path:
    """Return the folder of the packaged base model, converted into the home's store where it is not there yet."""
    from datetime import UTC, datetime

    from trainer import publish

    with progress("import base model", total=1) as advance:
        _, path = publish.import_base(common.place().store, now=datetime.now(UTC))
        advance(1)
    return path


@plan_app.default
def plan(
    *,
    model: str,
    gpu: str = "h100",
    gpus: int = 8,
    adapter: Literal["full", "lora"] = "lora",
    micro_batch_tokens: int = 8192,
    row_tokens: int = 8192,
    trained_share: float = 0.1,
    rows: int = 4096,
    passes: int = 2,
    mfu: float | None = None,
    activation_checkpointing: bool = True,
    reference: Flag = False,
    common: Common = Common(),
) -> None:
    """Predict trained tokens a second, memory a GPU and hours of an update, for each ZeRO stage.

    Args:
        model: A Hugging Face config.json, or the name of a known shape.
        gpu: Kind of GPU.
        gpus: How many.
        adapter: Train all weights or LoRA adapters.
        micro_batch_tokens: Of a packed micro-batch on one GPU.
        row_tokens: Of an average row: prompt and reply.
        trained_share: Share of a row's tokens that the policy sampled.
        rows: Rows of the update.
        passes: How often each row is visited.
        mfu: Share of the GPU's peak that is reached; default: a cautious guess.
        activation_checkpointing: Compute activations again instead of keeping them.
        reference: Rows need a forward pass for their reference.
        common: Options of every command.
    """
    from trainer import bench_report, planner

    made = planner.table(
        model, _shape(model), gpu=gpu, gpus=gpus, row_tokens=row_tokens, trained_share=trained_share, rows=rows, passes=passes,
        mfu=planner.MFU if mfu is None else mfu,
        setup=planner.Setup(
            adapter=adapter, micro_batch_tokens=micro_batch_tokens, activation_checkpointing=activation_checkpointing,
            reference_pass=reference, ranks=gpus,
        ),
    )  # fmt: skip
    common.show(made, lambda: bench_report.plan_text(made))


def _shape(model: str) -> "planner.Shape":
    import json

    from trainer import planner

    if model in planner.SHAPES:
        return planner.SHAPES[model]
    path = Path(model)
    try:
        return planner.shape_of(json.loads((path / "config.json" if path.is_dir() else path).read_bytes()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--model {model!r}: no config.json with a decoder's sizes, and not one of {', '.join(planner.SHAPES)}"
        ) from error
