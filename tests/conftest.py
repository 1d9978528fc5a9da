"""Fixtures shared by all tests: each starts one real component, once per run."""

pytest_plugins = [
    "tests.support.kafka",
    "tests.support.spark",
    "tests.support.model",
    "tests.support.serving",
    "tests.support.harness",
    "tests.support.release",
]
