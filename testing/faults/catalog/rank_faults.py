"""Rank faults: crashes, hangs, hardware errors, and exhausted memory or storage."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from testing.faults.catalog.fault import (
    InjectedFault,
    InjectionTime,
    build_program_fault,
    build_trainer_fields,
    make_program_fields,
)
from testing.faults.job_under_test import JobUnderTest, RawBody
from testing.faults.training_job import POD_FOLDER
from testing.processes.cluster_training import build_training_fields

IN_EVERY_ATTEMPT = (
    "--failing-attempts",
    "99",
)  # every attempt needs the same amount of memory, which is available only after the repair


@contextmanager
def kill_rank(job: JobUnderTest) -> Iterator[None]:
    job.chaos.kill_rank(job.installation.namespace, job.get_pod_name(1), rank=3)
    yield


@contextmanager
def stop_rank(job: JobUnderTest) -> Iterator[None]:
    job.chaos.kill_rank(job.installation.namespace, job.get_pod_name(1), rank=3, signal_number=signal.SIGSTOP)
    yield


def limit_resources(**quantities: str) -> RawBody:
    return {"requests": {"cpu": "100m"}, "limits": quantities}


def build_scratch_volumes(**empty_dir: str) -> list[RawBody]:
    """Return the dataset volume of the example job and an empty scratch volume."""
    return [
        {"name": "data", "mountPath": "/data", "readOnly": True, "persistentVolumeClaim": {"claimName": "datasets"}},
        {"name": "scratch", "mountPath": "/scratch", "emptyDir": empty_dir},
    ]


def build_injection_environment(**environment: str) -> list[RawBody]:
    """Return the environment variables with which testing/fakes/inject injects a fault into finetune_trainer."""
    return [
        {"name": name, "value": value} for name, value in {"PYTHONPATH": f"{POD_FOLDER}/inject", **environment}.items()
    ]


def set_hang_timeout(seconds: int) -> RawBody:
    return {"hangTimeoutSeconds": seconds}


RANK_FAULTS = {
    "rank-exception": build_program_fault("exception", ranks=2),
    "rank-exit-42": build_program_fault("exit-42", ranks=2),
    "rank-sigkill": InjectedFault(kill_rank, make_program_fields(ranks=2), is_isolated=True),
    "rank-segfault": build_program_fault("segfault", ranks=2),
    "rank-sigstop": InjectedFault(
        stop_rank, lambda _: build_trainer_fields(restartPolicy=set_hang_timeout(20)), injection_step=25
    ),
    "program-hangs": build_program_fault("hang", restartPolicy=set_hang_timeout(10)),
    "cuda-oom": InjectedFault(
        build_spec_fields=lambda _: {
            "training": build_training_fields(max_steps=60, save_steps=20, perDeviceTrainBatchSize=2),
            "env": build_injection_environment(OOM_ABOVE_SAMPLES="1", PASSES_BEFORE_FAULT="25"),
        },
        injection_time=InjectionTime.BY_PROGRAM,
        is_isolated=True,
    ),
    "cuda-oom-command": build_program_fault("cuda-oom", ranks=2),
    "gpu-ecc": build_program_fault("ecc", ranks=2),
    "port-in-use": build_program_fault("port-in-use", ranks=2),
    "link-lost": build_program_fault("link", ranks=2),
    "nan-loss": InjectedFault(
        build_spec_fields=lambda _: build_trainer_fields(
            env=build_injection_environment(INJECT_NAN="1", PASSES_BEFORE_FAULT="25")
        ),
        injection_time=InjectionTime.BY_PROGRAM,
        is_isolated=True,
    ),
}

RESOURCE_FAULTS = {
    "rank-oom": build_program_fault("memory", "--mib", "900", ranks=2, resources=limit_resources(memory="900Mi")),
    "container-oom": build_program_fault(
        "fill",
        "--mib",
        "300",
        resources=limit_resources(memory="200Mi"),
        volumes=build_scratch_volumes(medium="Memory"),
    ),
    "oom-more-memory": build_program_fault(
        "memory",
        *IN_EVERY_ATTEMPT,
        "--mib",
        "300",
        resources=limit_resources(memory="256Mi"),
        restartPolicy={"maxMemory": "1Gi"},
    ),
    "shm-full": build_program_fault(
        "shm", *IN_EVERY_ATTEMPT, "--mib", "650", ranks=2, resources=limit_resources(memory="1200Mi")
    ),
    "shm-sigbus": build_program_fault(
        "shm-mmap", *IN_EVERY_ATTEMPT, "--mib", "650", ranks=2, resources=limit_resources(memory="1200Mi")
    ),
    "disk-full": build_program_fault(
        "disk", "--mib", "32", volumes=build_scratch_volumes(medium="Memory", sizeLimit="16Mi")
    ),
    "storage-limit": build_program_fault(
        "fill",
        "--mib",
        "100",
        "--peer-timeout",  # the kubelet measures volumes once a minute and checks their limits every 10 s
        "150",
        resources={"requests": {"cpu": "100m"}, "limits": {"ephemeral-storage": "50Mi"}},
        volumes=build_scratch_volumes(),
    ),
}
