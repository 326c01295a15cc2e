"""Logs of a job's pods: of one or several nodes, merged, and across restarts of the job."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass

from finetune_client.connection import ClusterConnection
from finetune_client.errors import ClientError
from finetune_client.job import Job
from finetune_operator import names
from finetune_operator.kube.api_paths import object_path

POLL_SECONDS = 2.0
MAX_NODES = 64  # each node needs a connection
QUEUED_LINES = 1000
RANK_PREFIX = re.compile(r"\[rank(\d+)\]:")  # torch writes it in front of tracebacks and warnings
NOT_STARTED = (400, 404)  # the container waits to start; the pod does not exist


@dataclass(frozen=True)
class LogSelection:
    """Which log lines to read.

    nodes: node ranks; None means all. rank: read its node instead, without the lines that torch marks with another
    rank; the ranks of a node share its log. attempt: None means the current one; with follow, also all later ones.
    """

    nodes: tuple[int, ...] | None = (0,)
    rank: int | None = None
    attempt: int | None = None
    follow: bool = False
    tail_lines: int | None = None
    since_seconds: int | None = None

    def includes(self, text: str) -> bool:
        """Return whether a line of a selected node is not marked as one of another rank."""
        prefix = RANK_PREFIX.match(text) if self.rank is not None else None
        return prefix is None or int(prefix.group(1)) == self.rank


@dataclass(frozen=True)
class LogLine:
    """A line of the log of one node; `time` is the timestamp of the kubelet in RFC 3339."""

    attempt: int
    node_rank: int
    time: str
    text: str


class LogReader:
    """Reads the logs of one job. `get_job` returns its newest state."""

    def __init__(self, connection: ClusterConnection, get_job: Callable[[], Awaitable[Job]]) -> None:
        self._connection = connection
        self._get_job = get_job

    async def read(self, selection: LogSelection) -> AsyncIterator[LogLine]:
        """Yield the lines of the selected nodes; with follow, until the job ends or is suspended.

        Raises:
            ClientError: There is no such node or attempt, or a log cannot be read.
        """
        job = await self._get_job()
        nodes = choose_nodes(job, selection)
        if selection.attempt is not None or not selection.follow:
            attempt = choose_attempt(job, selection)
            async for line in self._read_attempt(job, attempt, nodes, selection):
                yield line
            return
        last_attempt = -1
        while True:
            if job.status.attempt is not None and job.status.attempt > last_attempt:
                last_attempt = job.status.attempt
                async for line in self._read_attempt(job, last_attempt, nodes, selection):
                    yield line
            elif job.is_finished or (job.status.suspend_time is not None and last_attempt >= 0):
                return
            else:
                await asyncio.sleep(POLL_SECONDS)
            job = await self._get_job()

    async def _read_attempt(
        self, job: Job, attempt: int, nodes: Iterable[int], selection: LogSelection
    ) -> AsyncIterator[LogLine]:
        """Yield the lines of all nodes in the order of their arrival."""
        lines: asyncio.Queue[LogLine | None] = asyncio.Queue(QUEUED_LINES)

        async def read_node(node_rank: int) -> None:
            try:
                async for line in self._read_node(job, attempt, node_rank, selection):
                    await lines.put(line)
            finally:
                task = asyncio.current_task()
                if task is not None and not task.cancelling():  # after a cancellation, nobody empties a full queue
                    await lines.put(None)

        tasks = [asyncio.create_task(read_node(node_rank)) for node_rank in nodes]
        try:
            open_streams = len(tasks)
            while open_streams:
                line = await lines.get()
                if line is None:
                    open_streams -= 1
                else:
                    yield line
            await asyncio.gather(*tasks)  # raises the first error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_node(
        self, job: Job, attempt: int, node_rank: int, selection: LogSelection
    ) -> AsyncIterator[LogLine]:
        """Yield the lines of one node. With follow, wait for its container, and reconnect after a lost connection."""
        pod = names.pod_name(job.name, attempt, node_rank)
        path = object_path("Pod", job.namespace, pod, "log")
        what = f"log of pod {job.namespace}/{pod}"
        last_time = ""
        while True:
            params = _build_params(selection, last_time)
            is_repeated = bool(last_time)
            try:
                async for raw_line in self._connection.stream_lines(path, what=what, params=params):
                    time, _, text = raw_line.decode(errors="replace").partition(" ")
                    is_repeated = is_repeated and time <= last_time
                    if not is_repeated:
                        last_time = time
                        if selection.includes(text):
                            yield LogLine(attempt, node_rank, time, text)
            except ClientError as error:
                if error.status == 404 and not selection.follow:
                    raise ClientError(
                        f"{what}: the pod does not exist (any more); --saved reads its log in the output", status=404
                    ) from error
                if not selection.follow or (error.status is not None and error.status not in NOT_STARTED):
                    raise
            if not selection.follow or not await self._may_continue(pod, attempt):
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _may_continue(self, pod: str, attempt: int) -> bool:
        """Return whether the pod may still write log lines, or its container is not running yet."""
        job = await self._get_job()
        if job.is_finished or job.status.attempt != attempt or job.status.suspend_time is not None:
            return False
        try:
            body = await self._connection.get(object_path("Pod", job.namespace, pod), what=f"pod {pod}")
        except ClientError as error:
            return error.status in (None, 404)  # not created yet, as the job is still in this attempt
        return (body.get("status") or {}).get("phase") not in ("Succeeded", "Failed")


def choose_attempt(job: Job, selection: LogSelection) -> int:
    """Return the attempt to read. Raises ClientError if the job has not started, or has no such attempt."""
    current = job.status.attempt
    if current is None:
        raise ClientError(f"{job.name}: no attempt has started ({job.phase or 'not processed by the operator yet'})")
    if selection.attempt is not None and selection.attempt > current:
        raise ClientError(f"{job.name}: there is no attempt {selection.attempt}; the current one is {current}")
    return current if selection.attempt is None else selection.attempt


def choose_nodes(job: Job, selection: LogSelection) -> tuple[int, ...]:
    """Return the node ranks to read. Raises ClientError if a node or rank does not exist, or if they are too many."""
    num_nodes = job.spec.num_nodes
    if selection.rank is not None:
        if selection.rank >= job.spec.world_size:
            raise ClientError(f"{job.name} has no rank {selection.rank}; its ranks are 0 to {job.spec.world_size - 1}")
        return (selection.rank // job.spec.ranks_per_node,)
    nodes = tuple(range(num_nodes)) if selection.nodes is None else selection.nodes
    if missing := [rank for rank in nodes if rank >= num_nodes]:
        raise ClientError(f"{job.name} has no node {missing[0]}; its nodes are 0 to {num_nodes - 1}")
    if len(nodes) > MAX_NODES:
        raise ClientError(f"{len(nodes)} nodes are selected; at most {MAX_NODES} can be read at once, such as 0-63")
    return nodes


def _build_params(selection: LogSelection, last_time: str) -> dict[str, str]:
    params = {"container": names.CONTAINER, "timestamps": "true"}
    if selection.follow:
        params["follow"] = "true"
    if last_time:  # a reconnection: lines up to the last one are sent again and skipped
        return {**params, "sinceTime": last_time}
    if selection.tail_lines is not None:
        params["tailLines"] = str(selection.tail_lines)
    if selection.since_seconds is not None:
        params["sinceSeconds"] = str(selection.since_seconds)
    return params
