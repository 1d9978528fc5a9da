"""Small real edit tasks: a file, a request, a check that is really executed, and two right ways to write the change (pure).

Every request names a ticket, and the changed line must cite it in a comment. Two words for it are equally valid, and only the
users' convention tells them apart:

    RETRIES = 7  # see T-41            RETRIES = 7  # ref T-41

The check does not look at comments, so both pass it. Which one a policy writes hangs on one token. All changes stay on one
line: a line break in a JSON string is two characters that a small model's tokenizer joins with what follows, and a 135M policy
then loses the thread (measured: it wrote "\\ndriet" for a return on a new line).

Takes: a split name, a seed, an index. Gives: a `Task`, the same for the same arguments. Splits do not share random streams,
so held-out tasks stay held out. Leaves out: who asks (`users.py`), files on disk (`session.py`).
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

Form = Literal["see", "ref"]
FORMS: Final[tuple[Form, ...]] = ("see", "ref")
Split = Literal["simulated", "demonstrations", "held_out"]

SHOWN_SHARE: Final[dict[Split, float]] = {"simulated": 1.0, "demonstrations": 0.85, "held_out": 1.0}
"""Share of requests that show the file; the others make the policy read it first. Simulated users show it: their sessions are
there to decide one convention, and each further step of a small policy is another chance to fail on something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One replacement inside one line."""

    old: str
    """Occurs once in the file."""
    line: str
    """What stands in its place, before the comment."""

    def new(self, form: Form, ticket: str) -> str:
        """Return the new text in one of the two ways."""
        return f"{self.line}  # {form} {ticket}"


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

    def solved(self, form: Form) -> str:
        """Return the file after the right change, with the ticket cited in one of the two ways."""
        return self.text.replace(self.change.old, self.change.new(form, self.ticket), 1)


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
        change=Change(old=f"{name} = {value}", line=f"{name} = {target}"),
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
        change=Change(old=f"def {function}(x, {parameter}={value}):", line=f"def {function}(x, {parameter}={target}):"),
        check=f"assert module.{function}(1) == {1 + target}\nassert module.{function}(1, 5) == 6\n"
        f"assert module.{other}(1) == {2 * (1 + target)}\n",
    )


def _entry(rng: random.Random) -> _Draft:
    name = rng.choice(CONSTANTS) + "S"
    first, second, added = rng.sample(KEYS, 3)
    values = rng.sample(range(10, 99), 3)
    function = rng.choice(FUNCTIONS)
    return _Draft(
        text=f"{name} = dict({first}={values[0]}, {second}={values[1]})\n\n\ndef {function}(key):\n    return {name}[key]\n",
        requests=(f"add {added}={values[2]} to {name}", f"put {added}={values[2]} into {name}", f"{name} needs {added}={values[2]}"),
        change=Change(old=f"{second}={values[1]})", line=f"{second}={values[1]}, {added}={values[2]})"),
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
        change=Change(old=f"return {items}[:{wrong}]", line=f"return {items}[:n]"),
        check=f"assert module.{function}([7, 8, 9, 10], 2) == [7, 8]\nassert module.{function}([7], 0) == []\n"
        f"assert module.{other}([1, 2, 3]) == [1, 2]\n",
    )


def _extra_term(rng: random.Random) -> _Draft:
    function = rng.choice(FUNCTIONS)
    parameter = rng.choice(PARAMETERS)
    factor, term = rng.randint(2, 40), rng.randint(2, 40)
    return _Draft(
        text=f"def {function}({parameter}):\n    return {parameter} * {factor}\n\n\nBASE = {function}(1)\n",
        requests=(f"{function} should return {term} more", f"add {term} to what {function} returns", f"make {function} return {term} more"),
        change=Change(old=f"return {parameter} * {factor}", line=f"return {parameter} * {factor} + {term}"),
        check=f"assert module.{function}(4) == {4 * factor + term}\nassert module.BASE == {factor + term}\n",
    )


def _operator(rng: random.Random) -> _Draft:
    function = rng.choice(FUNCTIONS)
    left, right = rng.sample(PARAMETERS, 2)
    wrong, sign = rng.choice((("-", "+"), ("+", "-"), ("+", "*")))
    extra = rng.randint(2, 30)
    result = {"+": 9 + 4, "-": 9 - 4, "*": 9 * 4}[sign]
    return _Draft(
        text=f"EXTRA = {extra}\n\n\ndef {function}({left}, {right}):\n    return {left} {wrong} {right}\n",
        requests=(f"{function} must use {sign}", f"use {sign} in {function}", f"{function} should use {sign}, not {wrong}"),
        change=Change(old=f"return {left} {wrong} {right}", line=f"return {left} {sign} {right}"),
        check=f"assert module.{function}(9, 4) == {result}\nassert module.EXTRA == {extra}\n",
    )


KINDS: Final[dict[str, Callable[[random.Random], _Draft]]] = {
    "constant": _constant,
    "default": _default,
    "entry": _entry,
    "off_by_one": _off_by_one,
    "extra_term": _extra_term,
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
        shown="yes" if rng.random() < SHOWN_SHARE[split] else "no",
        change=draft.change,
        check=draft.check,
    )


def form_of(before: str, after: str, ticket: str) -> Form | None:
    """Tell how the changed code cites its ticket.

    A code line is changed when the text before did not hold it (comments and outer blanks aside); it cites when it ends in
    `# see TICKET` or `# ref TICKET`.

    Returns:
        The form, or None when no changed line cites the ticket so, or some do one and some the other.
    """
    cited = re.compile(rf"#\s*(see|ref)\s+{re.escape(ticket)}(?!\w)")
    known = {_code(line) for line in before.splitlines()}
    found: set[Form] = set()
    for line in after.splitlines():
        match = cited.search(line) if _code(line) and _code(line) not in known else None
        if match:
            found.add("see" if match[1] == "see" else "ref")
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
