"""Faults of ranks, and of their memory and files."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from testing.faults.catalog.fault import (
    POD_FOLDER,
    InjectedFault,
    InjectionTime,
    program_fault,
    runs_program,
    trainer_fields,
)
from testing.faults.job_under_test import JobUnderTest, RawBody
from testing.processes.cluster_training import training

ALWAYS = ("--failing-attempts", "99")  # every attempt uses as much memory; the repair raises the limit


@contextmanager
def kill_rank(job: JobUnderTest) -> Iterator[None]:
    job.chaos.kill_rank(job.stack.namespace, job.pod(1), rank=3)
    yield


@contextmanager
def stop_rank(job: JobUnderTest) -> Iterator[None]:
    job.chaos.kill_rank(job.stack.namespace, job.pod(1), rank=3, signal_number=signal.SIGSTOP)
    yield


def limits(**quantities: str) -> RawBody:
    return {"requests": {"cpu": "100m"}, "limits": quantities}


def scratch(**empty_dir: str) -> list[RawBody]:
    """Return the example's dataset volume and an empty scratch volume."""
    return [
        {"name": "data", "mountPath": "/data", "readOnly": True, "persistentVolumeClaim": {"claimName": "datasets"}},
        {"name": "scratch", "mountPath": "/scratch", "emptyDir": empty_dir},
    ]


def injected(**environment: str) -> list[RawBody]:
    """Return environment variables with which testing/fakes/inject injects a fault into the operator's trainer."""
    return [
        {"name": name, "value": value} for name, value in {"PYTHONPATH": f"{POD_FOLDER}/inject", **environment}.items()
    ]


def hang_timeout(seconds: int) -> RawBody:
    return {"hangTimeoutSeconds": seconds}


RANK_FAULTS = {
    "rank-exception": program_fault("exception", ranks=2),
    "rank-exit-42": program_fault("exit-42", ranks=2),
    "rank-sigkill": InjectedFault(runs_program(ranks=2), kill_rank, is_isolated=True),
    "rank-segfault": program_fault("segfault", ranks=2),
    "rank-sigstop": InjectedFault(lambda _: trainer_fields(restartPolicy=hang_timeout(20)), stop_rank, at_step=25),
    "program-hangs": program_fault("hang", restartPolicy=hang_timeout(10)),
    "cuda-oom": InjectedFault(
        lambda _: {
            "training": training(max_steps=60, save_steps=20, perDeviceTrainBatchSize=2),
            "env": injected(MOST_SAMPLES="1", FINE_PASSES="25"),
        },
        injection_time=InjectionTime.BY_ITSELF,
        is_isolated=True,
    ),
    "cuda-oom-command": program_fault("cuda-oom", ranks=2),
    "gpu-ecc": program_fault("ecc", ranks=2),
    "port-in-use": program_fault("port-in-use", ranks=2),
    "link-lost": program_fault("link", ranks=2),
    "nan-loss": InjectedFault(
        lambda _: trainer_fields(env=injected(GIVE_NAN="1", FINE_PASSES="25")),
        injection_time=InjectionTime.BY_ITSELF,
        is_isolated=True,
    ),
}

RESOURCE_FAULTS = {
    "rank-oom": program_fault("memory", "--mib", "900", ranks=2, resources=limits(memory="900Mi")),
    "container-oom": program_fault(
        "fill", "--mib", "300", resources=limits(memory="200Mi"), volumes=scratch(medium="Memory")
    ),
    "oom-more-memory": program_fault(
        "memory", *ALWAYS, "--mib", "300", resources=limits(memory="256Mi"), restartPolicy={"maxMemory": "1Gi"}
    ),
    "shm-full": program_fault("shm", *ALWAYS, "--mib", "650", ranks=2, resources=limits(memory="1200Mi")),
    "shm-sigbus": program_fault("shm-mmap", *ALWAYS, "--mib", "650", ranks=2, resources=limits(memory="1200Mi")),
    "disk-full": program_fault("disk", "--mib", "32", volumes=scratch(medium="Memory", sizeLimit="16Mi")),
    "storage-limit": program_fault(
        "fill",
        "--mib",
        "100",
        "--patience",  # the kubelet measures volumes once a minute, then checks limits every 10 s
        "150",
        resources={"requests": {"cpu": "100m"}, "limits": {"ephemeral-storage": "50Mi"}},
        volumes=scratch(),
    ),
}
