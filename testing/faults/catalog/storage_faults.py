"""Storage and clock faults: the output hangs or becomes read-only, clocks of nodes differ."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from testing.cluster.host.commands import run, try_run
from testing.cluster.storage import TRAINER_USER
from testing.faults.catalog.fault import InjectedFault, build_program_fault, make_program_fields
from testing.faults.catalog.rank_faults import build_injection_environment, set_hang_timeout
from testing.faults.job_under_test import JobUnderTest
from testing.faults.training_job import build_program_fields
from testing.processes.waiting import wait_until

IMAGE_MIB = 64
REPAIR_SECONDS = 5


@contextmanager
def mount_output(job: JobUnderTest) -> Iterator[None]:
    """Mount an ext4 file system of its own at the output folder of the job."""
    image = get_image_path(job)
    run("truncate", "--size", f"{IMAGE_MIB}M", image)
    run("mkfs.ext4", "-q", "-E", f"root_owner={TRAINER_USER}:{TRAINER_USER}", image)
    job.output.mkdir(parents=True)
    for folder in (job.output.parent, job.output):
        os.chown(folder, TRAINER_USER, TRAINER_USER)
    run("mount", "-o", "loop", image, job.output)
    try:
        (job.output / "lost+found").rmdir()
        yield
    finally:
        unmount(job.output)
        image.unlink()
        with suppress(OSError):
            job.output.rmdir()


def get_image_path(job: JobUnderTest) -> Path:
    return job.cluster.root / f"{job.name}.img"


def unmount(folder: Path) -> None:
    """Unmount the folder as soon as no process uses it."""
    wait_until(lambda: try_run("umount", folder).returncode == 0, goal=f"{folder} is unmounted")


@contextmanager
def freeze_output(job: JobUnderTest) -> Iterator[None]:
    run("fsfreeze", "--freeze", job.output)
    try:
        yield
    finally:
        run("fsfreeze", "--unfreeze", job.output)


@contextmanager
def make_output_read_only(job: JobUnderTest) -> Iterator[None]:
    """Abort the journal of the output, and repair the file system before the next attempt can be scheduled."""
    nodes = job.list_k8s_node_names()
    job.installation.kubectl("label", "node", *nodes, f"{job.name}-")
    try:
        run("mount", "-o", "remount,abort", job.output)
        job.wait_until(
            lambda recorder: len(recorder.attempts) > 1 or recorder.is_finished,
            goal="stopped",
            timeout_seconds=90,
        )
        time.sleep(REPAIR_SECONDS)
        unmount(job.output)
        # the containers of the attempt have mounts of their own
        image = get_image_path(job)
        wait_until(lambda: not run("losetup", "--associated", image).strip(), goal=f"{image} is detached")
        try_run("fsck.ext4", "-p", image)  # exits with 1 if it repaired something
        run("mount", "-o", "loop", image, job.output)
    finally:
        job.installation.kubectl("label", "node", *nodes, f"{job.name}=yes")
    yield


@contextmanager
def mount_output_and_label_nodes(job: JobUnderTest) -> Iterator[None]:
    """Mount the output, and give all Kubernetes nodes the label that the pods of the job need."""
    nodes = job.list_k8s_node_names()
    with mount_output(job):
        job.installation.kubectl("label", "node", *nodes, f"{job.name}=yes", "--overwrite")
        try:
            yield
        finally:
            job.installation.kubectl("label", "node", *nodes, f"{job.name}-")


STORAGE_FAULTS = {
    "volume-frozen": InjectedFault(freeze_output, duration_seconds=15, is_isolated=True, prepare=mount_output),
    "volume-hangs": InjectedFault(
        freeze_output,
        make_program_fields(restartPolicy=set_hang_timeout(10)),
        duration_seconds=60,
        is_isolated=True,
        prepare=mount_output,
    ),
    "volume-read-only": InjectedFault(
        make_output_read_only,
        lambda job: build_program_fields(podTemplate={"nodeSelector": {job.name: "yes"}}),
        is_isolated=True,
        prepare=mount_output_and_label_nodes,
    ),
    "clocks-apart": build_program_fault("ecc", ranks=2, env=build_injection_environment(CLOCK_OFFSET_SECONDS="-5")),
}
