"""Asynchronous client for FineTuneJobs in a Kubernetes cluster."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from finetune_api.v1alpha1.job import GROUP, KIND, PLURAL
from finetune_api.v1alpha1.status import Phase
from finetune_client.connection import ClusterConnection, ClusterTarget
from finetune_client.dns_label import check_dns_label
from finetune_client.doctor import OPERATOR_NAMESPACE, ClusterCheck, examine_cluster, read_default_image
from finetune_client.errors import ClientError, JobFailed, WaitTimeout
from finetune_client.job import Job
from finetune_client.job_builder import DEFAULT_METHOD, Fields, Machines, Recipe, build_function_job, build_training_job
from finetune_client.job_events import JobEvent, select_events
from finetune_client.job_logs import MAX_NODES, LogLine, LogReader, LogSelection, choose_attempt
from finetune_client.manifest import parse_manifest
from finetune_client.output_files import DEFAULT_LIMITS, RESULT, download_output, read_output_file
from finetune_client.pod_check import check_pods
from finetune_client.rank_status import NodeRanks, read_ranks
from finetune_client.tar_archive import CopyLimits
from finetune_operator.kube.api_paths import ApiPath, collection_path, object_path
from finetune_operator.names import API_VERSION
from finetune_operator.observation.ownership import RawBody

POLL_SECONDS = 2.0  # the operator updates the progress every ten seconds
OUTAGE_SECONDS = 120.0  # how long the API server may be unavailable while a job is watched
DEFAULT_MACHINES = Machines()
NO_FIELDS: Fields = {}
NODE_ZERO = LogSelection()
RESOURCE = f"{PLURAL}.{GROUP}"


class WaitTarget(StrEnum):
    """What `wait` waits for; a job that ends before it reaches the target ends the wait."""

    RUNNING = "running"  # all nodes run
    TRAINING = "training"  # the first optimizer step is done
    SUSPENDED = "suspended"
    COMPLETE = "complete"
    FINISHED = "finished"  # Complete or Failed

    def is_reached(self, job: Job) -> bool:
        """Return whether the job has reached the target."""
        reached: dict[WaitTarget, Callable[[], bool]] = {
            WaitTarget.RUNNING: lambda: job.phase == Phase.RUNNING,
            WaitTarget.TRAINING: lambda: job.status.progress is not None and (job.status.progress.step or 0) > 0,
            WaitTarget.SUSPENDED: lambda: job.phase == Phase.SUSPENDED,
            WaitTarget.COMPLETE: lambda: job.phase == Phase.COMPLETE,
            WaitTarget.FINISHED: lambda: job.is_finished,
        }
        return reached[self]()


class AsyncClient:
    """Submits, reads and controls the jobs of one namespace; an asynchronous context manager.

    namespace, context, kubeconfig: as for kubectl; inside a pod, its service account is used if none is given.
    expected (of methods that change a job): the job as it was read; another version is not changed (status 409).
    """

    def __init__(
        self, *, namespace: str | None = None, context: str | None = None, kubeconfig: str | None = None
    ) -> None:
        self._connection = ClusterConnection(ClusterTarget(namespace, context, kubeconfig))

    async def __aenter__(self) -> Self:
        await self._connection.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._connection.__aexit__(*error)

    @property
    def namespace(self) -> str:
        """Namespace whose jobs the client reads."""
        return self._connection.namespace

    async def get(self, name: str) -> Job:
        """Return the job with this name.

        Raises:
            ClientError: The job does not exist (status 404), or cannot be read.
        """
        return Job.parse(await self._connection.get(self._path(name), what=self._describe(name)))

    async def find(self, name: str) -> Job | None:
        """Return a job, or None if it does not exist."""
        try:
            return await self.get(name)
        except ClientError as error:
            if error.status == 404:
                return None
            raise

    async def list(self, *, all_namespaces: bool = False, selector: str = "") -> tuple[Job, ...]:
        """Return the jobs with these labels, oldest first."""
        path = collection_path(KIND, None if all_namespaces else self.namespace)
        where = "all namespaces" if all_namespaces else f"namespace {self.namespace}"
        bodies = await self._connection.list_items(path, what=f"{RESOURCE} of {where}", selector=selector)
        jobs = [Job.parse({**body, "apiVersion": API_VERSION, "kind": KIND}) for body in bodies]
        return tuple(sorted(jobs, key=lambda job: (str(job.metadata.creation_timestamp), job.namespace, job.name)))

    async def submit(self, manifest: RawBody, *, dry_run: bool = False, expected: Job | None = None) -> Job:
        """Create a job from its manifest. dry_run: validate it by the API server, without creating it.

        An unfinished job with the same name is changed, as far as the API allows it.

        Raises:
            ClientError: The API server rejects the manifest, or a finished job has the same name.
        """
        name = manifest["metadata"]["name"]
        existing = expected or await self.find(name)
        if existing is not None and existing.is_finished:
            raise ClientError(
                f"{self._describe(name)} has ended ({existing.phase}); delete it, or choose another metadata.name",
                status=409,
            )
        metadata = {**manifest["metadata"], **_require(expected), "namespace": self.namespace}
        body = await self._connection.apply(
            self._path(name), {**manifest, "metadata": metadata}, what=self._describe(name), dry_run=dry_run
        )
        return Job.parse(body)

    async def train(  # noqa: PLR0913  each part of a job is an argument
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

        Raises:
            InvalidManifest: A field is unknown, missing or invalid.
            ClientError: The API server rejects the job.
        """
        return await self.submit(
            build_training_job(name, Recipe(model, dataset, output, method, lora, training), machines)
        )

    async def run_function(
        self,
        name: str,
        function: Callable[..., object],
        *,
        image: str,
        arguments: Mapping[str, Any] | None = None,
        machines: Machines = DEFAULT_MACHINES,
    ) -> Job:
        """Create a job that calls a Python function on every rank, in an image with the packages that it imports.

        Raises:
            ClientError: The source of the function is not available, or the API server rejects the job.
        """
        manifest, config_map = build_function_job(name, function, arguments or {}, image=image, machines=machines)
        job = await self.submit(manifest | {"spec": {**manifest["spec"], "suspend": True}})
        owner = {"apiVersion": job.body["apiVersion"], "kind": KIND, "name": name, "uid": job.metadata.uid}
        metadata = {**config_map["metadata"], "namespace": self.namespace, "ownerReferences": [owner]}
        path = object_path("ConfigMap", self.namespace, metadata["name"])
        what = f"configmap {self.namespace}/{metadata['name']}"
        await self._connection.apply(path, {**config_map, "metadata": metadata}, what=what)
        return await self.resume(name)

    async def suspend(self, name: str, *, expected: Job | None = None) -> Job:
        """Save a checkpoint and release all pods of a job."""
        return await self._edit_unfinished(name, "suspended", {"suspend": True}, expected)

    async def resume(self, name: str, *, expected: Job | None = None) -> Job:
        """Continue a suspended job from its last checkpoint."""
        return await self._edit_unfinished(name, "resumed", {"suspend": False}, expected)

    async def cancel(self, name: str, *, expected: Job | None = None) -> Job:
        """End a job for good: save a checkpoint, delete its pods and let it fail; its record and output are kept."""
        return await self._edit_unfinished(name, "cancelled", {"cancel": True}, expected)

    async def delete(self, name: str, *, expected: Job | None = None) -> None:
        """Delete a job and its pods, only if it has the uid of the expected one; its output is kept."""
        uid = expected.metadata.uid if expected is not None else None
        await self._connection.delete(self._path(name), what=self._describe(name), uid=uid)

    async def watch(self, name: str) -> AsyncIterator[Job]:
        """Yield a job now and after each change, until it has finished.

        The job is polled, so that a lost connection is noticed; an outage of up to OUTAGE_SECONDS is tolerated.
        """
        self._path(name)  # an invalid name is no outage
        last_version, outage_began = "", None
        while True:
            try:
                job = await self.get(name)
                outage_began = None
            except ClientError as error:
                now = time.monotonic()
                outage_began = outage_began or now
                if not _is_outage(error) or now - outage_began > OUTAGE_SECONDS:
                    raise
            else:
                if job.metadata.resource_version != last_version:
                    last_version = job.metadata.resource_version
                    yield job
                if job.is_finished:
                    return
            await asyncio.sleep(POLL_SECONDS)

    async def wait(
        self, name: str, target: WaitTarget = WaitTarget.FINISHED, *, timeout_seconds: float | None = None
    ) -> Job:
        """Return the job once it has reached the target or has ended.

        Raises:
            WaitTimeout: It did not do so in time.
        """
        job: Job | None = None
        try:
            async with asyncio.timeout(timeout_seconds):
                async for job in self.watch(name):
                    if target.is_reached(job) or job.is_finished:
                        return job
        except TimeoutError:
            phase = job.phase if job is not None else None
            raise WaitTimeout(
                f"{self._describe(name)} is not {target} after {timeout_seconds:g} s; its phase is {phase or 'unknown'}"
            ) from None
        raise AssertionError("a watch ends with a finished job")

    async def get_result(self, name: str, *, timeout_seconds: float | None = None) -> Job:
        """Wait for the end of a job and return it.

        Raises:
            JobFailed: The job has failed.
            WaitTimeout: It did not end in time.
        """
        job = await self.wait(name, timeout_seconds=timeout_seconds)
        if job.failure is not None:
            raise JobFailed(f"{job.name}: {job.failure.reason}: {job.failure.message}")
        return job

    async def list_events(self, name: str) -> tuple[JobEvent, ...]:
        """Return the events about a job and its pods, oldest first; the API server keeps them for an hour."""
        job = await self.get(name)
        path = collection_path("Event", self.namespace)
        bodies = await self._connection.list_items(path, what=f"events of {self._describe(name)}")
        return select_events(job, bodies)

    def read_logs(self, name: str, selection: LogSelection = NODE_ZERO) -> AsyncIterator[LogLine]:
        """Yield log lines of the selected nodes; by default those of node 0 in the current attempt."""
        return LogReader(self._connection, lambda: self.get(name)).read(selection)

    async def list_ranks(self, name: str) -> tuple[NodeRanks, ...]:
        """Return memory and step time of each rank of the current attempt, for at most MAX_NODES nodes.

        Raises:
            ClientError: No attempt has started.
        """
        job = await self.get(name)
        choose_attempt(job, NODE_ZERO)
        return await read_ranks(self._connection, job, range(min(job.spec.num_nodes, MAX_NODES)))

    async def read_output_file(self, name: str, path: str) -> AsyncIterator[bytes]:
        """Yield the content of a file of a job's output, such as result/report.html.

        Close the generator if its content is not read to the end: a pod may have been created that reads the file.
        """
        async with aclosing(read_output_file(self._connection, await self.get(name), path)) as chunks:
            async for chunk in chunks:  # closed explicitly, so that its pod is deleted before the client is closed
                yield chunk

    async def download(
        self, name: str, destination: Path, *, path: str = RESULT, limits: CopyLimits = DEFAULT_LIMITS
    ) -> Path:
        """Copy a file or folder of a job's output to `destination`, which must not exist, and return it.

        If no pod of the job runs, a restricted pod is created that reads the output, and deleted afterwards.
        """
        return await download_output(self._connection, await self.get(name), path, destination, limits)

    async def examine_cluster(self, *, operator_namespace: str = OPERATOR_NAMESPACE) -> tuple[ClusterCheck, ...]:
        """Check the cluster, the operator, the rights of the user, storage and devices; nothing is changed."""
        return await examine_cluster(self._connection, operator_namespace)

    async def read_default_image(self, *, operator_namespace: str = OPERATOR_NAMESPACE) -> str:
        """Return the image that the operator in a namespace uses for jobs without spec.image.

        Raises:
            ClientError: The user may not read the operator's pod, or there is none.
        """
        return await read_default_image(self._connection, operator_namespace)

    async def check_pods(self, manifest: RawBody, *, timeout_seconds: float = 300.0) -> tuple[ClusterCheck, ...]:
        """Check image, DNS and network with pods like those of a job that has not been created, and delete them.

        Without spec.image, the pods have the default of the operator in OPERATOR_NAMESPACE. timeout_seconds: time for
        the pods to start.

        Raises:
            InvalidManifest: A field of the job is unknown, missing or invalid.
            ClientError: The pods cannot be created, or their logs cannot be read.
        """
        metadata = {**manifest["metadata"], "namespace": self.namespace}
        job = parse_manifest({**manifest, "metadata": metadata})
        return await check_pods(self._connection, job, timeout_seconds=timeout_seconds)

    async def _edit_unfinished(self, name: str, participle: str, spec: Mapping[str, bool], expected: Job | None) -> Job:
        """Change fields of the spec. Raises ClientError with the participle of the change if the job has ended."""
        job = expected or await self.get(name)
        if job.is_finished:
            raise ClientError(f"{self._describe(name)} has ended ({job.phase}) and cannot be {participle}", status=409)
        body = {"metadata": {"uid": job.metadata.uid, **_require(expected)}, "spec": dict(spec)}
        return Job.parse(await self._connection.patch(self._path(name), body, what=self._describe(name)))

    def _path(self, name: str) -> ApiPath:
        """Return the path of a job. Raises ClientError for a name that no job can have."""
        check_dns_label(name, what="job")
        return object_path(KIND, self.namespace, name)

    def _describe(self, name: str) -> str:
        return f"{RESOURCE} {self.namespace}/{name}"


def _require(expected: Job | None) -> dict[str, str]:
    """Return the metadata with which the API server rejects a change of another version of the job."""
    if expected is None:
        return {}
    return {"uid": expected.metadata.uid, "resourceVersion": expected.metadata.resource_version}


def _is_outage(error: ClientError) -> bool:
    """Return whether a request may succeed later without a change."""
    return error.status is None or error.status == 429 or error.status >= 500
