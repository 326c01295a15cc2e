"""Expected results of faults of the control plane, and of faults that tenants, load and changes of a cluster cause."""

from __future__ import annotations

from finetune_api.v1alpha1.reasons import Reason
from testing.faults.expectation import (
    NO_OPERATOR_RESTARTS,
    OPERATOR_RESTARTS,
    SAVE_STEPS,
    STEPS_LOST_AFTER_SAVE,
    Expectation,
    ExpectedValue,
    expect_no_failure,
    expect_one_restart,
    expect_restart,
)

MAX_STATUS_KIB = 256
SUSPENDED = ExpectedValue("suspended after, s", at_most=40)
NO_LEADER_CHANGE = ExpectedValue("changes of the leader", equal_to=0)


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


CONTROL_PLANE = (
    expect_no_failure("api-server-down", "the API server is stopped for 60 s"),
    expect_one_restart(
        "killed-while-api-server-down", "PID 1 of node 1 is killed while the API server is stopped for 20 s"
    ),
    expect_no_failure("etcd-restart", "etcd is restarted"),
    expect_no_failure("operator-killed-starting", "SIGKILL to both replicas when the first attempt starts"),
    expect_no_failure("operator-killed-running", "SIGKILL to both replicas while the job trains"),
    expect_one_restart(
        "operator-killed-stopping",
        "SIGKILL to both replicas while an attempt stops after a pod deletion",
        Reason.POD_DELETED,
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    expect_one_restart(
        "connections-forgotten",
        "all connections of the leading replica are dropped, as at a load balancer's failover; then PID 1 of node 1"
        " is killed",
    ),
    expect_one_restart(
        "leader-partitioned",
        "the leading replica's Kubernetes node is partitioned for 30 s; PID 1 of node 1, on another node, is killed",
    ),
)

UNTRUSTED = (
    expect_one_restart(
        "deep-object",
        "another tenant creates a job with 9,000 levels of nesting; the replicas are restarted; PID 1 of node 1 is"
        " killed",
        values=(NO_OPERATOR_RESTARTS, ExpectedValue("levels in the stored object", equal_to=9000)),
    ),
    expect_one_restart(
        "message-pattern",
        "the termination message of node 1 has an error type of 4 KB that is expensive to match; PID 1 is killed",
        values=(NO_OPERATOR_RESTARTS, NO_LEADER_CHANGE),
    ),
    expect_one_restart(
        "message-numbers",
        "the termination message of node 1 has the time 1e308 and the loss nan; PID 1 is killed; in the next"
        " attempt the job is suspended and resumed",
        max_steps_lost=SAVE_STEPS + STEPS_LOST_AFTER_SAVE,
        values=(NO_OPERATOR_RESTARTS, SUSPENDED),
    ),
    expect_no_failure(
        "status-numbers",
        "/status of node 0 reports the loss nan and steps of 1e308 and 2**60; the job is suspended and resumed",
        values=(NO_OPERATOR_RESTARTS, SUSPENDED, ExpectedValue("loss in /status", equal_to="nan")),
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    expect_no_failure(
        "messages-fuzzed",
        "64 nodes of another job fail with randomly changed termination messages while no replica runs",
        values=(
            NO_OPERATOR_RESTARTS,
            ExpectedValue("attempt of the other job", equal_to="Failed"),
            ExpectedValue("verdict on the other job after, s", at_most=60),
        ),
    ),
    expect_one_restart(
        "forged-config-map",
        "another tenant creates the next attempt's ConfigMap with an ownerReference of the job and another program;"
        " PID 1 of node 1 is killed",
        values=(ExpectedValue("content of the ConfigMap", equal_to="the operator's"),),
    ),
    expect_one_restart(
        "decoy-pod",
        "another tenant's pod has the labels of node 0 and reports step 1e9 for 25 s; PID 1 of node 1 is killed",
        values=(ExpectedValue("largest step in the status", at_most=100000),),
    ),
    expect_one_restart(
        "unknown-field",
        "a newer CRD has one more field, which is set in the running job; the replicas are restarted; PID 1 of node"
        " 1 is killed; then the older CRD is installed again",
        values=(NO_OPERATOR_RESTARTS, ExpectedValue("field in the stored object", equal_to="set by a user")),
    ),
    expect_one_restart(
        "operator-upgraded",
        "helm upgrade sets another default image, which does not exist; then SIGKILL to rank 3 of the operator's"
        " trainer",
        Reason.RANK_KILLED,
        max_steps_lost=20,
        rank=3,
        values=(ExpectedValue("default image after the upgrade", equal_to="localhost/chaos/none:v2"),),
    ),
    expect_no_failure(
        "finished-job-patched",
        "ttlSecondsAfterFinished and restartPolicy of another, finished job are changed; then kubectl wait"
        " --for=condition=Complete",
        values=(NO_OPERATOR_RESTARTS, ExpectedValue("kubectl wait returns after, s", at_most=20)),
    ),
    expect_no_failure(
        "applied-again-later",
        "the job is deleted in its second attempt, while its program saves for 5 s, and immediately applied again",
        pending_reason=Reason.PREDECESSOR_TERMINATING,
        max_steps_lost=SAVE_STEPS + STEPS_LOST_AFTER_SAVE,
    ),
    expect_one_restart(
        "pod-deadline",
        "kubectl patch sets activeDeadlineSeconds: 1 in the pod of node 1",
        Reason.STOPPED,
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    expect_one_restart(
        "pod-finalizer",
        "a finalizer of another controller is added to the pod of node 1, which is then deleted; the finalizer"
        " stays until the job trains again",
        Reason.POD_DELETED,
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    expect_no_failure(
        "pod-debugged",
        "the pod of node 1 is resized in place and gets an ephemeral container (kubectl debug)",
        values=(ExpectedValue("ephemeral containers", equal_to=1), ExpectedValue("CPU request", equal_to="150m")),
    ),
    expect_no_failure(
        "succeeded-pod-removed",
        "node 1 of another job has succeeded; 15 s later its pod is removed and the replicas are restarted, while"
        " node 0 runs",
        values=(
            ExpectedValue("phase of the other job", equal_to="Complete"),
            ExpectedValue("restarts of the other job", equal_to=0),
        ),
    ),
)

PAUSES = (
    expect_one_restart(
        "leader-paused-4", "the leading replica is stopped by SIGSTOP for 4 s; then PID 1 of node 1 is killed"
    ),
    expect_one_restart(
        "leader-paused-12", "as leader-paused-4, but for 12 s, longer than the renew deadline of the Lease"
    ),
    expect_one_restart("leader-paused-25", "as leader-paused-4, but for 25 s, longer than the Lease"),
    expect_one_restart(
        "operators-paused-25", "both replicas are stopped by SIGSTOP for 25 s, in which PID 1 of node 1 is killed"
    ),
    expect_no_failure(
        "edited-while-operator-away",
        "while no replica runs, the job is suspended, its podTemplate is changed, and it is resumed",
        values=(ExpectedValue("pods of the next attempt with the new podTemplate", equal_to=2),),
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    expect_one_restart(
        "rbac-revoked", "PID 1 of node 1 is killed while the operator's ClusterRoleBinding is missing for 15 s"
    ),
)

LOAD = (
    expect_one_restart(
        "finished-jobs",
        "1,000 finished jobs are created while no replica runs; after the start PID 1 of node 1 is killed",
        values=(ExpectedValue("memory of a replica, MiB", at_most=256), NO_OPERATOR_RESTARTS),
    ),
    expect_large_job(512),
    expect_large_job(1000),
    expect_one_restart(
        "slow-webhook",
        "an admission webhook delays each of 128 pods of another namespace by 8 s; PID 1 of node 1 is killed",
        values=(ExpectedValue("pods of a third namespace created after, s", at_most=15), NO_OPERATOR_RESTARTS),
    ),
)

POLICIES = (
    expect_no_failure(
        "denied-without-code",
        "an admission webhook denies the job's pods without a status code for 8 s",
        pending_reason=Reason.CREATE_REFUSED,
    ),
    expect_one_restart(
        "policy-denied",
        "PID 1 of node 1 is killed; a ValidatingAdmissionPolicy denies the job's pods until the job reports a"
        " pending reason",
        pending_reason=Reason.CREATE_REFUSED,
    ),
    expect_no_failure(
        "pod-security-raised",
        "the pod security level of another namespace is raised above that of a job, a node of which fails; after 8"
        " s the level is lowered again",
        values=(
            ExpectedValue("pending reason of the other job", equal_to=Reason.CREATE_REFUSED.value),
            ExpectedValue("next attempt of the other job runs after, s", at_most=60),
        ),
    ),
)

STORAGE_AND_CLOCKS = (
    expect_no_failure(
        "volume-frozen",
        "the file system of the output hangs for 15 s (fsfreeze), so that writers are in uninterruptible sleep",
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
    expect_one_restart(
        "clocks-apart",
        "the clock of node 0 is 5 s behind; rank 3, on node 1, raises CUDA's ECC error",
        Reason.GPU_HARDWARE,
        rank=3,
        avoids_node=True,
    ),
)

CLUSTER_CHANGES = (
    expect_no_failure(
        "namespace-deleted",
        "the namespace of another, running job is deleted",
        values=(ExpectedValue("namespace gone after, s", at_most=60), NO_OPERATOR_RESTARTS),
    ),
    expect_one_restart(
        "controller-manager-down", "PID 1 of node 1 is killed while the controller manager is stopped for 20 s"
    ),
    expect_one_restart("dns-down-restart", "PID 1 of node 1 is killed while the DNS server is stopped for 20 s"),
    expect_one_restart(
        "spot-reclaim",
        "the pod of node 1 is evicted with a grace period of 30 s instead of 120 s; a save takes 15 s",
        Reason.PREEMPTED,
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    expect_no_failure(
        "crd-recreated",
        "the CRD is deleted and with it all jobs; both are applied again",
        values=(ExpectedValue(OPERATOR_RESTARTS, at_most=4),),
        max_steps_lost=SAVE_STEPS,
    ),
    expect_no_failure(
        "applied-again-unobserved",
        "the job is deleted and applied again while the controller manager is stopped by SIGSTOP and the CRD"
        " changes, so that the garbage collector does not observe the deletion",
        pending_reason=Reason.PREDECESSOR_TERMINATING,
        values=(ExpectedValue("children of the deleted job gone after, s", at_most=120), NO_OPERATOR_RESTARTS),
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    expect_one_restart(
        "etcd-restored",
        "etcd is restored from a backup that was taken 15 s before; the other components of the control plane and"
        " the kubelets are restarted; PID 1 of node 1 is killed",
    ),
)

SHARED_CLUSTER = (*PAUSES, *LOAD, *POLICIES, *STORAGE_AND_CLOCKS, *CLUSTER_CHANGES)
