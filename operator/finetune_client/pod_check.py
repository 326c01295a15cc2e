"""Starts pods like those of a job, but without devices and data, and checks image, DNS and network."""

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_client.connection import ClusterConnection
from finetune_client.doctor import OPERATOR_NAMESPACE, CheckOutcome, ClusterCheck, read_default_image
from finetune_client.errors import ClientError
from finetune_client.pod_check_objects import CHECK_LABEL, build_check_objects
from finetune_client.temporary_object import find_wait, open_temporary_object
from finetune_operator.kube.api_paths import collection_path, object_path
from finetune_operator.observation.ownership import RawBody
from finetune_supervisor.contract import parse_json

IMAGE, DNS, NETWORK = "image", "DNS", "pod network"
NETWORK_SECONDS = 45.0  # time for the tests after all pods have started; a DNS cache may keep a negative response 30 s
POLL_SECONDS = 1.0
MAX_RESULT_BYTES = 8192


@dataclass(frozen=True)
class CheckPod:
    """State of a pod of the check.

    wait: why its container has not started, "" if it has. is_permanent: whether the container will not start.
    """

    name: str
    kubernetes_node: str
    wait: str
    is_permanent: bool


async def check_pods(
    connection: ClusterConnection, job: FineTuneJob, *, timeout_seconds: float
) -> tuple[ClusterCheck, ...]:
    """Start one pod, or two if the job has several nodes, return what they find, and delete them.

    They have the image, the placement and the labels of the job's pods. timeout_seconds: time for them to start.

    Raises:
        ClientError: The pods cannot be created, or their logs cannot be read.
    """
    image = job.spec.image or await read_default_image(connection, OPERATOR_NAMESPACE)
    service, first_pod, *other_pods = build_check_objects(job, image=image, suffix=secrets.token_hex(3))
    what = f"pod {connection.namespace}/{first_pod['metadata']['name']}"
    # The garbage collector deletes the other objects with their owner, the first pod.
    async with open_temporary_object(connection, first_pod, what=what) as owner:
        for manifest in (service, *other_pods):
            await _create_owned(connection, manifest, owner)
        pods = await _wait_for_start(connection, service["metadata"]["name"], 1 + len(other_pods), timeout_seconds)
        results = {} if any(pod.wait for pod in pods) else await _wait_for_results(connection, pods)
        return tuple(judge_pods(image, pods, results, num_nodes=job.spec.num_nodes))


async def _create_owned(connection: ClusterConnection, manifest: RawBody, owner: RawBody) -> None:
    """Create an object, which is deleted with its owner, a pod."""
    reference = {"apiVersion": "v1", "kind": "Pod", **{key: owner["metadata"][key] for key in ("name", "uid")}}
    metadata = {**manifest["metadata"], "ownerReferences": [reference]}
    kind, what = manifest["kind"], f"{manifest['kind'].lower()} {connection.namespace}/{metadata['name']}"
    path = collection_path(kind, connection.namespace)
    await connection.create(path, {**manifest, "metadata": metadata}, what=what)


async def _wait_for_start(
    connection: ClusterConnection, check: str, count: int, timeout_seconds: float
) -> tuple[CheckPod, ...]:
    """Return the pods once all have started, or one cannot start, or the time is over."""
    deadline = asyncio.get_running_loop().time() + timeout_seconds
    while True:
        pods = await _list_pods(connection, check)
        is_over = asyncio.get_running_loop().time() >= deadline
        is_decided = len(pods) == count and not any(pod.wait for pod in pods)
        if is_decided or is_over or any(pod.is_permanent for pod in pods):
            return pods
        await asyncio.sleep(POLL_SECONDS)


async def _list_pods(connection: ClusterConnection, check: str) -> tuple[CheckPod, ...]:
    path = collection_path("Pod", connection.namespace)
    bodies = await connection.list_items(path, what="pods of the check", selector=f"{CHECK_LABEL}={check}")
    return tuple(_parse_pod(body) for body in bodies)


def _parse_pod(body: RawBody) -> CheckPod:
    wait, is_permanent = find_wait(body.get("status") or {})
    return CheckPod(body["metadata"]["name"], body["spec"].get("nodeName") or "", wait, is_permanent)


