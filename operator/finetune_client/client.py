"""Synchronous client for FineTuneJobs, for scripts and notebooks."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from concurrent.futures import wait
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from finetune_client.async_client import AsyncClient
from finetune_client.job import Job
from finetune_client.notebook import show_jobs

SIGNAL_POLL_SECONDS = 1.0
CLEAN_UP_SECONDS = 40.0  # time limit for the deletion of temporary objects after an interrupt

P = ParamSpec("P")
T = TypeVar("T")


def _block(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Client", P], T]:
    """Return a method of AsyncClient as one that blocks, with the same arguments and docstring."""

    @wraps(method)
    def call(self: "Client", /, *arguments: P.args, **options: P.kwargs) -> T:
        return self._run(method(self._client, *arguments, **options))

    return call


def _block_iterator(
    method: Callable[Concatenate[AsyncClient, P], AsyncIterator[T]],
) -> Callable[Concatenate["Client", P], Generator[T, None, None]]:
    """Return a method of AsyncClient as one that returns a generator, with the same arguments and docstring."""

    @wraps(method)
    def call(self: "Client", /, *arguments: P.args, **options: P.kwargs) -> Generator[T, None, None]:
        return self._iterate(method(self._client, *arguments, **options))

    return call


class Client:
    """Submits, reads and controls the jobs of one namespace; a context manager.

    It runs an AsyncClient in an event loop of its own thread, so that it also works in a notebook, whose thread has a
    running event loop. namespace, context, kubeconfig: as for kubectl.
    """

    def __init__(
        self, *, namespace: str | None = None, context: str | None = None, kubeconfig: str | None = None
    ) -> None:
        self._client = AsyncClient(namespace=namespace, context=context, kubeconfig=kubeconfig)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="finetune-client", daemon=True)
        self._thread.start()
        try:
            self._run(self._client.__aenter__())
        except BaseException:
            self._stop_loop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; the client cannot be used afterwards."""
        if self._thread.is_alive():
            self._run(_wait_for_other_tasks())  # such as the clean-up of a generator that was not read to its end
            self._run(self._client.__aexit__())
            self._stop_loop()

    @property
    def namespace(self) -> str:
        """Namespace whose jobs the client reads."""
        return self._client.namespace

    get = _block(AsyncClient.get)
    find = _block(AsyncClient.find)
    list = _block(AsyncClient.list)
    submit = _block(AsyncClient.submit)
    train = _block(AsyncClient.train)
    run_function = _block(AsyncClient.run_function)
    suspend = _block(AsyncClient.suspend)
    resume = _block(AsyncClient.resume)
    cancel = _block(AsyncClient.cancel)
    delete = _block(AsyncClient.delete)
    watch = _block_iterator(AsyncClient.watch)
    wait = _block(AsyncClient.wait)
    get_result = _block(AsyncClient.get_result)
    list_events = _block(AsyncClient.list_events)
    read_logs = _block_iterator(AsyncClient.read_logs)
    list_ranks = _block(AsyncClient.list_ranks)
    read_output_file = _block_iterator(AsyncClient.read_output_file)
    download = _block(AsyncClient.download)
    examine_cluster = _block(AsyncClient.examine_cluster)
    read_default_image = _block(AsyncClient.read_default_image)
    check_pods = _block(AsyncClient.check_pods)

    def show(self, name: str) -> Job:
        """Show a job in a notebook until it ends, with a progress bar and the curve of its loss, and return it."""
        return show_jobs(self.watch(name))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread of the event loop.

        An interrupt cancels it, and is raised after it has deleted its temporary objects.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            # Python runs the handler of a signal that arrives just before a wait only after that wait.
            while not wait([future], timeout=SIGNAL_POLL_SECONDS).done:
                pass
            return future.result()
        except BaseException:
            if future.cancel():
                asyncio.run_coroutine_threadsafe(_wait_for_other_tasks(), self._loop).result()
            raise

    def _iterate(self, items: AsyncIterator[T]) -> Generator[T, None, None]:
        async def get_next() -> tuple[bool, T | None]:
            try:
                return True, await anext(items)
            except StopAsyncIteration:
                return False, None

        async def close() -> None:
            await items.aclose()  # type: ignore[attr-defined]  # all iterators of AsyncClient are generators

        try:
            while True:
                has_item, item = self._run(get_next())
                if not has_item:
                    return
                yield item  # type: ignore[misc]  # None only without an item
        finally:
            self._run(close())

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _wait_for_other_tasks() -> None:
    """Wait until all other tasks of the event loop have ended, or CLEAN_UP_SECONDS have passed."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        await asyncio.wait(tasks, timeout=CLEAN_UP_SECONDS)
