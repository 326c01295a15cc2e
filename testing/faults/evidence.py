"""What is kept of a run that went otherwise than expected: all that its figures leave out, before it is removed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from testing.faults.job_under_test import TROUBLE, Scene
from testing.processes.operator_stack import OPERATOR_NAMESPACE

FOLDER = Path(__file__).parents[2] / "build" / "chaos"
MOST_LOG_BYTES = 2 << 20  # of each of the cluster's own programs: an hour of it at least


def keep_evidence(scene: Scene, began: str) -> Path:
    """What was seen of the job, its logs, all events and pods, the operators' logs and those of the cluster's programs.

    Returns the folder. What cannot be had, because the API server is down for instance, leaves its reason instead.
    """
    folder = FOLDER / f"{scene.job}-{began[:19].replace(':', '')}"
    folder.mkdir(parents=True, exist_ok=True)
    watch = scene.watch
    write_lines(folder / "statuses.jsonl", ({"time": seen.time, **seen.status} for seen in watch.sightings))
    write_lines(folder / "steps.jsonl", map(asdict, watch.steps))
    if (logs := scene.output / "logs").exists():
        shutil.copytree(logs, folder / "logs", dirs_exist_ok=True)
    for kind in ("events", "pods", "nodes", "leases"):
        ask(scene, folder / f"{kind}.json", "get", kind, "-A", "-o", "json")
    for pod in operator_pods(scene):
        ask(scene, folder / f"{pod}.log", "logs", "-n", OPERATOR_NAMESPACE, pod)
    for log in scene.cluster.layout.daemons.glob("*.log"):
        (folder / log.name).write_bytes(log.read_bytes()[-MOST_LOG_BYTES:])
    return folder


def write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def operator_pods(scene: Scene) -> list[str]:
    try:
        return [pod["metadata"]["name"] for pod in scene.operators()]
    except TROUBLE:
        return []


def ask(scene: Scene, path: Path, *arguments: str) -> None:
    try:
        path.write_text(scene.stack.kubectl(*arguments))
    except TROUBLE as error:
        path.write_text(f"{error}\n")
