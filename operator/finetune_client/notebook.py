"""Shows a job in a notebook while it runs, with a progress bar and the curve of its loss."""

import math
from collections.abc import Iterable

from finetune_client.job import Job
from finetune_client.job_html import LossPoint, render_job_html

MAX_POINTS = 500


def show_jobs(states: Iterable[Job]) -> Job:
    """Show the successive states of a job in one output of a notebook, and return the last one.

    Raises:
        ImportError: IPython is not installed, as it is in every notebook.
    """
    from IPython.display import HTML, display

    losses: list[LossPoint] = []
    handle = None
    job: Job | None = None
    for job in states:
        add_loss(losses, job)
        html = HTML(render_job_html(job.metadata, job.status, losses))
        if handle is None:
            handle = display(html, display_id=True)
        else:
            handle.update(html)
    assert job is not None, "a watch yields at least one state"
    return job


def add_loss(losses: list[LossPoint], job: Job) -> None:
    """Append the loss of the newest step; after a restart, replace the steps that are repeated.

    Beyond MAX_POINTS, every second point is dropped.
    """
    progress = job.status.progress
    if progress is None or progress.loss is None or not math.isfinite(progress.loss):
        return
    while losses and losses[-1][0] >= progress.step:
        losses.pop()
    losses.append((progress.step, progress.loss))
    if len(losses) > MAX_POINTS:
        del losses[-2::-2]
