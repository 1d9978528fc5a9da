"""Events wait for the policy that serves the session, and keep the time at which they happened."""

from deploy.harness.stamps import SessionLog
from pipelines.events import InterruptedPayload, SessionStartedPayload
from tests.support.harness import ListSink


def log_with(sink: ListSink, times: list[int]) -> SessionLog:
    ticks = iter(times)
    return SessionLog(sink=sink, session_id="s", origin="simulated", user_key="u", consent="train", now_ms=lambda: next(ticks))


def test_events_wait_for_the_stamp_and_then_go_out_in_order_with_their_own_time() -> None:
    sink = ListSink()
    log = log_with(sink, [100, 200, 900, 901, 950, 950])
    log.add(SessionStartedPayload(surface="simulator"))
    log.add(InterruptedPayload(by="user"), turn_id="t")
    assert sink.events == []
    log.stamp(4, "serving")
    log.add(InterruptedPayload(by="user"), turn_id="t")
    assert [(event.type, event.occurred_at_ms, event.recorded_at_ms) for event in sink.events] == [
        ("session_started", 100, 900),
        ("interrupted", 200, 901),
        ("interrupted", 950, 950),
    ]
    assert {event.policy_version for event in sink.events} == {4}
    assert sink.events[0].turn_id is None


def test_a_session_that_nobody_answered_still_tells_its_events() -> None:
    sink = ListSink()
    log = log_with(sink, [1, 2])
    log.add(SessionStartedPayload(surface="simulator"))
    log.close()
    assert [(event.policy_version, event.arm) for event in sink.events] == [(None, "none")]
