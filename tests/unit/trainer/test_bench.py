"""The trainer bench's arithmetic: rows, packing efficiency, figures, goals, gradients, and the planner's FLOPs and bytes by hand."""

from typing import Any

import numpy as np
import pytest

from pipelines.errors import ConfigError, TerminalError
from trainer import bench, bench_commands, bench_report, bench_rows, planner
from trainer.bench_rows import Task
from trainer.packing import cost, reply_row, tokens_of

SHAPE = planner.Shape(width=4, layers=2, inner=8, attention=4, key_value=2, vocabulary=10, tied=True)


def task(**changes: Any) -> Task:
    """Return a task that nobody runs."""
    plain: dict[str, Any] = {
        "way": "ours", "histogram": "trained10", "rows": 24, "checkpoint": "", "adapter": "full", "dtype": "bf16", "threads": 1,
        "repeats": 1, "max_tokens": 2048, "activation_checkpointing": False,
    }  # fmt: skip
    return Task(**(plain | changes))


def test_both_histograms_have_the_same_lengths_and_their_own_share_of_trained_tokens() -> None:
    ten, sixty = (bench_rows.rows(name, number=24, vocabulary=100) for name in ("trained10", "trained60"))
    assert [tokens_of(row) for row in ten] == [tokens_of(row) for row in sixty]
    lengths = sorted(tokens_of(row) for row in ten)
    assert (lengths[0], lengths[-1]) == (120, 1500)
    total = sum(lengths)
    assert sum(len(row.trained) for row in ten) / total == pytest.approx(0.1, abs=0.002)
    assert sum(len(row.trained) for row in sixty) / total == pytest.approx(0.6, abs=0.002)
    again = bench_rows.rows("trained10", number=24, vocabulary=100)
    assert all(np.array_equal(a.prompt_ids, b.prompt_ids) for a, b in zip(ten, again, strict=True))
    assert all(3 <= ids.min() <= ids.max() < 100 for ids in (row.prompt_ids for row in ten))


def test_a_task_may_take_every_nth_row_by_length_or_the_shortest_in_their_own_order() -> None:
    lengths = [50, 10, 40, 20, 30]
    assert bench_rows.chosen(lengths, task()) == [0, 1, 2, 3, 4]
    assert bench_rows.chosen(lengths, task(every=2)) == [0, 1, 4]  # 10, 30, 50
    assert bench_rows.chosen(lengths, task(shortest=2)) == [1, 3]  # 10, 20
    assert bench_rows.chosen(lengths, task(every=2, shortest=2)) == [1, 4]  # 10, 30


def test_packing_efficiency_is_the_share_of_time_in_which_no_rank_waits() -> None:
    rows = [reply_row(np.arange(60), np.arange(40)), reply_row(np.arange(30), np.arange(20))]
    a, b = cost(100), cost(50)
    assert bench_rows.packing_efficiency(rows, max_tokens=100, ranks=1) == pytest.approx(1.0)
    # two ranks, one round: it lasts as long as the longer row
    assert bench_rows.packing_efficiency(rows, max_tokens=100, ranks=2) == pytest.approx((a + b) / (2 * a))
    assert bench_rows.packing_efficiency([rows[0], rows[0]], max_tokens=100, ranks=2) == pytest.approx(1.0)


def test_a_step_of_several_ranks_lasts_as_long_as_the_slowest_and_needs_the_memory_of_all() -> None:
    ranks = [
        {"seconds": {"step": [2.0, 4.0, 3.0], "reference": [1.0, 1.0, 1.0]}, "cpu_seconds": {"step": [2.0, 2.0, 2.0],
         "reference": [1.0, 1.0, 1.0]}, "peak_bytes": 10},
        {"seconds": {"step": [1.0, 5.0, 2.0], "reference": [1.0, 1.0, 1.0]}, "cpu_seconds": {"step": [1.0, 1.0, 1.0],
         "reference": [0.0, 0.0, 0.0]}, "peak_bytes": 20},
    ]  # fmt: skip
    step = bench.figures(ranks, ("step",), trained=30, total=300, threads=1)
    assert step["seconds"] == [2.0, 5.0, 3.0]
    assert (step["trained_tok_s"], step["total_tok_s"]) == (10.0, 100.0)
    assert step["spread"] == [6.0, 15.0]
    assert step["peak_bytes"] == 30
    assert step["cores"] == pytest.approx(9 / (10 * 2))
    assert bench.figures(ranks, ("step", "reference"), trained=30, total=300, threads=1)["seconds"] == [3.0, 6.0, 4.0]


