"""Synchronous client for FineTuneJobs, for scripts and notebooks."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping
from concurrent.futures import wait
from pathlib import Path
from typing import Any, Self, TypeVar

from finetune_client.async_client import DEFAULT_MACHINES, NO_FIELDS, AsyncClient, WaitTarget
from finetune_client.doctor import OPERATOR_NAMESPACE, ClusterCheck
from finetune_client.job import Job
from finetune_client.job_builder import DEFAULT_METHOD, Fields, Machines
from finetune_client.job_events import JobEvent
from finetune_client.job_logs import LogLine, LogSelection
from finetune_client.notebook import show_jobs
from finetune_client.output_files import DEFAULT_LIMITS, RESULT
from finetune_client.rank_status import NodeRanks
from finetune_client.tar_archive import CopyLimits
from finetune_operator.observation.ownership import RawBody

SIGNAL_POLL_SECONDS = 1.0
CLEAN_UP_SECONDS = 40.0  # time limit for the deletion of temporary objects after an interrupt

T = TypeVar("T")


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

    def get(self, name: str) -> Job:
        """Return a job. Raises ClientError with status 404 if it does not exist."""
        return self._run(self._client.get(name))

    def find(self, name: str) -> Job | None:
        """Return a job, or None if it does not exist."""
        return self._run(self._client.find(name))

    def list(self, *, all_namespaces: bool = False, selector: str = "") -> tuple[Job, ...]:
        """Return the jobs with these labels, oldest first."""
        return self._run(self._client.list(all_namespaces=all_namespaces, selector=selector))

    def submit(self, manifest: RawBody, *, dry_run: bool = False) -> Job:
        """Create a job from its manifest. dry_run: validate it by the API server, without creating it."""
        return self._run(self._client.submit(manifest, dry_run=dry_run))

    def train(  # noqa: PLR0913  each part of a job is an argument
        self,
        name: str,
        *,
        model: str | Fields,
        dataset: str | Fields,
        output: str | Fields,
        method: str | Fields = DEFAULT_METHOD,
        lora: Fields | None = None,
        training: Fields = NO_FIELDS,
        machines: Machines = DEFAULT_MACHINES,
    ) -> Job:
        """Create a job that the operator's trainer runs.

        A string stands for the name of the model, of the only source of training rows, or of the claim for the output.
        method: sft or dpo, or a mapping from one of these to its fields. lora: fields of lora, {} for the defaults;
        None trains all weights. training: fields of training. Fields are in snake_case or camelCase.
        """
        return self._run(
            self._client.train(
                name,
                model=model,
                dataset=dataset,
                output=output,
                method=method,
                lora=lora,
                training=training,
                machines=machines,
            )
        )

    def run_function(
        self,
        name: str,
        function: Callable[..., object],
        *,
        image: str,
        arguments: Mapping[str, Any] | None = None,
        machines: Machines = DEFAULT_MACHINES,
    ) -> Job:
        """Create a job that calls a Python function on every rank, in an image with the packages that it imports."""
        coroutine = self._client.run_function(name, function, image=image, arguments=arguments, machines=machines)
        return self._run(coroutine)

    def suspend(self, name: str) -> Job:
        """Save a checkpoint and release all pods of a job."""
        return self._run(self._client.suspend(name))

    def resume(self, name: str) -> Job:
        """Continue a suspended job from its last checkpoint."""
        return self._run(self._client.resume(name))

    def cancel(self, name: str) -> Job:
        """End a job for good: save a checkpoint, delete its pods and let it fail; its record and output are kept."""
        return self._run(self._client.cancel(name))

    def delete(self, name: str) -> None:
        """Delete a job and its pods; its output is kept."""
        self._run(self._client.delete(name))

    def watch(self, name: str) -> Iterator[Job]:
        """Yield a job now and after each change, until it has finished."""
        return self._iterate(self._client.watch(name))

    def show(self, name: str) -> Job:
        """Show a job in a notebook until it ends, with a progress bar and the curve of its loss, and return it."""
        return show_jobs(self.watch(name))

    def wait(self, name: str, target: WaitTarget = WaitTarget.FINISHED, *, timeout_seconds: float | None = None) -> Job:
        """Return the job once it has reached the target or has ended. Raises WaitTimeout if that takes too long."""
        return self._run(self._client.wait(name, target, timeout_seconds=timeout_seconds))

    def get_result(self, name: str, *, timeout_seconds: float | None = None) -> Job:
        """Wait for the end of a job and return it. Raises JobFailed if it has failed."""
        return self._run(self._client.get_result(name, timeout_seconds=timeout_seconds))

    def list_events(self, name: str) -> tuple[JobEvent, ...]:
        """Return the events about a job and its pods, oldest first."""
        return self._run(self._client.list_events(name))

    def read_logs(self, name: str, selection: LogSelection | None = None) -> Generator[LogLine, None, None]:
        """Yield log lines of the selected nodes; by default those of node 0 in the current attempt."""
        return self._iterate(self._client.read_logs(name, selection or LogSelection()))

    def list_ranks(self, name: str) -> tuple[NodeRanks, ...]:
        """Return memory and step time of each rank of the current attempt."""
        return self._run(self._client.list_ranks(name))

    def read_output_file(self, name: str, path: str) -> Generator[bytes, None, None]:
        """Yield the content of a file of a job's output, such as result/report.html.

        Close the generator if its content is not read to the end: a pod may have been created that reads the file.
        """
        return self._iterate(self._client.read_output_file(name, path))

    def download(
        self, name: str, destination: Path, *, path: str = RESULT, limits: CopyLimits = DEFAULT_LIMITS
    ) -> Path:
        """Copy a file or folder of a job's output to `destination`, which must not exist, and return it."""
        return self._run(self._client.download(name, destination, path=path, limits=limits))

    def examine_cluster(self, *, operator_namespace: str = OPERATOR_NAMESPACE) -> tuple[ClusterCheck, ...]:
        """Check the cluster, the operator, the rights of the user, storage and devices; nothing is changed."""
        return self._run(self._client.examine_cluster(operator_namespace=operator_namespace))

    def read_default_image(self, *, operator_namespace: str = OPERATOR_NAMESPACE) -> str:
        """Return the image that the operator in a namespace uses for jobs without spec.image."""
        return self._run(self._client.read_default_image(operator_namespace=operator_namespace))

    def check_pods(self, manifest: RawBody, *, timeout_seconds: float = 300.0) -> tuple[ClusterCheck, ...]:
        """Check image, DNS and network with pods like those of a job that has not been created, and delete them."""
        return self._run(self._client.check_pods(manifest, timeout_seconds=timeout_seconds))

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
