"""Expected results of pauses, overload and changes of the cluster and of its storage, clocks and policies."""

from __future__ import annotations

from finetune_api.v1alpha1.reasons import Reason
from testing.faults.expectation import (
    NO_OPERATOR_RESTARTS,
    OPERATOR_RESTARTS,
    SAVE_STEPS,
    STEPS_LOST_AFTER_SAVE,
    Expectation,
    ExpectedValue,
    expect_restart,
)

MAX_STATUS_KIB = 256


def expect_killed_container(name: str, description: str, *values: ExpectedValue) -> Expectation:
    """Expect a restart after PID 1 of node 1 was killed during or after the fault."""
    return Expectation(
        name,
        description,
        expect_restart(Reason.CONTAINER_KILLED),
        node_rank=1,
        max_steps_lost=SAVE_STEPS,
        values=values,
    )


def expect_large_job(nodes: int) -> Expectation:
    return Expectation(
        f"large-job-{nodes}",
        f"{nodes:,} nodes of another job (kwok) fail with distinct messages of 3.9 KB of Chinese text"
        " while no replica runs",
        max_steps_lost=0,
        values=(
            ExpectedValue("first attempt of the other job runs after, s", at_most=300),
            ExpectedValue("next attempt of the other job runs after, s", at_most=400),
            ExpectedValue("verdict on the other job", equal_to=Reason.RANK_KILLED.value),
            ExpectedValue("status of the other job, KiB", at_most=MAX_STATUS_KIB),
            NO_OPERATOR_RESTARTS,
        ),
    )


PAUSES = (
    expect_killed_container(
        "leader-paused-4", "the leading replica is stopped by SIGSTOP for 4 s; then PID 1 of node 1 is killed"
    ),
    expect_killed_container(
        "leader-paused-12", "as leader-paused-4, but for 12 s, longer than the renew deadline of the Lease"
    ),
    expect_killed_container("leader-paused-25", "as leader-paused-4, but for 25 s, longer than the Lease"),
    expect_killed_container(
        "operators-paused-25", "both replicas are stopped by SIGSTOP for 25 s, in which PID 1 of node 1 is killed"
    ),
    Expectation(
        "edited-while-operator-away",
        "while no replica runs, the job is suspended, its podTemplate is changed, and it is resumed",
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
        values=(ExpectedValue("pods of the next attempt with the new podTemplate", equal_to=2),),
    ),
    expect_killed_container(
        "rbac-revoked",
        "PID 1 of node 1 is killed while the operator's ClusterRoleBinding is missing for 15 s",
    ),
)

LOAD = (
    expect_killed_container(
        "finished-jobs",
        "1,000 finished jobs are created while no replica runs; after the start PID 1 of node 1 is killed",
        ExpectedValue("memory of a replica, MiB", at_most=256),
        NO_OPERATOR_RESTARTS,
    ),
    expect_large_job(512),
    expect_large_job(1000),
    expect_killed_container(
        "slow-webhook",
        "an admission webhook delays each of 128 pods of another namespace by 8 s; PID 1 of node 1 is killed",
        ExpectedValue("pods of a third namespace created after, s", at_most=15),
        NO_OPERATOR_RESTARTS,
    ),
)

POLICIES = (
    Expectation(
        "denied-without-code",
        "an admission webhook denies the job's pods without a status code for 8 s",
        pending_reason=Reason.CREATE_REFUSED,
        max_steps_lost=0,
    ),
    Expectation(
        "policy-denied",
        "PID 1 of node 1 is killed; a ValidatingAdmissionPolicy denies the job's pods until the job reports a pending"
        " reason",
        expect_restart(Reason.CONTAINER_KILLED),
        pending_reason=Reason.CREATE_REFUSED,
        node_rank=1,
        max_steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "pod-security-raised",
        "the pod security level of another namespace is raised above that of a job, a node of which fails; after 8 s"
        " the level is lowered again",
        max_steps_lost=0,
        values=(
            ExpectedValue("pending reason of the other job", equal_to=Reason.CREATE_REFUSED.value),
            ExpectedValue("next attempt of the other job runs after, s", at_most=60),
        ),
    ),
)

STORAGE_AND_CLOCKS = (
    Expectation(
        "volume-frozen",
        "the file system of the output hangs for 15 s (fsfreeze), so that writers are in uninterruptible sleep",
        max_steps_lost=0,
    ),
    Expectation(
        "volume-hangs",
        "as volume-frozen, but for 60 s; hangTimeoutSeconds 10",
        expect_restart(Reason.HANG),
        max_steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "volume-read-only",
        "the file system of the output becomes read-only because of an error, and is repaired after 5 s",
        expect_restart(Reason.STORAGE_FAULT),
        node_rank=0,
        max_steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "clocks-apart",
        "the clock of node 0 is 5 s behind; rank 3, on node 1, raises CUDA's ECC error",
        expect_restart(Reason.GPU_HARDWARE),
        node_rank=1,
        rank=3,
        max_steps_lost=SAVE_STEPS,
        avoids_node=True,
    ),
)

CLUSTER_CHANGES = (
    Expectation(
        "namespace-deleted",
        "the namespace of another, running job is deleted",
        max_steps_lost=0,
        values=(ExpectedValue("namespace gone after, s", at_most=60), NO_OPERATOR_RESTARTS),
    ),
    expect_killed_container(
        "controller-manager-down", "PID 1 of node 1 is killed while the controller manager is stopped for 20 s"
    ),
    expect_killed_container("dns-down-restart", "PID 1 of node 1 is killed while the DNS server is stopped for 20 s"),
    Expectation(
        "spot-reclaim",
        "the pod of node 1 is evicted with a grace period of 30 s instead of 120 s; a save takes 15 s",
        expect_restart(Reason.PREEMPTED),
        node_rank=1,
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    Expectation(
        "crd-recreated",
        "the CRD is deleted and with it all jobs; both are applied again",
        max_steps_lost=SAVE_STEPS,
        values=(ExpectedValue(OPERATOR_RESTARTS, at_most=4),),
    ),
    Expectation(
        "applied-again-unobserved",
        "the job is deleted and applied again while the controller manager is stopped by SIGSTOP and the CRD changes,"
        " so that the garbage collector does not observe the deletion",
        pending_reason=Reason.PREDECESSOR_TERMINATING,
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
        values=(ExpectedValue("children of the deleted job gone after, s", at_most=120), NO_OPERATOR_RESTARTS),
    ),
    expect_killed_container(
        "etcd-restored",
        "etcd is restored from a backup that was taken 15 s before; the other components of the control plane and the"
        " kubelets are restarted; PID 1 of node 1 is killed",
    ),
)

SHARED_CLUSTER = (*PAUSES, *LOAD, *POLICIES, *STORAGE_AND_CLOCKS, *CLUSTER_CHANGES)
