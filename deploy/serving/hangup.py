"""Notice that a client hung up while its answer is being made, so that nobody computes for nobody.

Takes: a request whose body was read, and a task. Gives: the result, or None after a hang-up. Leaves out: what to do then.
"""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

from starlette.requests import Request

Result = TypeVar("Result")


async def unless_hung_up(request: Request, work: Awaitable[Result]) -> Result | None:
    """Wait for `work`; when the client hangs up first, cancel it and return None."""
    answer = asyncio.ensure_future(work)

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.create_task(hung_up())
    try:
        await asyncio.wait({answer, watch}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        return None
    finally:
        for task in (answer, watch):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
