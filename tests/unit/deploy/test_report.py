"""The demo's figures are right, and its page is one self-contained file that says what happened, also when nothing did."""

import json
from pathlib import Path

import pytest

from deploy.demo import Plan, Run, to_text
from deploy.report import Figure, Observation, headline, median, panel_svg, ratio, render
from pipelines.storage import Home


def observed(*pairs: tuple[float, float]) -> list[Observation]:
    return [Observation(user_key=f"u{i}", numerator=n, denominator=d) for i, (n, d) in enumerate(pairs)]


def test_a_ratio_pools_users_and_its_interval_holds_the_estimate() -> None:
    figure = ratio(observed((1, 2), (3, 4), (0, 2)))
    assert figure.estimate == pytest.approx(4 / 8)
    assert figure.n == 8
    assert figure.low is not None
    assert figure.high is not None
    assert figure.low <= 0.5 <= figure.high


def test_where_all_users_agree_the_interval_is_wilsons_and_not_a_point() -> None:
    figure = ratio(observed((5, 5), (5, 5)))
    # Wilson at 10 of 10 and z = 1.96: lower end 1 / (1 + z^2 / n) = 1 / 1.38415
    assert figure.low == pytest.approx(0.72246, abs=1e-4)
    assert figure.high == pytest.approx(1.0)


def test_nothing_observed_is_no_number() -> None:
    assert ratio([]) == Figure(estimate=None, low=None, high=None, n=0)
    assert median([Observation(user_key="u")]) == Figure(estimate=None, low=None, high=None, n=0)


def test_a_median_pools_all_values() -> None:
    figure = median([Observation(user_key="a", values=(1.0, 9.0)), Observation(user_key="b", values=(3.0,))])
    assert (figure.estimate, figure.n) == (3.0, 3)


def policy(version: int, kept: Figure) -> dict[str, object]:
    none = Figure(estimate=None, low=None, high=None, n=0)
    return {
        "version": version,
        "figures": {"kept_edits": kept, "dissatisfied": none, "latency_s": none, "invalid_calls": none},
        "reward": {"edits_kept": {"mean": 0.25, "n": 4}},
    }


def test_the_headline_claims_a_rise_only_where_intervals_are_apart() -> None:
    low = Figure(estimate=0.4, low=0.3, high=0.5, n=40)
    apart, across = Figure(estimate=0.8, low=0.7, high=0.9, n=40), Figure(estimate=0.5, low=0.45, high=0.6, n=40)
    assert headline([policy(1, low), policy(2, apart)]).endswith("(up).")
    assert headline([policy(1, apart), policy(2, low)]).endswith("(down).")
    assert headline([policy(1, low), policy(2, across)]).endswith("(intervals overlap).")
    assert headline([policy(1, low)]) == "Policy 1 kept serving; its users kept 40 % of its edits."


def test_a_panel_marks_each_policy_and_says_where_there_is_nothing() -> None:
    none = Figure(estimate=None, low=None, high=None, n=0)
    drawn = panel_svg([("policy 1", Figure(estimate=0.5, low=0.4, high=0.6, n=9)), ("policy 2", none)], unit="%")
    assert drawn.count("<circle") == 1
    assert "50 %" in drawn
    assert ">none<" in drawn
    assert "nothing observed" in panel_svg([("policy 1", none)], unit="%")


def report() -> dict[str, object]:
    return {
        "seed": 1, "sessions": 8, "stages": {"start broker": 2.0, "sessions 1": 58.0}, "turns": {"scored": 3, "no_evidence": 1},
        "events": {"produced": 9, "in_lake": 9, "quarantined": 0, "duplicates": 1}, "lake": "lake", "ledger": "ledger.sqlite",
        "cycles": [
            {"policy_before": 1, "policy_after": 1, "candidate": "abc", "verdict": "fail", "reasons": ["hacks.asks: <b>too many</b>"]}
        ],
        "planted_hack": {"story": "S.", "verdict": "fail", "reasons": ["hacks.invalid_calls: all of them"]},
        "tables": [{"name": "turns", "rows": 4, "path": "lake/turns"}],
    }  # fmt: skip


def test_the_page_is_self_contained_and_escapes_what_it_shows() -> None:
    figure = Figure(estimate=0.4, low=0.3, high=0.5, n=40)
    check = {
        "name": "hacks.asks",
        "group": "D",
        "verdict": "fail",
        "estimate": 0.5,
        "low": 0.4,
        "high": None,
        "margin": 0.3,
        "n": 12,
        "reason": "too many",
    }
    gates = [{"title": "Cycle 1", "checks": [check], "weakness": "It sees little.", "open": False}]
    page = render(report(), policies=[policy(1, figure)], gates=gates, duckdb_line="SELECT 1")
    assert "http://" not in page
    assert "https://" not in page
    assert "&lt;b&gt;too many&lt;/b&gt;" in page
    assert "75.0 %" in page, "3 of 4 turns are scored"
    assert "0.4 to …" in page
    assert "It sees little." in page


def test_a_killed_demo_goes_on_and_a_finished_one_starts_anew(tmp_path: Path) -> None:
    home, plan, calls = Home(tmp_path / "demo"), Plan(sessions=2, cycles=1, seed=0), []

    def act() -> dict[str, object]:
        calls.append(1)
        return {"value": len(calls)}

    assert Run(home, plan).once("stage", act) == {"value": 1}
    resumed = Run(home, plan)
    assert resumed.once("stage", act) == {"value": 1}
    (home.root / "store").mkdir()
    (home.root / "lake").mkdir()
    resumed.finish()
    assert Run(home, plan).once("stage", act) == {"value": 2}
    assert (home.root / "store").exists(), "checkpoints are named by content and can be reused"
    assert not (home.root / "lake").exists()
    assert json.loads((home.root / "demo.json").read_text())["finished"] is False


def test_the_closing_table_names_every_policy_and_the_verdict(tmp_path: Path) -> None:
    figure = {"estimate": 0.5, "low": 0.25, "high": 0.75, "n": 8}
    policies = [
        {"version": 1, "kept_edits": figure, "dissatisfied": figure, "latency_s": figure | {"estimate": None}, "invalid_calls": figure}
    ]
    text = to_text(report() | {"policies": policies}, Home(tmp_path))
    assert "50.0 % [25.0, 75.0]" in text
    assert "cycle 1: policy 1 -> 1, fail: hacks.asks" in text
    assert "planted hack: fail: hacks.invalid_calls" in text
