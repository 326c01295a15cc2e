"""What ranks do, and what becomes of their memory and files."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from testing.faults.catalog.fault import FOLDER, Fault, When, does, does_wrong, trainer
from testing.faults.job_under_test import Raw, Scene
from testing.processes.cluster_training import training

ALWAYS = ("--failing-attempts", "99")  # the need stays the same; what is repaired is the room for it


@contextmanager
def kill_rank(scene: Scene) -> Iterator[None]:
    scene.chaos.kill_rank(scene.stack.namespace, scene.pod(1), rank=3)
    yield


@contextmanager
def stop_rank(scene: Scene) -> Iterator[None]:
    scene.chaos.kill_rank(scene.stack.namespace, scene.pod(1), rank=3, signal_number=signal.SIGSTOP)
    yield


def limits(**quantities: str) -> Raw:
    return {"requests": {"cpu": "100m"}, "limits": quantities}


def scratch(**empty_dir: str) -> list[Raw]:
    """The rows' volume of the example, and an empty one."""
    return [
        {"name": "data", "mountPath": "/data", "readOnly": True, "persistentVolumeClaim": {"claimName": "datasets"}},
        {"name": "scratch", "mountPath": "/scratch", "emptyDir": empty_dir},
    ]


def injected(**environment: str) -> list[Raw]:
    """Variables by which testing/fakes/inject breaks the operator's own trainer."""
    return [{"name": name, "value": value} for name, value in {"PYTHONPATH": f"{FOLDER}/inject", **environment}.items()]


def hangs_after(seconds: int) -> Raw:
    return {"hangTimeoutSeconds": seconds}


RANK_FAULTS = {
    "rank-exception": does_wrong("exception", ranks=2),
    "rank-exit-42": does_wrong("exit-42", ranks=2),
    "rank-sigkill": Fault(does(ranks=2), kill_rank, spares_others=True),
    "rank-segfault": does_wrong("segfault", ranks=2),
    "rank-sigstop": Fault(lambda _: trainer(restartPolicy=hangs_after(20)), stop_rank, at_step=25),
    "program-hangs": does_wrong("hang", restartPolicy=hangs_after(10)),
    "cuda-oom": Fault(
        lambda _: {
            "training": training(max_steps=60, save_steps=20, perDeviceTrainBatchSize=2),
            "env": injected(MOST_SAMPLES="1", FINE_PASSES="25"),
        },
        when=When.BY_ITSELF,
        spares_others=True,
    ),
    "cuda-oom-command": does_wrong("cuda-oom", ranks=2),
    "gpu-ecc": does_wrong("ecc", ranks=2),
    "port-in-use": does_wrong("port-in-use", ranks=2),
    "link-lost": does_wrong("link", ranks=2),
    "nan-loss": Fault(
        lambda _: trainer(env=injected(GIVE_NAN="1", FINE_PASSES="25")), when=When.BY_ITSELF, spares_others=True
    ),
}

RESOURCE_FAULTS = {
    "rank-oom": does_wrong("memory", "--mib", "900", ranks=2, resources=limits(memory="900Mi")),
    "container-oom": does_wrong(
        "fill", "--mib", "300", resources=limits(memory="200Mi"), volumes=scratch(medium="Memory")
    ),
    "oom-more-memory": does_wrong(
        "memory", *ALWAYS, "--mib", "300", resources=limits(memory="256Mi"), restartPolicy={"maxMemory": "1Gi"}
    ),
    "shm-full": does_wrong("shm", *ALWAYS, "--mib", "650", ranks=2, resources=limits(memory="1200Mi")),
    "shm-sigbus": does_wrong("shm-mmap", *ALWAYS, "--mib", "650", ranks=2, resources=limits(memory="1200Mi")),
    "disk-full": does_wrong("disk", "--mib", "32", volumes=scratch(medium="Memory", sizeLimit="16Mi")),
    "storage-limit": does_wrong(
        "fill",
        "--mib",
        "100",
        "--patience",  # a kubelet measures volumes once in a minute, and then looks again every ten seconds
        "150",
        resources={"requests": {"cpu": "100m"}, "limits": {"ephemeral-storage": "50Mi"}},
        volumes=scratch(),
    ),
}
