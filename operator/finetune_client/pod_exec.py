"""Runs a program in a container and streams its output, by the exec subresource over a WebSocket.

Source: https://kubernetes.io/docs/reference/using-api/ and KEP-4006, protocol v4.channel.k8s.io.
"""

from collections.abc import AsyncGenerator, Sequence

import aiohttp

from finetune_client.connection import ClusterConnection
from finetune_client.errors import ClientError
from finetune_operator import names
from finetune_operator.kube.api_paths import object_path
from finetune_supervisor.contract import parse_json

PROTOCOL = "v4.channel.k8s.io"
STDOUT, STDERR, STATUS = 1, 2, 3  # the first byte of a message is its channel
MAX_STDERR_BYTES = 4096


async def run_in_pod(
    connection: ClusterConnection, *, namespace: str, pod: str, program: Sequence[str]
) -> AsyncGenerator[bytes, None]:
    """Yield the standard output of a program in the trainer container of a pod.

    Raises:
        ClientError: The program cannot be started or fails; the message contains its error output.
    """
    what = f"pod {namespace}/{pod}: {program[0]}"
    params = [("container", names.CONTAINER), ("stdout", "true"), ("stderr", "true")]
    params += [("command", argument) for argument in program]
    path = object_path("Pod", namespace, pod, "exec")
    errors, status = b"", b""
    async with await connection.open_websocket(path, what=what, params=params, protocol=PROTOCOL) as socket:
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                continue
            channel, content = message.data[0], message.data[1:]
            if channel == STDOUT and content:
                yield content
            elif channel == STDERR:
                errors = (errors + content)[-MAX_STDERR_BYTES:]
            elif channel == STATUS:
                status += content
    _check_status(what, status, errors)


def _check_status(what: str, status: bytes, errors: bytes) -> None:
    """Raise ClientError unless the API server reports success, which it does last."""
    if not status:
        raise ClientError(f"{what}: the connection was lost before the program ended")
    try:
        parsed = parse_json(status)
    except ValueError:
        parsed = {"message": status.decode(errors="replace")}
    if parsed.get("status") != "Success":
        details = errors.decode(errors="replace").strip() or parsed.get("message") or "failed"
        raise ClientError(f"{what}: {details}")
