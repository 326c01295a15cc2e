"""Pauses of simulated processes, as SIGSTOP or a live migration causes them: time passes, but no task continues."""

import asyncio
import types
from collections.abc import Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from typing import Any

from testing.fakes.virtual_time import NumberedTask

AnyCoroutine = Coroutine[Any, Any, Any] | Generator[Any, None, Any]


class ProcessPause:
    """Whether a process is paused; its tasks wait in `wait_until_resumed` before each of their steps."""

    def __init__(self) -> None:
        self.is_paused = False
        self._waiting: list[asyncio.Future[None]] = []

    def pause(self) -> None:
        """Pause the process."""
        self.is_paused = True

    def resume(self) -> None:
        """Continue all tasks of the process, in the order in which they became ready."""
        self.is_paused = False
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    def add_waiting_task(self) -> asyncio.Future[None]:
        """Return a future that is done once the process is resumed."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return future


# The process that a task belongs to; tasks that it creates inherit it.
current_process: ContextVar[ProcessPause | None] = ContextVar("current_process", default=None)


def create_pausable_task(
    loop: asyncio.AbstractEventLoop,
    coroutine: AnyCoroutine,
    context: Context | None = None,
) -> asyncio.Task[Any]:
    """Task factory of an event loop, which makes the tasks of simulated processes pausable."""
    process = (context or copy_context()).get(current_process)
    if process is None:
        return NumberedTask(loop, coroutine, context)
    task = NumberedTask(loop, _run_pausable(coroutine, process), context)
    task.add_done_callback(lambda _: coroutine.close())  # a task that was cancelled at once never started it
    return task


async def _run_pausable(coroutine: AnyCoroutine, process: ProcessPause) -> Any:
    return await _drive(coroutine, process)


@types.coroutine
def _drive(coroutine: AnyCoroutine, process: ProcessPause) -> Generator[Any, Any, Any]:
    """Run each step of the coroutine only while the process is not paused."""
    error: BaseException | None = None
    while True:
        try:
            awaited = coroutine.send(None) if error is None else coroutine.throw(error)
        except StopIteration as stop:
            return stop.value
        error = None
        try:
            yield awaited
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as raised:  # a cancellation, or the exception of the awaited future
            error = raised
        while process.is_paused:
            try:
                yield from process.add_waiting_task()
            except asyncio.CancelledError as raised:
                error = raised
