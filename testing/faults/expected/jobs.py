"""Expected results of faults of ranks, memory, storage and data, and of faults that prevent a start."""

from __future__ import annotations

from finetune_api.v1alpha1.reasons import Reason
from testing.faults.expectation import (
    SAVE_STEPS,
    TRAINER_SAVE_STEPS,
    Expectation,
    expect_failure,
    expect_no_failure,
    expect_one_restart,
    expect_repair,
    expect_restart,
)

RANKS = (
    Expectation(
        "rank-exception", "rank 3 raises a ValueError", expect_failure(Reason.USER_CODE_ERROR), node_rank=1, rank=3
    ),
    expect_one_restart("rank-exit-42", "rank 3 calls sys.exit(42)", Reason.UNEXPLAINED, rank=3),
    expect_one_restart("rank-sigkill", "SIGKILL to rank 3", Reason.RANK_KILLED, rank=3),
    expect_one_restart("rank-segfault", "rank 3 reads address 0", Reason.RANK_CRASHED, rank=3),
    expect_one_restart(
        "rank-sigstop",
        "SIGSTOP to rank 3 of the operator's trainer; hangTimeoutSeconds 20",
        Reason.HANG,
        max_steps_lost=TRAINER_SAVE_STEPS,
        rank=3,
    ),
    Expectation(
        "program-hangs",
        "a user's program hangs and stops reporting progress; hangTimeoutSeconds 10",
        expect_restart(Reason.HANG),
        max_steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "cuda-oom",
        "CUDA's OOM error, raised by micro-batches of more than one sample in the operator's trainer",
        expect_repair(Reason.CUDA_OUT_OF_MEMORY),
    ),
    Expectation(
        "cuda-oom-command",
        "CUDA's OOM error, raised by rank 3 of a user's program, whose batch size the operator cannot change",
        expect_failure(Reason.CUDA_OUT_OF_MEMORY),
        node_rank=1,
        rank=3,
    ),
    expect_one_restart(
        "gpu-ecc",
        "CUDA's uncorrectable ECC error, raised by rank 3; the next attempt must avoid that Kubernetes node",
        Reason.GPU_HARDWARE,
        rank=3,
        avoids_node=True,
    ),
    expect_one_restart("port-in-use", "rank 3 raises EADDRINUSE", Reason.PORT_IN_USE, rank=3),
    Expectation(
        "link-lost",
        "rank 3 raises Python's ConnectionResetError, as if the network failed: all ranks are victims",
        expect_restart(Reason.PEER_LOST),
        max_steps_lost=SAVE_STEPS,
    ),
)

RESOURCES = (
    Expectation(
        "rank-oom",
        "rank 3 exceeds the container's memory limit; the kernel kills only that process (cgroup v1)",
        expect_failure(Reason.HOST_OUT_OF_MEMORY),
        node_rank=1,
    ),
    Expectation(
        "container-oom",
        "files in a memory volume exceed the container's limit: the kernel kills processes until PID 1 is dead",
        expect_failure(Reason.HOST_OUT_OF_MEMORY),
        node_rank=1,
    ),
    Expectation(
        "oom-more-memory",
        "as rank-oom, but restartPolicy.maxMemory is high enough for the rank",
        expect_repair(Reason.HOST_OUT_OF_MEMORY),
        node_rank=1,
        max_steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "shm-full",
        "rank 3 writes more data to /dev/shm than fits (ENOSPC)",
        expect_repair(Reason.SHARED_MEMORY_EXHAUSTED),
        node_rank=1,
        max_steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "shm-sigbus",
        "rank 3 maps a file in /dev/shm and writes more data than fits (SIGBUS)",
        expect_repair(Reason.SHARED_MEMORY_EXHAUSTED),
        node_rank=1,
        max_steps_lost=SAVE_STEPS,
    ),
    Expectation("disk-full", "rank 3 writes to a volume that is full", expect_failure(Reason.DISK_FULL), node_rank=1),
    Expectation(
        "storage-limit",
        "node 1 exceeds its ephemeral-storage limit and is evicted by the kubelet",
        expect_failure(Reason.EVICTED),
        node_rank=1,
    ),
)

STARTS = (
    Expectation(
        "image-missing",
        "an image that does not exist; pendingDeadlineSeconds 30",
        expect_failure(Reason.PENDING_DEADLINE_EXCEEDED),
        pending_reason=Reason.IMAGE_PULL_FAILED,
    ),
    Expectation("image-name-invalid", "spec.image is not a valid image name", expect_failure(Reason.IMAGE_PULL_FAILED)),
    Expectation("image-without-python", "spec.image has no Python", expect_failure(Reason.START_ERROR)),
    expect_no_failure(
        "unschedulable", "no Kubernetes node matches the nodeSelector for 8 s", pending_reason=Reason.UNSCHEDULABLE
    ),
    Expectation(
        "unschedulable-for-ever",
        "no Kubernetes node matches the nodeSelector; pendingDeadlineSeconds 10",
        expect_failure(Reason.PENDING_DEADLINE_EXCEEDED),
        pending_reason=Reason.UNSCHEDULABLE,
    ),
    Expectation(
        "gang-incomplete",
        "only one of two pods can be scheduled for 16 s; startupDeadlineSeconds 8",
        expect_restart(Reason.GANG_INCOMPLETE),
        pending_reason=Reason.UNSCHEDULABLE,
    ),
    expect_no_failure("quota", "a ResourceQuota allows no pod for 8 s", pending_reason=Reason.CREATE_REFUSED),
    expect_no_failure(
        "secret-missing", "a Secret in spec.env is created after 8 s", pending_reason=Reason.CONFIG_MISSING
    ),
    expect_no_failure("dns-blocked", "the DNS server is stopped for the first 20 s"),
    Expectation("name-taken", "another Service already has the job's name", expect_failure(Reason.NAME_TAKEN)),
)

DATA = (
    expect_one_restart(
        "checkpoint-truncated",
        "SIGKILL to rank 3 of the operator's trainer; the newest checkpoint is truncated",
        Reason.RANK_KILLED,
        max_steps_lost=2 * TRAINER_SAVE_STEPS,
        rank=3,
    ),
    Expectation(
        "checkpoints-truncated",
        "SIGKILL to rank 3 of the operator's trainer; all checkpoints are truncated",
        (*expect_restart(Reason.RANK_KILLED), *expect_failure(Reason.CHECKPOINT_CORRUPT)),
        node_rank=1,
        rank=3,
    ),
    Expectation(
        "dataset-vanished",
        "SIGKILL to rank 3 of the operator's trainer; the dataset is removed",
        (*expect_restart(Reason.RANK_KILLED), *expect_failure(Reason.DATASET_ERROR)),
        node_rank=1,
        rank=3,
    ),
    Expectation(
        "nan-loss", "the model of the operator's trainer starts to return NaN", expect_failure(Reason.NON_FINITE_LOSS)
    ),
)
