"""Arms by sticky hash, sessions by checkpoint."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from deploy.serving.routing import Sessions, assign_arm

USERS = [f"user-{number}" for number in range(20_000)]


def test_shares_are_kept_and_a_user_always_gets_the_same_arm() -> None:
    shares = {"candidate": 0.05, "anchor": 0.05}
    arms = Counter(assign_arm(user, shares, salt="e1") for user in USERS)
    assert abs(arms["candidate"] - 1000) < 4 * 30.8  # binomial standard deviation of 20,000 at 5 %
    assert abs(arms["anchor"] - 1000) < 4 * 30.8
    assert all(assign_arm(user, shares, salt="e1") == assign_arm(user, shares, salt="e1") for user in USERS[:100])
    assert {assign_arm(user, {}, salt="e1") for user in USERS[:100]} == {"serving"}


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_raising_a_share_moves_nobody_out_of_the_arm(user: str, one: float, other: float) -> None:
    low, high = sorted((one, other))
    if assign_arm(user, {"candidate": low}, salt="s") == "candidate":
        assert assign_arm(user, {"candidate": high}, salt="s") == "candidate"


def test_two_experiments_split_users_independently() -> None:
    both = Counter((assign_arm(u, {"c": 0.5}, salt="a"), assign_arm(u, {"c": 0.5}, salt="b")) for u in USERS)
    assert all(abs(number - 5000) < 4 * 61.3 for number in both.values())
    assert len(both) == 4


def test_a_session_stays_until_its_checkpoint_is_gone() -> None:
    sessions = Sessions()
    assert sessions.place("s", serving="old", alive=frozenset({"old"})) == "old"
    assert sessions.place("s", serving="new", alive=frozenset({"old", "new"})) == "old"
    assert sessions.place("t", serving="new", alive=frozenset({"old", "new"})) == "new"
    assert (sessions.count("old"), sessions.count("new")) == (1, 1)
    assert sessions.place("s", serving="new", alive=frozenset({"new"})) == "new"
    assert sessions.place("s", serving="third", alive=frozenset({"new", "third"})) == "new"


def test_an_ended_or_left_session_starts_anew() -> None:
    sessions = Sessions()
    alive = frozenset({"old", "new"})
    for session in ("s", "t"):
        sessions.place(session, serving="old", alive=alive)
    sessions.end("s")
    assert sessions.place("s", serving="new", alive=alive) == "new"
    sessions.leave("old")
    assert sessions.place("t", serving="new", alive=alive) == "new"


@given(st.lists(st.integers(0, 30), max_size=100))
def test_the_memory_of_sessions_is_bounded(ids: list[int]) -> None:
    sessions = Sessions(limit=5)
    for number in ids:
        sessions.place(str(number), serving="a", alive=frozenset({"a"}))
    assert sessions.count("a") == min(5, len(set(ids)))
