"""The gate on rows made by hand: verdicts, intervals, and what it can see at the demo's size."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.config import Config
from deploy.release import explain, gates, plan
from deploy.release.artifact import ArtifactFacts
from deploy.release.config import GateConfig
from deploy.release.evidence import Attempt, Evidence, Pooled, ProcessFacts, parse_attempts, parse_scores, read_rows
from deploy.release.verdicts import Verdict, overall
from pipelines.config import load
from pipelines.errors import ContractViolation
from tests.support.release import GOOD_POOLED, attempt, score_row

CONFIGS = Path(__file__).parents[4] / "infra" / "config"
DEMO = load(Config, CONFIGS / "demo.toml").gate

GOOD_FILES = ArtifactFacts(
    bytes_error=None, signature_error=None, parent="s", tokenizer_equal=True, template_equal=True, tensor_differences=(), non_finite=(),
    relative_norm=1e-3,
)  # fmt: skip
GOOD_PROCESS = ProcessFacts(lease_held=True, frozen=None, ships_today=0, tombstoned=False, parent_serves=True)


def evidence(candidate: list[Attempt] | None = None, serving: list[Attempt] | None = None, **changes: object) -> Evidence:
    """Return evidence of an equal candidate, with some parts replaced."""
    same = [attempt(f"t{i}", number=n, solved=(i + n) % 2 == 0) for i in range(12) for n in range(2)]
    good = Evidence(
        serving="s", candidate="c", anchor="s", artifact=GOOD_FILES, scores=tuple(score_row(f"u{i}") for i in range(12)),
        pooled=GOOD_POOLED,
        benchmark_serving=tuple(serving or same), benchmark_candidate=tuple(candidate or same), benchmark_anchor=tuple(serving or same),
        process=GOOD_PROCESS,
    )  # fmt: skip
    return replace(good, **changes)


def check(name: str, found: Evidence, config: GateConfig = DEMO):
    return gates.CHECKS[name](found, config)


def test_an_equal_candidate_passes_every_check():
    report = gates.decide(evidence(), DEMO)
    assert report.verdict is Verdict.PASS, report.reasons
    assert [item.name for item in report.checks] == list(gates.CHECKS)


def test_no_data_is_never_a_pass():
    nothing = Evidence(serving="s", candidate="c", anchor="s", artifact=None)
    report = gates.decide(nothing, DEMO)
    assert {item.verdict for item in report.checks} == {Verdict.INCONCLUSIVE}
    assert report.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    "missing", ["artifact", "scores", "benchmark_candidate", "benchmark_serving", "benchmark_anchor", "process", "pooled"]
)
def test_each_kind_of_evidence_is_required(missing):
    empty = () if missing.startswith(("scores", "benchmark")) else None
    assert gates.decide(evidence(**{missing: empty}), DEMO).verdict is Verdict.INCONCLUSIVE


def test_a_required_check_that_did_not_run_is_inconclusive_and_no_checks_at_all_too():
    passed = gates.decide(evidence(), DEMO).checks
    assert overall(passed[1:], required=gates.CHECKS) is Verdict.INCONCLUSIVE
    assert overall((), required=()) is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({"bytes_error": "model.safetensors differs from its manifest"}, "artifact.bytes", "differs from its manifest"),
        ({"signature_error": "c is not signed"}, "artifact.bytes", "not signed"),
        ({"tensor_differences": ("a is missing",)}, "artifact.tensors", "a is missing"),
        ({"non_finite": ("model.norm.weight",), "relative_norm": math.inf}, "artifact.finite", "NaN or infinity: model.norm.weight"),
        ({"relative_norm": 0.0}, "artifact.norm", "moved by 0.00e"),
        ({"relative_norm": 0.02}, "artifact.norm", "moved by 2.00e-02"),
        ({"parent": "other"}, "artifact.lineage", "trained from other"),
        ({"tokenizer_equal": False}, "artifact.lineage", "tokenizer"),
        ({"template_equal": False}, "artifact.lineage", "template"),
    ],
)
def test_a_bad_artifact_fails_with_its_reason(change, name, words):
    report = gates.decide(evidence(artifact=replace(GOOD_FILES, **change)), DEMO)
    assert report.verdict is Verdict.FAIL
    assert any(reason.startswith(name) and words in reason for reason in report.reasons)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"frozen": "incident"}, "frozen: incident"),
        ({"tombstoned": True}, "tombstoned"),
        ({"lease_held": False}, "took over"),
        ({"parent_serves": False}, "no longer serves"),
        ({"ships_today": 6}, "6 ships in 24 h"),
    ],
)
def test_a_process_that_must_not_ship_fails_with_its_reason(change, words):
    found = check("process", evidence(process=replace(GOOD_PROCESS, **change)), GateConfig())
    assert found.verdict is Verdict.FAIL
    assert words in found.reason


def test_the_paired_benchmark_interval_equals_the_hand_worked_case():
    # per-task differences 1, 0, 0, -1 (see test_stats): half width .960757
    solved = {"t0": (True, False), "t1": (True, True), "t2": (False, False), "t3": (False, True)}
    found = check(
        "benchmark.serving",
        evidence([attempt(t, solved=c) for t, (c, _) in solved.items()], [attempt(t, solved=s) for t, (_, s) in solved.items()]),
        GateConfig(minimum_tasks=4, benchmark_margin=1.0),
    )
    assert (found.estimate, found.n) == (0, 4)
    assert found.low == pytest.approx(-0.960757, abs=1e-6)
    assert found.verdict is Verdict.PASS


def test_an_interval_across_the_margin_is_no_evidence_either_way():
    half_worse = [attempt(f"t{i}", solved=i % 3 == 0) for i in range(12)]
    solving = [attempt(f"t{i}", solved=i % 3 != 1) for i in range(12)]
    found = check("benchmark.serving", evidence(half_worse, solving), DEMO)
    assert found.estimate == pytest.approx(-4 / 12)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "no evidence either way" in found.reason


def test_a_candidate_that_solves_nothing_fails_the_benchmark():
    found = check("benchmark.serving", evidence([attempt(f"t{i}", solved=False) for i in range(12)], [attempt(f"t{i}") for i in range(12)]))
    assert (found.estimate, found.verdict) == (-1, Verdict.FAIL)


def test_too_few_tasks_are_inconclusive_however_good():
    few = [attempt(f"t{i}") for i in range(DEMO.minimum_tasks - 1)]
    found = check("benchmark.serving", evidence(few, few))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.flip == "1 more units"


def test_an_infra_error_is_not_a_failed_attempt_but_makes_the_comparison_void():
    broken = [attempt(f"t{i}", solved=False, outcome="infra_error" if i < 3 else "fail") for i in range(12)]
    found = evidence(broken, broken)
    assert check("benchmark.serving", found).n == 9
    infra = check("benchmark.infra", found)
    assert (infra.estimate, infra.verdict) == (0.25, Verdict.INCONCLUSIVE)


def test_a_policy_of_invalid_calls_only_fails_with_the_right_reason():
    broken = [attempt(f"t{i}", number=n, solved=False, invalid_calls=4, edits_proposed=0) for i in range(12) for n in range(2)]
    report = gates.decide(evidence(broken), DEMO)
    failed = {item.name for item in report.checks if item.verdict is Verdict.FAIL}
    assert report.verdict is Verdict.FAIL
    assert {"hacks.invalid_calls", "hacks.edits"} <= failed
    assert any("hacks.invalid_calls: share of invalid tool calls +1.0000" in reason for reason in report.reasons)


def test_the_invalid_call_bound_is_newcombes_over_users():
    # 24 users, none invalid in either: Wilson upper bound z^2 / (n + z^2) with z = 1.644854 is 2.705543 / 26.705543
    found = check("hacks.invalid_calls", evidence())
    assert (found.estimate, found.n) == (0.0, 24)
    assert found.high == pytest.approx(2.705543 / 26.705543, abs=1e-6)


@pytest.mark.parametrize("unscored", [0, 2])
def test_unscored_turns_may_neither_rise_nor_fall(unscored):
    middle = [attempt(f"t{i}", number=n, unscored_turns=1) for i in range(12) for n in range(2)]
    found = check("hacks.unscored_turns", evidence([row.model_copy(update={"unscored_turns": unscored}) for row in middle], middle))
    assert found.estimate == (unscored - 1) / 2
    assert found.verdict is not Verdict.PASS


def test_asking_instead_of_editing_fails_although_either_alone_would_not():
    asking = [attempt(f"t{i}", asks=int(i % 2), edits_proposed=int(i % 2 == 0)) for i in range(12)]
    editing = [attempt(f"t{i}") for i in range(12)]
    assert check("hacks.asks_for_edits", evidence(asking, editing)).verdict is Verdict.FAIL
    only_asking = [row.model_copy(update={"edits_proposed": 1}) for row in asking]
    assert check("hacks.asks_for_edits", evidence(only_asking, editing)).verdict is Verdict.PASS


def test_a_serving_policy_that_disagrees_with_its_own_log_makes_the_distance_unknown_not_bad():
    found = check("distance.self_check", evidence(scores=tuple(score_row(f"u{i}", self_gap=0.05) for i in range(12))))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "no distance can be trusted" in found.reason


def test_a_far_candidate_fails_the_distance_and_one_that_is_no_number_too():
    assert check("distance.kl", evidence(scores=tuple(score_row(f"u{i}", kl=0.2) for i in range(12)))).verdict is Verdict.FAIL
    assert check("distance.kl", evidence(scores=tuple(score_row(f"u{i}", kl=None) for i in range(12)))).verdict is Verdict.FAIL
    assert check("distance.tail", evidence(pooled=Pooled(p99_abs_log_ratio=9.0, ess_share=0.9, entropy_ratio=1.0))).verdict is Verdict.FAIL
    assert (
        check("distance.entropy", evidence(pooled=Pooled(p99_abs_log_ratio=1.0, ess_share=0.9, entropy_ratio=0.2))).verdict is Verdict.FAIL
    )


def test_the_distance_bound_is_by_user_and_weighted_by_tokens():
    rows = (score_row("u0", kl=0.01, n_tokens=60), score_row("u0", kl=0.01, n_tokens=40), score_row("u1", kl=0.03, n_tokens=300))
    found = check("distance.kl", evidence(scores=rows), GateConfig(minimum_score_users=2))
    assert (found.estimate, found.n) == (pytest.approx(0.025), 2)
    assert found.high == pytest.approx(0.025 + 6.313752 * 0.0075, abs=1e-6)


# Worse evidence never turns a no into a yes ------------------------------------------------------------------------------

RANK = {Verdict.PASS: 0, Verdict.INCONCLUSIVE: 1, Verdict.FAIL: 2}
rows_of = st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 2), st.booleans(), st.booleans()), min_size=2, max_size=24)


def build(rows: list[tuple[bool, int, int, bool, bool]]) -> list[Attempt]:
    return [
        attempt(f"t{i}", solved=solved, invalid_calls=invalid, unscored_turns=unscored, asks=int(asks), edits_proposed=int(edits))
        for i, (solved, invalid, unscored, asks, edits) in enumerate(rows)
    ]


@settings(max_examples=150, deadline=None)
@given(rows_of, st.data())
def test_worse_evidence_never_turns_a_no_into_a_yes(rows, data):
    i = data.draw(st.integers(0, len(rows) - 1))
    solved, invalid, unscored, asks, edits = rows[i]
    part = data.draw(st.sampled_from(["benchmark.serving", "hacks.invalid_calls", "hacks.asks", "hacks.edits"]))
    worse_row = {
        "benchmark.serving": (False, invalid, unscored, asks, edits),
        "hacks.invalid_calls": (solved, min(4, invalid + 1), unscored, asks, edits),
        "hacks.asks": (solved, invalid, unscored, True, edits),
        "hacks.edits": (solved, invalid, unscored, asks, False),
    }[part]
    serving = build([(True, 0, 0, False, True)] * len(rows))
    before = check(part, evidence(build(rows), serving))
    after = check(part, evidence(build([*rows[:i], worse_row, *rows[i + 1 :]]), serving))
    assert RANK[after.verdict] >= RANK[before.verdict]
    assert (after.estimate - before.estimate) * (1 if part in ("hacks.invalid_calls", "hacks.asks") else -1) >= -1e-12


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_larger_distance_never_passes_where_a_smaller_one_did_not(first, second):
    near, far = sorted((first, second))
    verdicts = [check("distance.kl", evidence(scores=tuple(score_row(f"u{i}", kl=kl) for i in range(8)))).verdict for kl in (near, far)]
    assert RANK[verdicts[1]] >= RANK[verdicts[0]]


@given(st.integers(2, 40))
def test_fewer_users_never_pass_where_more_did_not(n):
    def verdict(users: int) -> Verdict:
        return check(
            "hacks.invalid_calls", evidence([attempt(f"t{i}") for i in range(users)], [attempt(f"t{i}") for i in range(users)])
        ).verdict

    assert RANK[verdict(n)] >= RANK[verdict(n + 1)]


# What the demo's gate can see --------------------------------------------------------------------------------------------


def session(rng: random.Random, task: str, *, solve: float, invalid: float, asks: float, edits: float) -> Attempt:
    calls, turns = rng.randint(1, 4), rng.randint(1, 3)
    return attempt(
        task, solved=rng.random() < solve, user=f"user-{rng.randrange(40)}", calls=calls, turns=turns,
        invalid_calls=sum(rng.random() < invalid for _ in range(calls)), unscored_turns=sum(rng.random() < 0.15 for _ in range(turns)),
        asks=int(rng.random() < asks), edits_proposed=int(rng.random() < edits),
    )  # fmt: skip


def benchmark(rng: random.Random, **rates: float) -> list[Attempt]:
    """As the demo: ten folders tried twice and 24 sessions."""
    tasks = [f"folder-{i}" for i in range(10) for _ in range(2)] + [f"session-{i}" for i in range(24)]
    return [session(rng, task, **rates) for task in tasks]


def test_at_the_demos_size_an_equal_candidate_ships_at_least_four_times_in_five():
    rng, rounds, passed = random.Random(5), 120, 0
    rates = {"solve": 0.6, "invalid": 0.05, "asks": 0.05, "edits": 0.85}
    for _ in range(rounds):
        passed += gates.decide(evidence(benchmark(rng, **rates), benchmark(rng, **rates)), DEMO).verdict is Verdict.PASS
    assert passed / rounds >= 0.8


def test_at_the_demos_size_a_sabotaged_candidate_never_ships():
    rng = random.Random(6)
    for _ in range(60):
        serving = benchmark(rng, solve=0.6, invalid=0.05, asks=0.05, edits=0.85)
        broken = benchmark(rng, solve=0.0, invalid=1.0, asks=0.0, edits=0.0)
        assert gates.decide(evidence(broken, serving), DEMO).verdict is Verdict.FAIL


def test_the_plan_agrees_with_simulation_and_says_how_weak_the_demo_is():
    found = plan.plan(DEMO, plan.Size(tasks=34, attempts=1, users=24))
    assert found.passes >= 0.8
    lines = {line.name: line for line in found.lines}
    rng, rounds = random.Random(7), 2000
    simulated = 0
    for _ in range(rounds):
        counts = [sum(rng.random() < 0.05 for _ in range(24)) for _ in range(2)]
        simulated += gates.stats.newcombe((counts[0], 24), (counts[1], 24))[1] <= DEMO.invalid_calls_margin
    assert lines["invalid_calls"].passes == pytest.approx(simulated / rounds, abs=0.02)
    assert lines["benchmark"].caught > 0.2, "a weak gate must say that it is weak"
    assert "Smaller regressions can ship" in found.sentence


def test_production_margins_need_far_more_than_a_demo():
    production = load(Config, CONFIGS / "production.toml").gate
    small = plan.plan(production, plan.Size(tasks=34, attempts=1, users=24))
    assert small.passes < 0.01
    assert all(line.needed > line.margin for line in small.lines)
    assert gates.decide(evidence(), production).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("name", ["local", "demo", "production"])
def test_every_shipped_configuration_loads(name):
    assert load(Config, CONFIGS / f"{name}.toml").gate.minimum_tasks >= 8


def test_production_is_the_default():
    assert load(Config, CONFIGS / "production.toml").gate == GateConfig()


# How it looks -------------------------------------------------------------------------------------------------------------


def test_a_report_survives_being_stored():
    report = gates.decide(evidence(), DEMO)
    assert explain.from_dict(explain.to_dict(report)) == report


def test_the_explanation_shows_formula_margin_and_what_would_flip_each_check():
    report = gates.decide(evidence([attempt(f"t{i}", invalid_calls=4) for i in range(12)]), DEMO)
    text = explain.to_text(report)
    assert text.startswith("gate: FAIL")
    for item in report.checks:
        assert item.formula in text
        assert item.reason in text
        assert item.flip


def test_rows_that_break_their_contract_are_an_error_that_names_the_file_and_the_field(tmp_path):
    with pytest.raises(ContractViolation, match=r"results.jsonl: calls"):
        parse_attempts([attempt("t").model_dump() | {"calls": -1}], source="results.jsonl")
    with pytest.raises(ContractViolation, match="n_tokens"):
        parse_scores([{"user_key": "u"} | {"session_id": "s", "kl": 0, "self_gap": 0}], source="scores.json")
    with pytest.raises(ContractViolation, match="does not exist"):
        read_rows(tmp_path / "results.jsonl")
