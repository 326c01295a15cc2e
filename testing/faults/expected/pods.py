"""Expected results of faults of pods and Kubernetes nodes, and of changes by users."""

from __future__ import annotations

from finetune_api.v1alpha1.reasons import Reason
from testing.faults.expectation import (
    STEPS_LOST_AFTER_SAVE,
    Expectation,
    expect_no_failure,
    expect_one_restart,
    expect_restart,
)

PODS = (
    expect_one_restart("container-kill", "SIGKILL to PID 1 of node 1"),
    expect_one_restart("pod-delete", "kubectl delete pod", Reason.POD_DELETED, max_steps_lost=STEPS_LOST_AFTER_SAVE),
    expect_one_restart(
        "pod-delete-start",
        "kubectl delete pod as soon as the pod exists, while its container is being started",
        Reason.POD_DELETED,
        max_steps_lost=None,
    ),
    expect_one_restart("pod-evict", "the eviction API", Reason.PREEMPTED, max_steps_lost=STEPS_LOST_AFTER_SAVE),
    expect_one_restart(
        "drain", "kubectl drain of node 1's Kubernetes node", Reason.PREEMPTED, max_steps_lost=STEPS_LOST_AFTER_SAVE
    ),
    expect_one_restart(
        "preemption",
        "a pod of higher priority preempts node 1 for 8 s",
        Reason.PREEMPTED,
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    expect_one_restart(
        "sigterm-ignored",
        "kubectl delete pod with a grace period of 15 s; the program ignores SIGTERM until it is killed",
        Reason.POD_DELETED,
    ),
    expect_one_restart("service-deleted", "the job's Service is deleted, then PID 1 of node 1 is killed"),
)

USER_CHANGES = (
    expect_one_restart(
        "pod-relabelled",
        "kubectl label pod removes the job's label from node 1",
        Reason.POD_DELETED,
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    expect_one_restart(
        "image-edited",
        "kubectl set image of node 1's pod; its kubelet restarts the container in place",
        Reason.POD_DELETED,
    ),
    expect_one_restart(
        "name-taken-later",
        "the name of the next attempt's ConfigMap is taken for 8 s; PID 1 of node 1 is killed",
        pending_reason=Reason.NAME_TAKEN,
    ),
    expect_no_failure(
        "container-not-made",
        "the job's seccomp profile is missing on all Kubernetes nodes for 8 s",
        pending_reason=Reason.CREATE_CONTAINER_ERROR,
    ),
    expect_one_restart(
        "service-edited",
        "the job's Service is edited to select no pod; once the operator has restored it, PID 1 of node 1 is killed",
    ),
    expect_no_failure(
        "applied-again",
        "the job is deleted and immediately applied again",
        pending_reason=Reason.PREDECESSOR_TERMINATING,
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    expect_no_failure(
        "config-map-deleted",
        "no Kubernetes node matches the nodeSelector for 8 s, and the job's ConfigMap is deleted",
        pending_reason=Reason.VOLUMES_NOT_READY,
    ),
    expect_no_failure(
        "volume-missing", "a Secret in spec.volumes is created after 65 s", pending_reason=Reason.VOLUMES_NOT_READY
    ),
    Expectation(
        "quota-incomplete",
        "a ResourceQuota allows one of two pods for 16 s; startupDeadlineSeconds 8",
        expect_restart(Reason.GANG_INCOMPLETE),
        pending_reason=Reason.CREATE_REFUSED,
    ),
    expect_no_failure(
        "webhook-down",
        "an admission webhook for the job's pods does not answer for 8 s",
        pending_reason=Reason.CREATE_REFUSED,
    ),
)

K8S_NODES = (
    expect_one_restart(
        "kubelet-stop",
        "node 1's kubelet is stopped, but its containers keep running (tolerationSeconds 5 for this job)",
        Reason.NODE_LOST,
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    expect_no_failure("kubelet-restart", "node 1's kubelet is stopped for 10 s"),
    expect_one_restart(
        "partition",
        "node 1's Kubernetes node is partitioned until the job trains on another node (tolerationSeconds 5; the"
        " program waits 15 s for a peer)",
        Reason.NODE_LOST,
    ),
    expect_no_failure(
        "partition-healed", "node 1's Kubernetes node is partitioned for 6 s, less than the program's timeout"
    ),
    expect_one_restart("node-delete", "node 1's kubelet is stopped and its Node is deleted", Reason.NODE_LOST),
    expect_one_restart(
        "out-of-service",
        "node 1's kubelet is stopped and its Node gets the taint node.kubernetes.io/out-of-service",
        Reason.NODE_LOST,
    ),
)
