"""Secrets never survive, and redacting twice is redacting once."""

import stat
import time
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from pipelines import redaction
from pipelines.redaction import clean_event, features, guess_language, hasher, redact, user_key
from pipelines.storage import Home
from tests.support.events_for_tests import message

ALNUM = "abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789"


def token(low: int, high: int, alphabet: str = ALNUM) -> st.SearchStrategy[str]:
    return st.text(alphabet, min_size=low, max_size=high)


# (what is written, what must be gone)
SECRETS = st.one_of(
    token(16, 16, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567").map(lambda t: (f"AKIA{t}", t)),
    token(20, 40).map(lambda t: (f"sk-{t}", t)),
    token(20, 40).map(lambda t: (f"sk-ant-api03-{t}", t)),
    token(36, 36).map(lambda t: (f"ghp_{t}", t)),
    token(20, 30).map(lambda t: (f"glpat-{t}", t)),
    token(12, 30).map(lambda t: (f"xoxb-{t}", t)),
    token(35, 35).map(lambda t: (f"AIza{t}", t)),
    st.tuples(token(10, 30), token(10, 30)).map(lambda p: (f"eyJ{p[0]}.{p[1]}.sig", p[1])),
    token(12, 40).map(lambda t: (f"Authorization: Bearer {t}", t)),
    token(8, 20).map(lambda t: (f"postgres://app:{t}@db.internal:5432/x", t)),
    token(8, 20).map(lambda t: (f"DB_PASSWORD={t}", t)),
    token(8, 20).map(lambda t: (f'"clientSecret": "{t}"', t)),
    token(8, 20).map(lambda t: (f"export STRIPE_API_KEY='{t}'", t)),
    token(8, 20).map(lambda t: (f"password: {t}", t)),
    token(16, 40).map(lambda t: (f"STATION_KEY=a1{t}", t)),
    token(40, 80).map(lambda t: (f"-----BEGIN RSA PRIVATE KEY-----\n{t}\n-----END RSA PRIVATE KEY-----", t)),
    token(40, 80).map(lambda t: (f"-----BEGIN OPENSSH PRIVATE KEY-----\n{t}", t)),
    token(8, 16).map(lambda t: (f"{t}@example.org", f"{t}@example")),
    st.from_regex(r"\+49 17[0-9] [0-9]{7}", fullmatch=True).map(lambda t: (t, t)),
)
AROUND = st.text().map(lambda t: t + "\n")


@settings(max_examples=300)
@given(AROUND, SECRETS, st.sampled_from(["\n", " and\n", ",\n", ")\n"]), st.text())
def test_a_planted_secret_never_survives(before: str, secret: tuple[str, str], join: str, after: str) -> None:
    written, gone = secret
    assume(gone not in before + after)
    text, counts = redact(before + written + join + after)
    assert gone not in text
    assert sum(counts.values()) >= 1


@settings(max_examples=300)
@given(
    st.text()
    | st.lists(
        SECRETS.map(lambda pair: pair[0]) | st.sampled_from(["password", "=", ":", " ", "@", "token", "+1 ", "://", "eyJ", "sk-"])
    ).map("".join)
)
@example("password:token=sk-aaaaaaaaaaaaaaaaaaaa@b.c")
def test_redacting_twice_is_redacting_once(text: str) -> None:
    once, _ = redact(text)
    assert redact(once) == (once, {})


def test_each_kind_has_its_own_placeholder_and_the_rest_of_the_text_stays() -> None:
    text = "curl -H 'Authorization: Bearer abc123def456' https://u:pw12@h.io/x # ask mira@example.org, key AKIAABCDEFGHIJKLMNOP"
    assert redact(text) == (
        "curl -H 'Authorization: Bearer <redacted:bearer_token>' https://u:<redacted:url_password>@h.io/x "
        "# ask <redacted:email>, key <redacted:aws_key>",
        {"bearer_token": 1, "url_password": 1, "email": 1, "aws_key": 1},
    )


@pytest.mark.parametrize(
    "text",
    [
        "def f(token): return tokens[0]",
        "max_tokens = 4096",
        "see http://localhost:8080/a?b=c and 127.0.0.1:9092",
        "released 2025-10-21 12:30:00, version 1.2.3-4",
        "commit 9d6509d2f1b0c3a4 touches src/keys.py:12",
        "the password is wrong",
        "class Secret(Base): ...",
        "PATH=/usr/local/bin/python3.11 DEBUG=1 BASE_URL=https://a.b NAME=some-long-name-of-a-thing",
        "1234567 rows, 3.14159, 0x7fff",
    ],
)
def test_ordinary_code_and_prose_stays_as_it_is(text: str) -> None:
    assert redact(text) == (text, {})


def test_lone_surrogates_are_made_encodable() -> None:
    assert redact("a\ud83db")[0].encode() == b"a?b"


def test_the_time_to_redact_grows_with_the_text_and_not_faster() -> None:
    for piece in (
        "a",
        "a@",
        "password",
        "token=",
        "_-",
        "+1 ",
        "A=a",
        "eyJaaaaa.",
        "-----BEGIN PRIVATE KEY-----",
        "1-",
        "\n    at f (x.js:1:2)",
    ):
        text = piece * (200_000 // len(piece))
        started = time.perf_counter()
        redact(text)
        features(text)
        assert time.perf_counter() - started < 5, piece


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("still does not work, why is that", "en"),
        ("das geht immer noch nicht", "de"),
        ("ça ne marche pas encore", "fr"),
        ("todavía no funciona, ¿por qué?", "es"),
        ("还是不行，请再试一次", "zh"),
        ("まだ動かない", "ja"),
        ("여전히 안 돼요", "ko"),
        ("всё ещё не работает", "ru"),
        ("x = foo(bar)", None),
        ("", None),
        ("12345", None),
    ],
)
def test_the_language_is_guessed_or_left_unknown(text: str, language: str | None) -> None:
    assert guess_language(text) == language


