"""Python SDK: submits, reads and controls FineTuneJobs.

Names are imported on first use, so that importing the package takes a few milliseconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finetune_client.async_client import AsyncClient, WaitTarget
    from finetune_client.client import Client
    from finetune_client.errors import ClientError, JobFailed, WaitTimeout
    from finetune_client.job import Job
    from finetune_client.job_builder import Machines
    from finetune_client.job_events import JobEvent
    from finetune_client.job_logs import LogLine, LogSelection
    from finetune_client.manifest import InvalidManifest

_MODULES = {
    "AsyncClient": "async_client",
    "Client": "client",
    "ClientError": "errors",
    "Job": "job",
    "InvalidManifest": "manifest",
    "JobEvent": "job_events",
    "JobFailed": "errors",
    "LogLine": "job_logs",
    "LogSelection": "job_logs",
    "Machines": "job_builder",
    "WaitTarget": "async_client",
    "WaitTimeout": "errors",
}
__all__ = [
    "AsyncClient",
    "Client",
    "ClientError",
    "InvalidManifest",
    "Job",
    "JobEvent",
    "JobFailed",
    "LogLine",
    "LogSelection",
    "Machines",
    "WaitTarget",
    "WaitTimeout",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
