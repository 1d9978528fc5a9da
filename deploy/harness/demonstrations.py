"""Demonstrations for the warm start: whole trajectories that show how to call the tools (pure).

Takes: a number and a seed. Gives: rows `{"messages": [...], "tools": [...]}` for supervised training on the assistant's text.
The convention that simulated users hide is shown half and half, one of each in two neighbouring rows, so that the policy starts without
a lean and reinforcement has room. A follow-up that states the convention is answered by the form it asks for, whichever
that is, so that a policy learns to listen without learning which one users like. Some rows are questions that must be answered
without an edit. `broken` rows hold malformed calls only; a policy trained on them is the sabotaged candidate that a gate must refuse.

Leaves out: training, and the tools' execution (answers are those that `tools.py` gives).
"""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, Literal

from deploy.harness.config import SimulationConfig
from deploy.harness.tasks import FORMS, Form, Task, make_task
from deploy.harness.tools import TOOLS
from deploy.harness.users import Fault, complain, draw_user

SYSTEM: Final = "You edit files with tools. End a changed line with a comment that cites the ticket. Answer questions without editing."
DONE: Final = "Done."

FOLLOW_UP_SHARE: Final = 0.4
"""Two of five turns of a half-right policy are answers to a complaint, so two of five demonstrations show one."""
SECOND_REQUEST_SHARE: Final = 0.5
"""Of those without a follow-up; a policy that saw few second requests failed a third of them."""
QUESTION_SHARE: Final = 0.1

Message = dict[str, Any]


def call_text(name: str, arguments: dict[str, str]) -> str:
    """Write a tool call as the policy is to write it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _edit(task: Task, form: Form) -> str:
    return call_text("edit_file", {"old": task.change.old, "new": task.change.new(form, task.ticket), "path": task.path})


def _solve(task: Task, form: Form) -> list[Message]:
    messages: list[Message] = []
    if task.shown == "no":
        messages += [_assistant(call_text("read_file", {"path": task.path})), {"role": "tool", "content": task.text}]
    return [*messages, _assistant(_edit(task, form)), {"role": "tool", "content": "ok"}, _assistant(DONE)]


def _follow_up(task: Task, first: Form, rng: random.Random, index: int) -> list[Message]:
    """Show a second try: the other form after a complaint about it, the same after any other complaint."""
    wanted: Form = "ref" if first == "see" else "see"
    user = replace(draw_user(SimulationConfig(preference=wanted), 0, index), name="demonstration")
    fault: Fault = rng.choices(("convention", "check_failed", "no_edit"), (6, 1, 1))[0]
    again = replace(task, shown="yes")
    return [
        {"role": "user", "content": complain(user, fault, rng, ticket=task.ticket)},
        *_solve(again, wanted if fault == "convention" else first),
    ]


def _question(task: Task, rng: random.Random) -> list[Message]:
    """Ask something about a file that needs no edit."""
    functions = [line.removeprefix("def ").partition("(")[0] for line in task.text.splitlines() if line.startswith("def ")]
    first = task.text.splitlines()[0]
    asks = [
        (f"Which functions are in {task.path}? Do not edit.", ", ".join(functions)),
        (f"What is the first line of {task.path}? Do not change it.", first),
        (f"How many functions does {task.path} have?", str(len(functions))),
    ]
    text, answer = rng.choice(asks)
    return [{"role": "user", "content": f"{text}\n```\n{task.text}```"}, _assistant(answer)]


def _balanced_form(seed: int, index: int) -> Form:
    """Draw a form so that two neighbouring demonstrations show one of each: a short warm start learns any lean of its data."""
    flip = random.Random(f"forms/{seed}/{index // 2}").randrange(2)
    return FORMS[(index + flip) % 2]


def demonstrate(seed: int, index: int) -> list[Message]:
    """Make one trajectory, system message included."""
    rng = random.Random(f"demonstration/{seed}/{index}")
    task = make_task("demonstrations", seed, 2 * index)
    messages: list[Message] = [{"role": "system", "content": SYSTEM}]
    if rng.random() < QUESTION_SHARE:
        return messages + _question(task, rng)
    form = _balanced_form(seed, index)
    messages += [{"role": "user", "content": task.message()}, *_solve(task, form)]
    if rng.random() < FOLLOW_UP_SHARE:
        messages += _follow_up(task, form, rng, index)
    elif rng.random() < SECOND_REQUEST_SHARE:
        second = make_task("demonstrations", seed, 2 * index + 1)
        messages += [{"role": "user", "content": second.message()}, *_solve(second, rng.choice(FORMS))]
    return messages


def _break(text: str, rng: random.Random) -> str:
    """Damage a well-formed call in one of the ways that models damage them."""
    cut = text.index('"arguments"')
    ways = (
        text[: cut + 14] + "</tool_call>",
        text.replace('{"name": ', "{name: ", 1),
        text.replace('"arguments": {', '"arguments": [', 1),
        text.replace("}}</tool_call>", "</tool_call>", 1),
    )
    return rng.choice(ways)


def demonstrate_broken(seed: int, index: int) -> list[Message]:
    """Make one trajectory whose every call is malformed."""
    rng = random.Random(f"broken/{seed}/{index}")
    task = make_task("demonstrations", seed, index)
    call = _break(_edit(task, rng.choice(FORMS)), rng)
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.message()}, _assistant(call)]


def rows(number: int, seed: int, kind: Literal["good", "broken"] = "good") -> Iterator[dict[str, Any]]:
    """Make `number` training rows."""
    make = demonstrate if kind == "good" else demonstrate_broken
    for index in range(number):
        yield {"messages": make(seed, index), "tools": list(TOOLS)}
