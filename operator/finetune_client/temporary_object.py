"""An object that exists only while a command runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from finetune_client.connection import ClusterConnection
from finetune_client.errors import ClientError
from finetune_operator.kube.api_paths import collection_path, object_path
from finetune_operator.observation.ownership import RawBody


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