def test_gradients_are_compared_by_name_in_absolute_and_relative_terms() -> None:
    worst, relative = bench.gradient_gap({"a": [1.0, -2.0], "b": [0.5]}, {"a": [1.0, -2.5], "b": [0.75]})
    assert worst == 0.5
    assert relative == 0.2
    with pytest.raises(TerminalError, match="cannot be compared"):
        bench.gradient_gap({"a": [1.0]}, {"b": [1.0]})
    with pytest.raises(TerminalError, match="cannot be compared"):
        bench.gradient_gap({}, {})


def test_a_rounded_gradient_is_as_far_off_as_its_worst_weight() -> None:
    assert bench.gradient_error({"a": [3.0, 4.5], "b": [1.0]}, {"a": [3.0, 4.0], "b": [0.8]}) == pytest.approx(0.25)


def block(**changes: Any) -> dict[str, Any]:
    """Return figures that meet every goal of trained10, exactly."""
    plain = {
        "trained_tok_s": {"ours": 30.0, "trl": 10.0, "bare": 33.0}, "peak_bytes": {"ours": 3.3e9, "trl": 1e10},
        "share_of_bare": {"ours": 0.90, "ours_reference": 0.70}, "packing_efficiency": 0.97, "rank_scaling": 1.6,
        "gradient_error": {"ours": 0.109, "bare_single": 0.1, "bare_packed": 0.09},
    }  # fmt: skip
    return plain | changes


def test_goals_are_met_at_their_threshold_missed_below_and_unknown_where_not_measured() -> None:
    assert set(bench.goals("trained10", block()).values()) == {True}
    assert len(bench.goals("trained10", block())) == 7
    worse = block(
        trained_tok_s={"ours": 29.9, "trl": 10.0, "bare": 33.0}, peak_bytes={"ours": 3.4e9, "trl": 1e10},
        share_of_bare={"ours": 0.89, "ours_reference": 0.69}, packing_efficiency=0.96, rank_scaling=1.5,
        gradient_error={"ours": 0.12, "bare_single": 0.1, "bare_packed": 0.09},
    )  # fmt: skip
    assert set(bench.goals("trained10", worse).values()) == {False}
    assert bench.goals("trained60", worse)["trained tok/s >= 2 x TRL"] is True
    without = bench.goals("trained10", block(trained_tok_s={"ours": 30.0, "trl": None, "bare": 33.0},
                                             peak_bytes={"ours": 1.0, "trl": None}, rank_scaling=None))  # fmt: skip
    assert list(without.values()) == [None, None, True, True, True, True, None]


def test_the_planner_counts_flops_as_by_hand() -> None:
    # linear weights a layer: q, o 4x4 each, k, v 4x2 each, three of 4x8 -> 16 + 16 + 8 + 8 + 96 = 144; two layers 288
    assert SHAPE.linear == 288
    assert SHAPE.parameters == 288 + 40
    full = planner.Setup(adapter="full")
    # linear 2 x 288 x 5 tokens x 3; attention 2 x 4 x 2 layers x (9 + 4) x 3; head 2 x 4 x 10 x 2 trained x 4
    assert planner.step_flops(SHAPE, full, segments=[3, 2], trained=2) == 8640 + 624 + 640
    # frozen weights: no weight gradient (2 instead of 3), and the head's logits are not taken twice (2 instead of 4)
    assert planner.step_flops(SHAPE, planner.Setup(adapter="lora"), segments=[3, 2], trained=2) == 5760 + 624 + 320
    # activations again, and a reference: two forward passes more
    more = planner.Setup(adapter="full", activation_checkpointing=True, reference_pass=True)
    assert planner.step_flops(SHAPE, more, segments=[3, 2], trained=2) == 8640 / 3 * 5 + 624 / 3 * 5 + 800


