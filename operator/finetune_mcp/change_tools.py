"""Tools that change jobs. Each returns a preview first, and acts only when its confirmation is passed back."""

import hashlib
import hmac
import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import yaml

from finetune_client.async_client import AsyncClient
from finetune_client.errors import ClientError
from finetune_client.job import Job
from finetune_client.manifest import InvalidManifest, parse_manifest

MAX_MANIFEST_CHARACTERS = 100_000

Json = dict[str, Any]


class ChangeTools:
    """Tools that create, suspend, resume, cancel and delete jobs of one namespace.

    A confirmation is valid for the same change of the same version of the job, while the server runs.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._key = secrets.token_bytes(32)

    def list_tools(self) -> tuple[Callable[..., Any], ...]:
        """Return the functions to register as tools."""
        return (self.submit_job, self.suspend_job, self.resume_job, self.cancel_job, self.delete_job)

    async def submit_job(self, manifest: str, confirmation: str = "") -> Json:
        """Create a job from its manifest in YAML. Call it without confirmation first, show the preview to the user, and
        pass its confirmation back once the user agrees."""
        body = parse_yaml(manifest)
        job = parse_manifest(body)
        await self._client.submit(body, dry_run=True)
        existing = await self._client.find(job.metadata.name)
        ranks = f"{job.spec.num_nodes} nodes x {job.spec.ranks_per_node} processes"
        change = "changes the existing job" if existing is not None else "creates a job"
        preview = f"{change} {self._client.namespace}/{job.metadata.name} with {ranks}"
        version = existing.metadata.resource_version if existing is not None else ""
        return await self._confirm(preview, ("submit", body, version), confirmation, lambda: self._client.submit(body))

    async def suspend_job(self, name: str, confirmation: str = "") -> Json:
        """Save a checkpoint and release all pods of a job. Call it without confirmation first, as submit_job."""
        return await self._change("suspends", name, confirmation, lambda: self._client.suspend(name))

    async def resume_job(self, name: str, confirmation: str = "") -> Json:
        """Continue a suspended job from its last checkpoint. Call it without confirmation first, as submit_job."""
        return await self._change("resumes", name, confirmation, lambda: self._client.resume(name))

    async def cancel_job(self, name: str, confirmation: str = "") -> Json:
        """End a job for good, after a checkpoint; its record and output are kept, and it cannot be resumed. Call it
        without confirmation first, as submit_job."""
        return await self._change("cancels", name, confirmation, lambda: self._client.cancel(name))

    async def delete_job(self, name: str, confirmation: str = "") -> Json:
        """Delete a job and its pods, but not its output. Call it without confirmation first, as submit_job."""

        async def delete() -> None:
            await self._client.delete(name)

        return await self._change("deletes", name, confirmation, delete)

    async def _change(self, verb: str, name: str, confirmation: str, act: Callable[[], Awaitable[Job | None]]) -> Json:
        job = await self._client.get(name)
        progress = job.status.display.progress if job.status.display else ""
        preview = f"{verb} {job.namespace}/{name}, which is {job.phase or 'new'} {progress}".rstrip()
        return await self._confirm(preview, (verb, name, job.metadata.uid), confirmation, act)

    async def _confirm(
        self, preview: str, change: tuple[object, ...], confirmation: str, act: Callable[[], Awaitable[object]]
    ) -> Json:
        """Carry out the change if the confirmation is that of its preview; return the preview without one.

        Raises:
            ClientError: The confirmation belongs to another change.
        """
        content = json.dumps(change, sort_keys=True, default=str).encode()
        expected = hmac.new(self._key, content, hashlib.sha256).hexdigest()[:16]
        if not confirmation:
            return {"preview": preview, "confirmation": expected, "done": False}
        if not hmac.compare_digest(confirmation.encode(), expected.encode()):
            raise ClientError("the confirmation does not belong to this change; call the tool without it for a preview")
        await act()
        return {"preview": preview, "done": True}


def parse_yaml(text: str) -> Json:
    """Parse the manifest of one job. Raises InvalidManifest if it is too long or no object with metadata."""
    if len(text) > MAX_MANIFEST_CHARACTERS:
        raise InvalidManifest(f"the manifest has more than {MAX_MANIFEST_CHARACTERS} characters")
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise InvalidManifest("the manifest contains YAML aliases (*name); write the values out")
        body = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidManifest(f"the manifest is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(body, dict) or not isinstance(body.get("metadata"), dict):
        raise InvalidManifest("metadata.name: is required")
    return body
