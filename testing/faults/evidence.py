"""Save logs, events and statuses of a run that deviates from its expectation, before its job is deleted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from testing.faults.job_under_test import HARNESS_ERRORS, JobUnderTest
from testing.processes.operator_stack import OPERATOR_NAMESPACE

FOLDER = Path(__file__).parents[2] / "build" / "chaos"
MAX_LOG_BYTES = 2 << 20  # limit per program of the cluster; enough for an hour of logs


def save_evidence(job: JobUnderTest, started_at: str) -> Path:
    """Save the job's statuses, steps and logs, and the state of operators and cluster; return the folder.

    If a file cannot be read, for example because the API server is down, the error message is saved instead.
    """
    folder = FOLDER / f"{job.name}-{started_at[:19].replace(':', '')}"
    folder.mkdir(parents=True, exist_ok=True)
    recorder = job.recorder
    write_lines(
        folder / "statuses.jsonl", ({"time": change.time, **change.status} for change in recorder.status_changes)
    )
    write_lines(folder / "steps.jsonl", map(asdict, recorder.steps))
    if (logs := job.output / "logs").exists():
        shutil.copytree(logs, folder / "logs", dirs_exist_ok=True)
    for kind in ("events", "pods", "nodes", "leases"):
        save_kubectl_output(job, folder / f"{kind}.json", "get", kind, "-A", "-o", "json")
    for pod in list_operator_pod_names(job):
        save_kubectl_output(job, folder / f"{pod}.log", "logs", "-n", OPERATOR_NAMESPACE, pod)
    for log in job.cluster.layout.daemons.glob("*.log"):
        (folder / log.name).write_bytes(log.read_bytes()[-MAX_LOG_BYTES:])
    return folder


def write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def list_operator_pod_names(job: JobUnderTest) -> list[str]:
    try:
        return [pod["metadata"]["name"] for pod in job.list_operator_pods()]
    except HARNESS_ERRORS:
        return []


def save_kubectl_output(job: JobUnderTest, path: Path, *arguments: str) -> None:
    try:
        path.write_text(job.installation.kubectl(*arguments))
    except HARNESS_ERRORS as error:
        path.write_text(f"{error}\n")
