"""Settings of one installation of the operator, which apply to all jobs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Settings that one installation of the operator applies to all jobs."""

    trainer_image: str
    supervisor: str = ""  # base64-encoded zip file for jobs with a command; empty if no pods are created
    cluster_domain: str = "cluster.local"
    on_cluster: bool = True  # False in local mode, which has no memory limits and no other Kubernetes node