def test_the_planner_spreads_over_ranks_what_the_zero_stage_spreads() -> None:
    def states(stage: int) -> float:
        setup = planner.Setup(adapter="full", zero_stage=stage, ranks=4, micro_batch_tokens=1)
        return planner.rank_bytes(SHAPE, setup) - planner.rank_bytes(SHAPE, planner.Setup(adapter="full", ranks=10**9, zero_stage=3,
                                                                                         micro_batch_tokens=1))  # fmt: skip

    weights = 328
    assert states(0) == pytest.approx(weights * (2 + 4 + 12), rel=1e-3)
    assert states(1) == pytest.approx(weights * (2 + 4 + 3), rel=1e-3)
    assert states(2) == pytest.approx(weights * (2 + 1 + 3), rel=1e-3)
    assert states(3) == pytest.approx(weights * (0.5 + 1 + 3), rel=1e-3)
    # adapters of rank 16: per layer 2 (4 + 4) + 2 (4 + 2) + 3 (4 + 8) = 64
    assert planner.trained_weights(SHAPE, planner.Setup(adapter="lora")) == 2 * 16 * 64


def test_a_plan_for_seventy_billion_weights_fits_only_where_weights_are_spread() -> None:
    setup = planner.Setup(adapter="lora", ranks=32, micro_batch_tokens=8192, activation_checkpointing=True)
    plan = planner.table("70b", planner.SHAPES["llama-3.3-70b"], setup=setup, gpu="h100", gpus=32, row_tokens=8192,
                         trained_share=0.1, rows=4096, passes=2, mfu=0.35)  # fmt: skip
    assert plan["parameters"] == pytest.approx(70.55e9, rel=0.01)
    assert [entry["fits"] for entry in plan["stages"]] == [False, False, False, True]
    one, many = (
        planner.table("x", SHAPE, setup=planner.Setup(adapter="full", ranks=n), gpu="a100", gpus=n, row_tokens=100, trained_share=0.5,
                      rows=10, passes=1, mfu=0.5)["stages"][1] for n in (1, 8)
    )  # fmt: skip
    assert many["trained_tok_s"] == pytest.approx(8 * one["trained_tok_s"])
    assert one["hours"] == pytest.approx(planner.step_flops(SHAPE, planner.Setup(adapter="full"), segments=[100], trained=50) * 10
                                         / (0.5 * 312e12) / 3600)  # fmt: skip


def test_a_plan_that_makes_no_sense_is_refused_with_what_can_be_asked_for() -> None:
    sound: dict[str, Any] = {"setup": planner.Setup(adapter="lora"), "gpu": "h100", "gpus": 1, "row_tokens": 10, "trained_share": 0.1,
                             "rows": 1, "passes": 1, "mfu": 0.3}  # fmt: skip
    wrongs: tuple[dict[str, Any], ...] = ({"gpu": "abacus"}, {"gpus": 0}, {"mfu": 0.0}, {"mfu": 1.5}, {"trained_share": 0.0}, {"rows": 0})
    for wrong in wrongs:
        with pytest.raises(ConfigError):
            planner.table("x", SHAPE, **(sound | wrong))


def test_histograms_are_named_once_and_an_unknown_one_is_an_error() -> None:
    assert bench_commands.parse_histograms("trained60, trained10,trained60") == ("trained60", "trained10")
    for wrong in ("", "trained99", "trained10,x"):
        with pytest.raises(ConfigError, match="trained10"):
            bench_commands.parse_histograms(wrong)


def test_a_plan_reads_as_a_table() -> None:
    setup = planner.Setup(adapter="lora", ranks=8, activation_checkpointing=True)
    made = planner.table("qwen2.5-coder-7b", planner.SHAPES["qwen2.5-coder-7b"], setup=setup, gpu="h100", gpus=8, row_tokens=8192,
                         trained_share=0.1, rows=4096, passes=2, mfu=0.35)  # fmt: skip
    text = bench_report.plan_text(made)
    assert "qwen2.5-coder-7b (7.62 B weights), lora, 8 x h100" in text
    assert len(text.splitlines()) == 2 + 4


def test_the_planner_reads_a_models_own_sizes() -> None:
    config = {"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
              "vocab_size": 49152, "tie_word_embeddings": True}  # fmt: skip
    assert planner.shape_of(config).parameters == pytest.approx(134.5e6, rel=0.001)  # SmolLM2-135M