async def _wait_for_results(connection: ClusterConnection, pods: tuple[CheckPod, ...]) -> dict[str, dict[str, str]]:
    """Return the errors of each pod by test, once all tests have succeeded or the time is over."""
    deadline = asyncio.get_running_loop().time() + NETWORK_SECONDS
    while True:
        results = {pod.name: await _read_result(connection, pod.name) for pod in pods}
        errors = {name: result for name, result in results.items() if result is not None}
        if len(errors) == len(pods) and not any(errors.values()):
            return errors
        if asyncio.get_running_loop().time() >= deadline:
            silent = [name for name in results if name not in errors]
            if silent:
                raise ClientError(f"pod {silent[0]} has printed no result in {NETWORK_SECONDS:g} s")
            return errors
        await asyncio.sleep(POLL_SECONDS)


async def _read_result(connection: ClusterConnection, pod: str) -> dict[str, str] | None:
    """Return the last result that the pod has printed, or None."""
    path = object_path("Pod", connection.namespace, pod, "log")
    params = {"tailLines": "1", "limitBytes": str(MAX_RESULT_BYTES)}
    async with aclosing(connection.stream_lines(path, what=f"log of pod {pod}", params=params)) as lines:
        async for line in lines:
            return _parse_result(pod, line.decode("utf-8", "replace"))
    return None


def _parse_result(pod: str, line: str) -> dict[str, str]:
    try:
        parsed = parse_json(line)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise ClientError(f"pod {pod}: the check has ended with: {line[:500]}")
    return {str(key): str(value) for key, value in parsed.items()}


def judge_pods(
    image: str, pods: tuple[CheckPod, ...], results: dict[str, dict[str, str]], *, num_nodes: int
) -> Iterator[ClusterCheck]:
    """Yield the checks of the image and, for a job with several nodes, of DNS and network.

    results: errors by pod name, and by port or "dns".
    """
    waits = [f"{pod.name} on {pod.kubernetes_node or 'no node'}: {pod.wait}" for pod in pods if pod.wait]
    if waits:
        yield ClusterCheck(IMAGE, CheckOutcome.FAILED, f"{image} does not start: {'; '.join(waits)}")
    else:
        nodes = sorted({pod.kubernetes_node for pod in pods})
        yield ClusterCheck(IMAGE, CheckOutcome.OK, f"{image} starts on {' and '.join(nodes)}")
    if num_nodes == 1:
        return
    if waits:
        yield from (_skip(title, "a pod has not started") for title in (DNS, NETWORK))
        return
    dns_errors = [
        f"{pod.name} on {pod.kubernetes_node}: {results[pod.name]['dns']}" for pod in pods if "dns" in results[pod.name]
    ]
    if dns_errors:
        remedy = "check the DNS of the cluster, and whether a NetworkPolicy blocks port 53"
        message = f"the name of the other pod does not resolve: {'; '.join(dns_errors)}; {remedy}"
        yield ClusterCheck(DNS, CheckOutcome.FAILED, message)
        yield _skip(NETWORK, "a name does not resolve")
        return
    yield ClusterCheck(DNS, CheckOutcome.OK, "the pods resolve each other's names")
    yield _judge_network(pods, results)


def _skip(title: str, reason: str) -> ClusterCheck:
    return ClusterCheck(title, CheckOutcome.UNKNOWN, f"not tested, because {reason}")


def _judge_network(pods: tuple[CheckPod, ...], results: dict[str, dict[str, str]]) -> ClusterCheck:
    one, other = pods
    errors = [
        f"{source.kubernetes_node} does not reach {target.kubernetes_node} on port {port}: {error}"
        for source, target in ((one, other), (other, one))
        for port, error in results[source.name].items()
    ]
    if errors:
        remedy = "allow all TCP ports between the pods of a job in NetworkPolicies and firewalls"
        return ClusterCheck(NETWORK, CheckOutcome.FAILED, f"{'; '.join(errors)}; {remedy}")
    if one.kubernetes_node == other.kubernetes_node:
        message = f"both pods run on {one.kubernetes_node}; the network between Kubernetes nodes was not tested"
        return ClusterCheck(NETWORK, CheckOutcome.WARNING, message)
    message = f"{one.kubernetes_node} and {other.kubernetes_node} reach each other on MASTER_PORT and another port"
    return ClusterCheck(NETWORK, CheckOutcome.OK, message)
