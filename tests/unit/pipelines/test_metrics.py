"""The Prometheus text format, against the format's own rules."""

import pytest

from pipelines.metrics import MAX_SERIES, Registry


def test_counters_gauges_and_histograms_render_as_the_format_says() -> None:
    registry = Registry()
    requests = registry.counter("requests_total", "Requests answered.", ["code"])
    requests.inc(code="200")
    requests.inc(2, code="500")
    registry.gauge("queue_length", "Events waiting.").set(3.5)
    seconds = registry.histogram("request_seconds", "Time to answer.", buckets=[0.1, 1.0])
    for value in (0.05, 0.1, 0.5, 7.0):
        seconds.observe(value)
    assert registry.render() == (
        "# HELP queue_length Events waiting.\n# TYPE queue_length gauge\nqueue_length 3.5\n"
        "# HELP request_seconds Time to answer.\n# TYPE request_seconds histogram\n"
        'request_seconds_bucket{le="0.1"} 2\nrequest_seconds_bucket{le="1"} 3\nrequest_seconds_bucket{le="+Inf"} 4\n'
        "request_seconds_sum 7.65\nrequest_seconds_count 4\n"
        "# HELP requests_total Requests answered.\n# TYPE requests_total counter\n"
        'requests_total{code="200"} 1\nrequests_total{code="500"} 2\n'
    )
    assert registry.names() == ["queue_length", "request_seconds", "requests_total"]
    assert requests.value(code="500") == 2


def test_label_values_are_escaped() -> None:
    registry = Registry()
    registry.counter("c_total", "C.", ["what"]).inc(what='a"b\\c\nd')
    assert 'c_total{what="a\\"b\\\\c\\nd"} 1' in registry.render()


def test_wrong_use_is_refused() -> None:
    registry = Registry()
    counter = registry.counter("c_total", "C.", ["code"])
    with pytest.raises(ValueError, match="declared twice"):
        registry.gauge("c_total", "again")
    with pytest.raises(ValueError, match="takes the labels"):
        counter.inc()
    with pytest.raises(ValueError, match="cannot fall"):
        counter.inc(-1, code="200")
    with pytest.raises(ValueError, match="letters, digits"):
        registry.counter("no-dashes", "x")
    for i in range(MAX_SERIES):
        counter.inc(code=str(i))
    with pytest.raises(ValueError, match="must not hold an id"):
        counter.inc(code="one more")
    assert Registry().render() == ""
