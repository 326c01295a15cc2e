"""Settings of an operator installation."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Settings that one installation of the operator applies to all jobs."""

    trainer_image: str
    version: str = ""  # version of the operator; empty if its package metadata is missing
    supervisor: str = ""  # base64-encoded zip file, used by jobs with a command; empty if no pods are created
    cluster_domain: str = "cluster.local"
    on_cluster: bool = True  # False in local mode, without memory limits and other Kubernetes nodes
    default_ttl_seconds: int | None = None  # of finished jobs without spec.ttlSecondsAfterFinished; None keeps them
    delete_finished_jobs: bool = True  # False if the operator ignores the TTL of jobs
