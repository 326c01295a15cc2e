"""Settings of one installation of the operator, which apply to all jobs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Images, domain and environment that one installation uses for all jobs."""

    trainer_image: str
    supervisor: str = ""  # zip in base64, for jobs with a command; empty where no pods are created from a plan
    cluster_domain: str = "cluster.local"
    on_cluster: bool = True  # False in local mode: no limits to raise, no other Kubernetes node
