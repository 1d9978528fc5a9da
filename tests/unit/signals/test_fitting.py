"""Fitting the follow-up model, and the figures that it is judged by."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.errors import ConfigError
from signals import fitting, followup_report, followups
from signals.followup_commands import _fit_text

P = np.array([0.9, 0.8, 0.7, 0.6, 0.55, 0.54, 0.53, 0.52, 0.51, 0.5, 0.4])
Y = np.array([1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0], dtype=float)


def test_the_committed_head_is_the_fit_of_the_committed_labels() -> None:
    rows = fitting.labelled()
    head = followups.head()
    assert head.labels_sha256 == fitting.labels_digest(rows)
    x, y, scale = fitting.examples(rows)
    weight = fitting.weights([row.family for row in rows])
    found = fitting.head_of(fitting.logistic(x, y, head.penalty, weight=weight), scale, (head.slope, head.offset))
    ours = np.array([*found.embedding, *found.surface, *found.words, *found.behaviour, found.intercept])
    theirs = np.array([*head.embedding, *head.surface, *head.words, *head.behaviour, head.intercept])
    assert np.abs(ours - theirs).max() <= 16, "fit again: tidegate signals followup fit --out signals/data/followup_head.json"


def test_logistic_regression_finds_the_minimum_of_its_loss() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(200, 4))
    y = (x @ [1.0, -2.0, 0.0, 0.5] + rng.normal(size=200) > 0.3).astype(float)
    w = fitting.logistic(x, y, 2.0)
    p = 1 / (1 + np.exp(-(w[0] + x @ w[1:])))
    assert p.sum() == pytest.approx(y.sum(), abs=1e-6)
    assert x.T @ (y - p) == pytest.approx(2.0 * w[1:], abs=1e-6)


def test_a_row_that_counts_twice_is_a_row_that_stands_there_twice() -> None:
    rng = np.random.default_rng(4)
    x = rng.normal(size=(60, 3))
    y = (x[:, 0] + rng.normal(size=60) > 0).astype(float)
    twice = fitting.logistic(np.concatenate([x, x[:20]]), np.concatenate([y, y[:20]]), 1.0)
    assert fitting.logistic(x, y, 1.0, weight=np.array([2.0] * 20 + [1.0] * 40)) == pytest.approx(twice, abs=1e-7)


def test_an_idea_counts_as_the_root_of_its_wordings() -> None:
    found = fitting.weights(["a"] * 4 + ["b"])
    # 4 rows of 1/2 and one of 1 are 3 in all: the rows of a count 1/2, that of b 1, over a mean of 3/5.
    assert found == pytest.approx([5 / 6] * 4 + [5 / 3])
    assert found.mean() == pytest.approx(1.0)


def test_a_calibration_turns_scores_that_are_twice_too_sure_into_frequencies() -> None:
    rng = np.random.default_rng(5)
    z = rng.normal(size=20_000) * 2
    y = (rng.random(20_000) < 1 / (1 + np.exp(-z))).astype(float)
    slope, offset = fitting.platt(2.0 * z + 1.0, y)
    assert (slope, offset) == (pytest.approx(0.5, abs=0.03), pytest.approx(-0.5, abs=0.05))


def test_every_row_is_scored_by_a_fit_that_has_not_seen_its_fold() -> None:
    x = np.eye(6)
    y = np.array([1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    scores = fitting.out_of_fold(x, y, np.array([0, 0, 1, 1, 2, 2]), 1.0)
    # A row is the only one with its feature, so what is left is the intercept of the others, which are half and half.
    assert scores == pytest.approx(np.zeros(6), abs=1e-9)


def test_the_threshold_is_where_hits_exceed_false_alarms_most() -> None:
    assert fitting.best_threshold(np.array([0.9, 0.8, 0.7, 0.2]), np.array([1.0, 1.0, 0.0, 0.0])) == 0.8
    # .9: 1/9 - 0; .8: 2/9 - 0; .7: 2/9 - 1/2; ... .5: 9/9 - 1/2 = .5
    assert fitting.best_threshold(P, Y) == 0.5


def test_auc_counts_pairs_with_ties_as_half() -> None:
    assert followup_report.auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0.0, 0.0, 1.0, 1.0])) == 3.5 / 4


def test_recall_at_a_precision_takes_the_best_threshold_that_keeps_it() -> None:
    # 10 rows at or above .5 hold 9 dissatisfied: exactly 90 %, all of them found.
    assert followup_report.recall_at_precision(P, Y) == 1.0
    assert followup_report.recall_at_precision(P, Y, 0.95) == pytest.approx(2 / 9)
    assert followup_report.recall_at_precision(np.array([0.9, 0.1]), np.array([0.0, 1.0])) == 0.0


def test_calibration_error_is_the_mean_gap_of_bins_by_rows() -> None:
    p, y = np.array([0.05, 0.05, 0.95, 0.95]), np.array([0.0, 1.0, 1.0, 1.0])
    assert followup_report.calibration_error(p, y) == pytest.approx((2 * 0.45 + 2 * 0.05) / 4)
    assert followup_report.reliability(p, y) == [
        {"mean_p": 0.05, "share": 0.5, "rows": 2},
        {"mean_p": 0.95, "share": 1.0, "rows": 2},
    ]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.booleans(), st.sampled_from("abc")), min_size=4, max_size=30))
def test_intervals_hold_their_value_or_say_that_there_is_none(rows: list[tuple[float, bool, str]]) -> None:
    p, y = np.array([row[0] for row in rows]), np.array([float(row[1]) for row in rows])
    if 0 < y.sum() < len(y):
        found = followup_report.figures(p, y, [row[2] for row in rows], threshold=0.5)
        for name in followup_report.MEASURES:
            assert 0.0 <= found[name]["value"] <= 1.0
            assert np.isnan(found[name]["low"]) or found[name]["low"] <= found[name]["high"]


def test_the_picture_and_the_page_are_whole_without_anything_else() -> None:
    found = followup_report.report(P, Y, families=list("aabbccddeef"), groups={"language": ["en"] * 11}, threshold=0.5)
    picture, page = followup_report.svg(found), followup_report.html(found)
    assert picture.startswith("<svg")
    assert picture.count("<circle") == len(found["reliability"])
    assert picture in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_labels_with_a_family_on_both_sides_or_a_broken_line_are_refused_with_the_place(tmp_path: Path) -> None:
    def line(**changes: object) -> str:
        base = {"id": "1", "family": "a", "language": "en", "shape": "x", "split": "fit", "text": "no", "dissatisfied": 1}
        return json.dumps(base | changes)

    file = tmp_path / "labels.jsonl"
    file.write_text(f"{line()}\n{line(split='held_out', dissatisfied=0)}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="family 'a' needs one split"):
        fitting.labelled(file)
    file.write_text(f"{line()}\n{line(text=None)}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"labels\.jsonl:2: text: "):
        fitting.labelled(file)
    file.write_text(line(), encoding="utf-8")
    with pytest.raises(ConfigError, match="rows of both labels"):
        fitting.labelled(file)


def test_every_language_is_told_with_its_own_recall_and_how_many_that_is_of() -> None:
    p, y = np.array([0.9, 0.8, 0.7, 0.2, 0.9, 0.6, 0.4]), np.array([1, 1, 0, 1, 1, 0, 0])
    found = followup_report.report(p, y, families=list("abcdefg"), groups={"language": ["en"] * 4 + ["de"] * 3}, threshold=0.5)
    # English: .9 and .8 are found before the first false alarm, two of three; German: its only one.
    told = {name: (group["dissatisfied"], group["recall_at_90_precision"]) for name, group in found["by_language"].items()}
    assert told == {"de": (1, 1.0), "en": (3, 0.6667)}
    part = {**found, "by_shape": {}}
    text = _fit_text({"held_out": part, "out_of_fold": part})
    assert "en                           4 rows,    3 dissatisfied  right  50.0%  AUC 0.667" in text
    assert "recall at 90 % precision 0.67" in text
