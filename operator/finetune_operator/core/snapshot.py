"""Keeps what a job began with, so that an upgrade of the operator does not change later attempts (decisions/127)."""

import re

from finetune_api.v1alpha1.devices import DEVICE_TABLE_VERSION
from finetune_api.v1alpha1.job import FineTuneJob, FineTuneJobSpec
from finetune_api.v1alpha1.recorded_defaults import render_defaults
from finetune_api.v1alpha1.status import AttemptState, JobSnapshot, JobStatus
from finetune_operator.core.job_context import JobContext
from finetune_operator.observation.pods import NodeObservation
from finetune_operator.settings import Settings

_DIGEST = re.compile(r"(?:docker-pullable://)?([^@\s]{1,400})@(sha256:[0-9a-f]{64})")


def renew_snapshot(job: FineTuneJob, settings: Settings) -> JobSnapshot:
    """Return the snapshot for the next attempt: that of the job, with the image that its spec now names."""
    snapshot, image = job.status.snapshot, job.spec.image
    if snapshot is None:
        return JobSnapshot(
            operator_version=settings.version,
            image=image or settings.trainer_image,
            is_default_image=image is None,
            defaults=render_defaults(FineTuneJobSpec),
            device_table=0 if job.status.attempts else DEVICE_TABLE_VERSION,
        )
    # without spec.image, the job keeps the trainer image with which it began
    if image == snapshot.image or (image is None and snapshot.is_default_image):
        return snapshot.model_copy(update={"is_default_image": image is None})
    update = {"image": image or settings.trainer_image, "is_default_image": image is None, "image_digest": ""}
    return snapshot.model_copy(update=update)


def complete_snapshot(context: JobContext, status: JobStatus) -> JobStatus:
    """Return the status with the digest of the image, once the attempt runs.

    A job that an operator without snapshots started gets one with the image of its pods.
    """
    if status.completion_time is not None or not status.attempts:
        return status
    nodes = context.observation.nodes_of_attempt(status.attempts[-1].attempt)
    snapshot = status.snapshot
    if snapshot is None:
        snapshot = renew_snapshot(context.job, context.settings)
        if nodes and nodes[0].image:
            snapshot = snapshot.model_copy(update={"image": nodes[0].image})
    if not snapshot.image_digest and status.attempts[-1].state is AttemptState.RUNNING and nodes:
        snapshot = snapshot.model_copy(update={"image_digest": find_image_digest(nodes[0], snapshot.image)})
    return status if snapshot == status.snapshot else status.model_copy(update={"snapshot": snapshot})


def find_image_digest(node: NodeObservation, image: str) -> str:
    """Return `repository@digest` of the image that the node runs; empty if it was not pulled from that repository.

    A kubelet reports the id of an image that was loaded from a file without a repository, or with a generated one.
    """
    match = _DIGEST.fullmatch(node.image_id)
    if node.image != image or match is None or _normalize_repository(match[1]) != _normalize_repository(image):
        return ""
    return f"{match[1]}@{match[2]}"


def _normalize_repository(image: str) -> str:
    """Return the repository of an image reference with the registry and namespace that container runtimes add."""
    repository = image.partition("@")[0]
    head, slash, name = repository.rpartition("/")
    repository = f"{head}{slash}{name.partition(':')[0]}"
    registry, slash, path = repository.partition("/")
    if not slash or not (set(".:") & set(registry) or registry == "localhost"):
        registry, path = "docker.io", repository
    return f"{registry}/library/{path}" if registry == "docker.io" and "/" not in path else f"{registry}/{path}"


def describe_newer_image(job: FineTuneJob, settings: Settings) -> str:
    """Return how to use the trainer image of this release in a job that keeps an older one; empty if there is none."""
    snapshot = job.status.snapshot
    if snapshot is None or not snapshot.is_default_image or snapshot.image == settings.trainer_image:
        return ""
    return (
        f"the job keeps the trainer image {snapshot.image}, with which it began; to use {settings.trainer_image}, set"
        " spec.suspend to true, set spec.image to it once the job is suspended, and set spec.suspend to false"
    )
