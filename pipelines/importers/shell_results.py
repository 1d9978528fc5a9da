"""What the output of a command or a tool says: how it ended, and what tests it ran. Pure.

Takes: output as text. Gives: an exit code, a result class, test counts, or None where the text does not tell.
Leaves out: error texts of one tool alone (its own module).
"""

import re
from dataclasses import dataclass
from typing import Final

from pipelines.events import ResultClass
from pipelines.importers.texts import plain

_HEAD_CHARS: Final = 2_000
_TAIL_CHARS: Final = 4_000
"""Test programs print their sum at the end; what is above is logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestCounts:
    """Tests of one run."""

    __test__ = False

    passed: int
    failed: int
    """Failures and errors."""


_PYTEST: Final = re.compile(r"^=* ?((?:\d+ [a-z]+, )*\d+ (?:passed|failed|errors?)(?:, \d+ [a-z]+)*) in [\d.]+s\b", re.M)
_PYTEST_PART: Final = re.compile(r"(\d+) (passed|failed|errors?)\b")
_UNITTEST: Final = re.compile(r"^Ran (\d+) tests? in [\d.]+s\s+(OK|FAILED)(?: \(([^)\n]*)\))?", re.M)
_UNITTEST_PART: Final = re.compile(r"(failures|errors|skipped)=(\d+)")
_JEST: Final = re.compile(r"^\s*Tests:?\s+((?:\d+ (?:failed|passed|skipped|todo|total)[,|\s]*)+)", re.M)
_JEST_PART: Final = re.compile(r"(\d+) (failed|passed)")
_CARGO: Final = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed;", re.M)
_MOCHA: Final = re.compile(r"^\s*(\d+) passing(?: \([^)\n]*\))?\s*$(?:(?:.|\n){0,200}?^\s*(\d+) failing\s*$)?", re.M)
_SUREFIRE: Final = re.compile(r"Tests run: (\d+), Failures: (\d+), Errors: (\d+)(?:, Skipped: (\d+))?")
_GO_CASE: Final = re.compile(r"^--- (PASS|FAIL): ", re.M)


def test_counts(output: str) -> TestCounts | None:
    """Return the counts of a test run from the sums that pytest, unittest, jest, vitest, cargo, mocha, Maven and `go test -v` print."""
    tail = plain(output[-_TAIL_CHARS:])
    if found := _last(_PYTEST, tail):
        parts = [(int(number), word) for number, word in _PYTEST_PART.findall(found[1])]
        return _counts(sum(n for n, word in parts if word == "passed"), sum(n for n, word in parts if word != "passed"))
    if found := _last(_UNITTEST, tail):
        parts = {name: int(number) for name, number in _UNITTEST_PART.findall(found[3] or "")}
        failed = parts.get("failures", 0) + parts.get("errors", 0)
        return _counts(int(found[1]) - failed - parts.get("skipped", 0), failed)
    if found := _last(_JEST, tail):
        parts = {word: int(number) for number, word in _JEST_PART.findall(found[1])}
        return _counts(parts.get("passed", 0), parts.get("failed", 0)) if parts else None
    if rows := _CARGO.findall(tail):  # one line a crate or test file
        return _counts(sum(int(passed) for passed, _ in rows), sum(int(failed) for _, failed in rows))
    if found := _last(_MOCHA, tail):
        return _counts(int(found[1]), int(found[2] or 0))
    if found := _last(_SUREFIRE, tail):
        failed = int(found[2]) + int(found[3])
        return _counts(int(found[1]) - failed - int(found[4] or 0), failed)
    if cases := _GO_CASE.findall(plain(output)):
        return _counts(cases.count("PASS"), cases.count("FAIL"))
    return None


test_counts.__test__ = False  # type: ignore[attr-defined]


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for found in pattern.finditer(text):  # noqa: B007 -- the last one is wanted
        pass
    return found


def _counts(passed: int, failed: int) -> TestCounts:
    limit = 2**31 - 1
    return TestCounts(passed=min(max(passed, 0), limit), failed=min(max(failed, 0), limit))


def exit_class(exit_code: int | None, output: str) -> ResultClass:
    """Classify a command that ran: a code other than 0 is the environment's answer, unless the text says more."""
    if exit_code == 0:
        return ResultClass.OK
    if exit_code == 124 or _timed_out(output):
        return ResultClass.TIMEOUT
    if exit_code == 130:
        return ResultClass.USER_ABORTED
    return ResultClass.OK if exit_code is None else ResultClass.UNEXPECTED_ENVIRONMENT


def _timed_out(output: str) -> bool:
    head = output[:_HEAD_CHARS].lower()
    return "command timed out" in head or "timed out after" in head


def error_class(text: str) -> ResultClass:
    """Classify a tool's error by its text; what nothing fits is the environment's doing."""
    head = plain(text[:_HEAD_CHARS]).lower()
    if any(mark in head for mark in _ABORTED):
        return ResultClass.USER_ABORTED
    if any(mark in head for mark in _UNKNOWN_TOOL):
        return ResultClass.UNKNOWN_TOOL
    if any(mark in head for mark in _BAD_ARGUMENTS):
        return ResultClass.INVALID_ARGUMENTS
    if "timed out" in head or "timeout" in head[:200]:
        return ResultClass.TIMEOUT
    if any(mark in head for mark in ("api error", "overloaded", "rate limit", "quota exceeded", "internal server error")):
        return ResultClass.PROVIDER_ERROR
    return ResultClass.UNEXPECTED_ENVIRONMENT


_ABORTED: Final = ("rejected by user", "user rejected", "user cancelled", "user canceled", "aborted by user", "user denied")
_UNKNOWN_TOOL: Final = ("unsupported call", "unknown tool", "unknown function", "tool not found", "no such tool", "not found in registry")
_BAD_ARGUMENTS: Final = (
    "failed to parse function arguments", "invalid arguments", "invalid parameters", "missing required", "must have required property",
    "missing field", "invalid patch", "verification failed", "failed to find expected lines", "failed to find context",
    "string to replace not found", "no occurrences", "no match found", "could not find the string to replace", "must be string",
    "did not appear verbatim", "invalid `", "invalid tool parameters",
)  # fmt: skip
"""Texts of tools that refused a call because of what was in it."""
