"""Follows a job of the cluster: its events as lines, its progress as a live line on a terminal."""

from datetime import datetime

from finetune_cli.progress_display import ProgressDisplay
from finetune_cli.terminal import open_console
from finetune_client.client import Client
from finetune_client.errors import ClientError
from finetune_client.job import Job
from finetune_client.job_events import JobEvent


def follow_job(client: Client, name: str, *, since: datetime | None) -> Job:
    """Print events and progress of a job until it ends, and return it. since: earlier events are not printed."""
    printed: set[JobEvent] = set()
    job: Job | None = None
    with ProgressDisplay(open_console()) as display:
        for job in client.watch(name):
            for event in _list_events(client, name):
                is_new = event not in printed and event.about == name and (since is None or event.time >= since)
                printed.add(event)
                if is_new:
                    display.print_event(event.time, event.reason, event.message)
            display.update(job.status)
    assert job is not None, "a watch yields at least one job"
    return job


def _list_events(client: Client, name: str) -> tuple[JobEvent, ...]:
    """Return the events of a job; without the right to read events, none."""
    try:
        return client.list_events(name)
    except ClientError as error:
        if error.status in (403, 404):
            return ()
        raise
