"""Expected results of rank faults, and of exhausted memory and storage."""

from __future__ import annotations

from finetune_api.v1alpha1.reasons import Reason
from testing.faults.expectation import (
    SAVE_STEPS,
    TRAINER_SAVE_STEPS,
    Expectation,
    expect_failure,
    expect_repair,
    expect_restart,
)

RANKS = (
    Expectation(
        "rank-exception", "rank 3 raises a ValueError", expect_failure(Reason.USER_CODE_ERROR), node_rank=1, rank=3
    ),
    Expectation(
        "rank-exit-42",
        "rank 3 calls sys.exit(42)",
        expect_restart(Reason.UNEXPLAINED),
        node_rank=1,
        rank=3,
        max_steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "rank-sigkill",
        "SIGKILL to rank 3",
        expect_restart(Reason.RANK_KILLED),
        node_rank=1,
        rank=3,
        max_steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "rank-segfault",
        "rank 3 reads address 0",
        expect_restart(Reason.RANK_CRASHED),
        node_rank=1,
        rank=3,
        max_steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "rank-sigstop",
        "SIGSTOP to rank 3 of the operator's trainer; hangTimeoutSeconds 20",
        expect_restart(Reason.HANG),
        node_rank=1,
        rank=3,
        max_steps_lost=TRAINER_SAVE_STEPS,
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
    Expectation(
        "gpu-ecc",
        "CUDA's uncorrectable ECC error, raised by rank 3; the next attempt must avoid that Kubernetes node",
        expect_restart(Reason.GPU_HARDWARE),
        node_rank=1,
        rank=3,
        max_steps_lost=SAVE_STEPS,
        avoids_node=True,
    ),
    Expectation(
        "port-in-use",
        "rank 3 raises EADDRINUSE",
        expect_restart(Reason.PORT_IN_USE),
        node_rank=1,
        rank=3,
        max_steps_lost=SAVE_STEPS,
    ),
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
