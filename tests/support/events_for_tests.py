"""Small events for tests of the pipeline."""

import random

from pipelines.events import Client, Feedback, FeedbackPayload, TurnStarted, TurnStartedPayload, new_id
from signals.generator import START_MS, Record, Session

CLIENT = Client(name="test", version="1")


def feedback(session: str = "s1", score: float = 0.5, at_ms: int = 1_764_000_000_000) -> Feedback:
    return Feedback(
        event_id=new_id(at_ms), session_id=session, turn_id="t1", occurred_at_ms=at_ms, recorded_at_ms=at_ms, origin="simulated",
        user_key="u", client=CLIENT, payload=FeedbackPayload(source="test", score=score),
    )  # fmt: skip


def message(text: str, session: str = "s1", at_ms: int = 1_764_000_000_000) -> TurnStarted:
    return TurnStarted(
        event_id=new_id(at_ms), session_id=session, turn_id="t1", occurred_at_ms=at_ms, recorded_at_ms=at_ms, origin="simulated",
        user_key="u", client=CLIENT, payload=TurnStartedPayload(turn_index=0, message=text, message_chars=len(text)),
    )  # fmt: skip


def generated_session(name: str, *, seed: int) -> list[Record]:
    """Return the records of one session as the bench's generator writes them."""
    return [record for _, record in Session(name, random.Random(f"{seed}-{name}"), START_MS).whole()]