def test_stack_traces_and_diffs_are_counted() -> None:
    python = 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: x\n'
    node = "TypeError: x\n    at f (/a/b.js:1:2)\n    at g (/a/b.js:3:4)\n"
    diff = "diff --git a/x b/x\n@@ -1,2 +1,3 @@\n+a\n"
    found = features(python + node + diff + diff)
    assert (found.stack_traces, found.diffs) == (2, 2)
    assert features("@@ -1 +1 @@\n-a\n+b").diffs == 1
    assert features("nothing here").stack_traces == 0


def test_user_keys_are_stable_in_a_home_differ_between_homes_and_the_key_is_private(tmp_path: Path) -> None:
    one, two = Home(tmp_path / "one"), Home(tmp_path / "two")
    assert user_key(one, "mira") == user_key(one, "mira") != user_key(one, "otto")
    assert user_key(one, "mira") != user_key(two, "mira")
    assert stat.S_IMODE((one.keys / "user.key").stat().st_mode) == 0o600
    assert [path.name for path in one.keys.iterdir()] == ["user.key"]
    keyed = hasher(one)
    assert keyed("user", "mira") == user_key(one, "mira")
    assert keyed("path", "mira") != keyed("user", "mira")


def test_without_consent_or_where_the_deployment_keeps_no_text_the_message_goes_and_its_length_stays() -> None:
    event = message("hello password=abcd1234")
    kept = clean_event(event, keep_text=True)
    assert kept.payload.message == "hello password=<redacted:labelled_value>"  # type: ignore[union-attr]
    for cleaned in (clean_event(event, keep_text=False), clean_event(event.model_copy(update={"consent": "none"}), keep_text=True)):
        assert cleaned.payload.message is None  # type: ignore[union-attr]
        assert cleaned.payload.message_chars == 23  # type: ignore[union-attr]


PARTS = (
    "password: hunter22", "API_KEY=abc123abc123abc123", "\u017fecret=abcdef", "toKen = xyzzyx", "pa\u017fsword: aaaa", "\u212aey=vvvv",
    "\u0130pass=qqqq", "bearer abcdefgh1", "Bas\u0131c abcdefgh1", "https://u:p@h.de/x", "a@b.co", "+49 170 1234567", "(555) 123-4567",
    "555-123-4567", "sk-aaaaaaaaaaaaaaaaaaaa", "AKIAABCDEFGHIJKLMNOP", "eyJhbGci.eyJzdWIi.x", "ghp_aaaaaaaaaaaaaaaaaaaaaa",
    "xoxb-aaaaaaaaaaaa",
    "-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----", "FOO_BAR = 'abcdef1234567890abcd'", "\n", "\r\n", " ", "\x0b", "\u2028",
    "=", ":", '"', "x", "key", "token_value", "credentials_12",
    "\u0663" * 3 + "-" + "\u0663" * 3 + "-" + "\u0663" * 4, "glpat-aaaaaaaaaaaaaaaaaa",
)  # fmt: skip


@settings(max_examples=400)
@given(st.lists(st.sampled_from(PARTS), max_size=9).map("".join))
def test_passing_over_what_cannot_match_gives_what_the_patterns_give(text: str) -> None:
    whole = text
    for _ in range(redaction.MAX_ROUNDS):
        before = whole
        for name, pattern, kept in redaction._PATTERNS:
            whole = pattern.sub(f"{kept}<redacted:{name}>", whole)
        if whole == before:
            break
    assert redact(text)[0] == whole
