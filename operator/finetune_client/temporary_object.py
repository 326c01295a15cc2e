"""An object that exists only while a command runs, and why it does not start if it is a pod."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from finetune_client.connection import ClusterConnection
from finetune_client.errors import ClientError
from finetune_operator.kube.api_paths import collection_path, object_path
from finetune_operator.observation.ownership import RawBody

# The kubelet does not start a container in these states, unless something is changed.
PERMANENT_WAITS = frozenset(
    {"ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError"}
)


@asynccontextmanager
async def open_temporary_object(
    connection: ClusterConnection, manifest: RawBody, *, what: str
) -> AsyncIterator[RawBody]:
    """Create an object in the namespace of the client, yield it, and delete it at the end, also after a cancellation.

    what: names the object in errors.

    Raises:
        ClientError: The object cannot be created or deleted.
    """
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    creation = asyncio.ensure_future(
        connection.create(collection_path(kind, connection.namespace), manifest, what=what)
    )

    async def delete() -> None:
        await asyncio.wait([creation])  # the object might appear after its deletion otherwise
        error = creation.exception()
        if isinstance(error, ClientError) and error.status is not None and error.status < 500:
            return  # it was rejected; after any other error it may exist
        try:
            await connection.delete(object_path(kind, connection.namespace, name), what=what, grace_seconds=0)
        except ClientError as failure:
            if error is None and failure.status != 404:
                raise

    try:
        yield await asyncio.shield(creation)
    finally:
        await asyncio.shield(delete())


def find_wait(status: RawBody) -> tuple[str, bool]:
    """Return why the container of a pod has not started, "" if it has, and whether it will not start."""
    phase = status.get("phase") or "Pending"
    state = next((container.get("state") or {} for container in status.get("containerStatuses") or ()), {})
    if waiting := state.get("waiting"):
        reason = waiting.get("reason")
        return f"{reason}: {waiting.get('message') or 'no message'}", reason in PERMANENT_WAITS
    if phase == "Failed":
        end = state.get("terminated") or status
        return f"{end.get('reason')}: {end.get('message') or 'exit code {}'.format(end.get('exitCode'))}", True
    if state:
        return "", False
    for condition in status.get("conditions") or ():
        if (condition.get("type"), condition.get("status")) == ("PodScheduled", "False"):
            return f"not scheduled: {condition.get('message') or condition.get('reason')}", False
    return phase, False
