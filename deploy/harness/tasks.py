"""Small real edit tasks: a file, a request, a check that is really executed, and two right ways to write the change (pure).

Every request names a ticket, and the changed line must cite it in a comment. Two placements are equally valid, and only the
users' convention tells them apart:

    above       # T-41                  trailing    RETRIES = 7  # T-41
                RETRIES = 7

The check does not look at comments, so both pass it. Which one a policy writes hangs on one early token of the new text.

Takes: a split name, a seed, an index. Gives: a `Task`, the same for the same arguments. Splits do not share random streams,
so held-out tasks stay held out. Leaves out: who asks (`users.py`), files on disk (`session.py`).
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

Placement = Literal["above", "trailing"]
PLACEMENTS: Final[tuple[Placement, ...]] = ("above", "trailing")
Split = Literal["simulated", "demonstrations", "held_out"]

SHOWN_SHARE: Final = 0.85
"""Share of requests that show the file; the others make the policy read it first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One replacement, and where the changed line starts."""

    old: str
    """Occurs once in the file."""
    context: str
    """Code kept before the changed line inside the new text; "" when the change replaces a line."""
    line: str
    """The changed or added line, without indentation."""
    indent: str

    def new(self, placement: Placement, ticket: str) -> str:
        """Return the new text in one of the two ways."""
        lead = f"{self.context}\n{self.indent}" if self.context else ""
        if placement == "above":
            return f"{lead}# {ticket}\n{self.indent}{self.line}"
        return f"{lead}{self.line}  # {ticket}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One request for an edit."""

    task_id: str
    kind: str
    """Bucket for baselines and medians."""
    path: str
    text: str
    """The file before."""
    ticket: str
    request: str
    shown: Literal["yes", "no"]
    """Whether the request shows the file."""
    change: Change
    check: str
    """Python statements that raise unless the change works; the file is importable as a module."""

    def message(self) -> str:
        """Return what the user writes."""
        return f"{self.request}\n```\n{self.text}```" if self.shown == "yes" else self.request

    def solved(self, placement: Placement) -> str:
        """Return the file after the right change, with the ticket in one of the two places."""
        return self.text.replace(self.change.old, self.change.new(placement, self.ticket), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    text: str
    requests: tuple[str, ...]
    change: Change
    check: str


FILES: Final = ("app", "jobs", "cart", "feed", "mail", "sync", "tools", "store", "queue_", "board", "report", "cache")
CONSTANTS: Final = ("RETRIES", "LIMIT", "TIMEOUT", "PAGE_SIZE", "WORKERS", "DEPTH", "BATCH", "WINDOW", "MAX_AGE", "PORT", "DELAY", "STEPS")
FUNCTIONS: Final = ("load", "fetch", "send", "clean", "merge", "scan", "pack", "render", "score", "split_up", "collect", "visit")
PARAMETERS: Final = ("count", "size", "depth", "limit", "step", "width", "offset", "rate")
WORDS: Final = ("items", "rows", "users", "orders", "files", "names", "points", "parts")
KEYS: Final = ("web", "db", "cache", "mail", "auth", "api", "log", "queue", "cron", "dns")


def _constants(rng: random.Random, count: int) -> list[tuple[str, int]]:
    return [(name, rng.randint(2, 90)) for name in rng.sample(CONSTANTS, count)]


def _constant(rng: random.Random) -> _Draft:
    pairs = _constants(rng, rng.randint(2, 4))
    name, value = rng.choice(pairs)
    target = value + rng.randint(1, 40)
    function = rng.choice(FUNCTIONS)
    head = "".join(f"{each} = {number}\n" for each, number in pairs)
    others = "".join(f"assert module.{each} == {number}\n" for each, number in pairs if each != name)
    return _Draft(
        text=f"{head}\n\ndef {function}(n):\n    return n * {name}\n",
        requests=(f"set {name} to {target}", f"change {name} to {target}", f"{name} should be {target}", f"make {name} {target}"),
        change=Change(old=f"{name} = {value}", context="", line=f"{name} = {target}", indent=""),
        check=f"assert module.{name} == {target}\nassert module.{function}(3) == {3 * target}\n{others}",
    )


def _default(rng: random.Random) -> _Draft:
    function, other = rng.sample(FUNCTIONS, 2)
    parameter = rng.choice(PARAMETERS)
    value = rng.randint(2, 60)
    target = value + rng.randint(1, 30)
    return _Draft(
        text=f"def {function}(x, {parameter}={value}):\n    return x + {parameter}\n\n\ndef {other}(x):\n    return {function}(x) * 2\n",
        requests=(
            f"the default of {parameter} in {function} should be {target}",
            f"make {parameter} default to {target} in {function}",
            f"change the default of {parameter} to {target}",
        ),
        change=Change(
            old=f"def {function}(x, {parameter}={value}):", context="", line=f"def {function}(x, {parameter}={target}):", indent=""
        ),
        check=f"assert module.{function}(1) == {1 + target}\nassert module.{function}(1, 5) == 6\n"
        f"assert module.{other}(1) == {2 * (1 + target)}\n",
    )


def _entry(rng: random.Random) -> _Draft:
    name = rng.choice(CONSTANTS) + "S"
    first, second, added = rng.sample(KEYS, 3)
    values = rng.sample(range(10, 99), 3)
    function = rng.choice(FUNCTIONS)
    return _Draft(
        text=f"{name} = dict(\n    {first}={values[0]},\n    {second}={values[1]},\n)\n\n\ndef {function}(key):\n    return {name}[key]\n",
        requests=(f"add {added}={values[2]} to {name}", f"put {added}={values[2]} into {name}", f"{name} needs {added}={values[2]}"),
        change=Change(old=f"{name} = dict(", context=f"{name} = dict(", line=f"{added}={values[2]},", indent="    "),
        check=f"assert module.{name} == dict({first}={values[0]}, {second}={values[1]}, {added}={values[2]})\n"
        f"assert module.{function}({added!r}) == {values[2]}\n",
    )


def _off_by_one(rng: random.Random) -> _Draft:
    function = f"first_{rng.choice(WORDS)}"
    items = rng.choice(WORDS)
    other = rng.choice(FUNCTIONS)
    side = rng.choice((-1, 1))
    wrong = "n - 1" if side < 0 else "n + 1"
    amount = "one too few" if side < 0 else "one too many"
    return _Draft(
        text=f"def {function}({items}, n):\n    return {items}[:{wrong}]\n\n\ndef {other}({items}):\n    return {function}({items}, 2)\n",
        requests=(f"{function} returns {amount}, fix it", f"fix {function}, it gives {amount}", f"{function} gives {amount}"),
        change=Change(old=f"return {items}[:{wrong}]", context="", line=f"return {items}[:n]", indent="    "),
        check=f"assert module.{function}([7, 8, 9, 10], 2) == [7, 8]\nassert module.{function}([7], 0) == []\n"
        f"assert module.{other}([1, 2, 3]) == [1, 2]\n",
    )


def _log_line(rng: random.Random) -> _Draft:
    function = rng.choice(FUNCTIONS)
    parameter = rng.choice(PARAMETERS)
    factor = rng.randint(2, 40)
    return _Draft(
        text=f"LOG = []\n\n\ndef {function}({parameter}):\n    return {parameter} * {factor}\n",
        requests=(
            f"append {parameter} to LOG at the start of {function}",
            f"{function} should first append {parameter} to LOG",
            f"log {parameter} to LOG when {function} starts",
        ),
        change=Change(
            old=f"def {function}({parameter}):", context=f"def {function}({parameter}):", line=f"LOG.append({parameter})", indent="    "
        ),
        check=f"assert module.{function}(4) == {4 * factor}\nassert module.LOG == [4]\nmodule.{function}(5)\nassert module.LOG == [4, 5]\n",
    )


def _operator(rng: random.Random) -> _Draft:
    function = rng.choice(FUNCTIONS)
    left, right = rng.sample(PARAMETERS, 2)
    wrong, sign, verb = rng.choice((("-", "+", "add"), ("+", "-", "subtract"), ("+", "*", "multiply")))
    extra = rng.randint(2, 30)
    result = {"+": 9 + 4, "-": 9 - 4, "*": 9 * 4}[sign]
    return _Draft(
        text=f"EXTRA = {extra}\n\n\ndef {function}({left}, {right}):\n    return {left} {wrong} {right}\n",
        requests=(f"{function} must {verb}", f"make {function} {verb}", f"{function} should {verb}, fix it"),
        change=Change(old=f"return {left} {wrong} {right}", context="", line=f"return {left} {sign} {right}", indent="    "),
        check=f"assert module.{function}(9, 4) == {result}\nassert module.EXTRA == {extra}\n",
    )


KINDS: Final[dict[str, Callable[[random.Random], _Draft]]] = {
    "constant": _constant,
    "default": _default,
    "entry": _entry,
    "off_by_one": _off_by_one,
    "log_line": _log_line,
    "operator": _operator,
}


def make_task(split: Split, seed: int, index: int) -> Task:
    """Draw one task; kinds take turns, so that every run of six tasks holds each once."""
    rng = random.Random(f"{split}/{seed}/{index}")
    order = sorted(KINDS)
    random.Random(f"{split}/{seed}/order/{index // len(order)}").shuffle(order)
    kind = order[index % len(order)]
    module = rng.choice(FILES)
    draft = KINDS[kind](rng)
    ticket = f"T-{rng.randint(10, 99)}"
    wish = rng.choice(draft.requests)
    request = rng.choice((f"{ticket}: in {module}.py {wish}.", f"{ticket}: {wish} ({module}.py)."))
    return Task(
        task_id=f"{split}-{seed}-{index}",
        kind=kind,
        path=f"{module}.py",
        text=draft.text,
        ticket=ticket,
        request=request,
        shown="yes" if rng.random() < SHOWN_SHARE else "no",
        change=draft.change,
        check=draft.check,
    )


def placement_of(before: str, after: str, ticket: str) -> Placement | None:
    """Tell where the changed code cites its ticket.

    A code line is changed when the text before did not hold it (comments and outer blanks aside). "above": a comment line that names
    the ticket stands directly over a changed line. "trailing": a changed line ends in such a comment.

    Returns:
        The placement, or None when no changed line cites the ticket, or some do one and some the other.
    """
    cited = re.compile(rf"#.*(?<![\w-]){re.escape(ticket)}(?!\w)")
    known = {_code(line) for line in before.splitlines()}
    found: set[Placement] = set()
    lines = after.splitlines()
    for at, line in enumerate(lines):
        code = _code(line)
        if not code or code in known:
            continue
        if cited.search(line):
            found.add("trailing")
        if at > 0 and not _code(lines[at - 1]) and cited.search(lines[at - 1]):
            found.add("above")
    return found.pop() if len(found) == 1 else None


def _code(line: str) -> str:
    """Return a line without its comment; the tasks' files hold no # inside strings."""
    return line.partition("#")[0].strip()


def check_program(task: Task) -> str:
    """Return the program that checks a task in the sandbox.

    It reads a mark from stdin and prints it last, so that a file that ends the process while it is imported does not pass.
    """
    module = task.path.removesuffix(".py")
    return (
        "import importlib, sys\n"
        "mark = sys.stdin.readline().strip()\n"
        "sys.path.insert(0, '.')\n"
        f"module = importlib.import_module({module!r})\n"
        f"{task.check}"
        "print(mark)\n"
    )
