"""Expected results of faults of pods and Kubernetes nodes, and of changes by users."""

from __future__ import annotations

from finetune_api.v1alpha1.reasons import Reason
from testing.faults.expectation import SAVE_STEPS, STEPS_LOST_AFTER_SAVE, Expectation, expect_restart

PODS = (
    Expectation(
        "container-kill",
        "SIGKILL to PID 1 of node 1",
        expect_restart(Reason.CONTAINER_KILLED),
        node_rank=1,
        max_steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "pod-delete",
        "kubectl delete pod",
        expect_restart(Reason.POD_DELETED),
        node_rank=1,
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    Expectation(
        "pod-delete-start",
        "kubectl delete pod as soon as the pod exists, while its container is being started",
        expect_restart(Reason.POD_DELETED),
        node_rank=1,
    ),
    Expectation(
        "pod-evict",
        "the eviction API",
        expect_restart(Reason.PREEMPTED),
        node_rank=1,
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    Expectation(
        "drain",
        "kubectl drain of node 1's Kubernetes node",
        expect_restart(Reason.PREEMPTED),
        node_rank=1,
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    Expectation(
        "preemption",
        "a pod of higher priority preempts node 1 for 8 s",
        expect_restart(Reason.PREEMPTED),
        node_rank=1,
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    Expectation(
        "sigterm-ignored",
        "kubectl delete pod with a grace period of 15 s; the program ignores SIGTERM until it is killed",
        expect_restart(Reason.POD_DELETED),
        node_rank=1,
        max_steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "service-deleted",
        "the job's Service is deleted, then PID 1 of node 1 is killed",
        expect_restart(Reason.CONTAINER_KILLED),
        node_rank=1,
        max_steps_lost=SAVE_STEPS,
    ),
)

USER_CHANGES = (
    Expectation(
        "pod-relabelled",
        "kubectl label pod removes the job's label from node 1",
        expect_restart(Reason.POD_DELETED),
        node_rank=1,
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    Expectation(
        "image-edited",
        "kubectl set image of node 1's pod; its kubelet restarts the container in place",
        expect_restart(Reason.POD_DELETED),
        node_rank=1,
        max_steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "name-taken-later",
        "the name of the next attempt's ConfigMap is taken for 8 s; PID 1 of node 1 is killed",
        expect_restart(Reason.CONTAINER_KILLED),
        pending_reason=Reason.NAME_TAKEN,
        node_rank=1,
        max_steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "container-not-made",
        "the job's seccomp profile is missing on all Kubernetes nodes for 8 s",
        pending_reason=Reason.CREATE_CONTAINER_ERROR,
        max_steps_lost=0,
    ),
    Expectation(
        "service-edited",
        "the job's Service is edited to select no pod; once the operator has restored it, PID 1 of node 1 is killed",
        expect_restart(Reason.CONTAINER_KILLED),
        node_rank=1,
        max_steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "applied-again",
        "the job is deleted and immediately applied again",
        pending_reason=Reason.PREDECESSOR_TERMINATING,
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    Expectation(
        "config-map-deleted",
        "no Kubernetes node matches the nodeSelector for 8 s, and the job's ConfigMap is deleted",
        pending_reason=Reason.VOLUMES_NOT_READY,
        max_steps_lost=0,
    ),
    Expectation(
        "volume-missing",
        "a Secret in spec.volumes is created after 65 s",
        pending_reason=Reason.VOLUMES_NOT_READY,
        max_steps_lost=0,
    ),
    Expectation(
        "quota-incomplete",
        "a ResourceQuota allows one of two pods for 16 s; startupDeadlineSeconds 8",
        expect_restart(Reason.GANG_INCOMPLETE),
        pending_reason=Reason.CREATE_REFUSED,
    ),
    Expectation(
        "webhook-down",
        "an admission webhook for the job's pods does not answer for 8 s",
        pending_reason=Reason.CREATE_REFUSED,
        max_steps_lost=0,
    ),
)

K8S_NODES = (
    Expectation(
        "kubelet-stop",
        "node 1's kubelet is stopped, but its containers keep running (tolerationSeconds 5 for this job)",
        expect_restart(Reason.NODE_LOST),
        node_rank=1,
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    Expectation("kubelet-restart", "node 1's kubelet is stopped for 10 s", max_steps_lost=0),
    Expectation(
        "partition",
        "node 1's Kubernetes node is partitioned until the job trains on another node (tolerationSeconds 5; the"
        " program waits 15 s for a peer)",
        expect_restart(Reason.NODE_LOST),
        node_rank=1,
        max_steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "partition-healed",
        "node 1's Kubernetes node is partitioned for 6 s, less than the program's timeout",
        max_steps_lost=0,
    ),
    Expectation(
        "node-delete",
        "node 1's kubelet is stopped and its Node is deleted",
        expect_restart(Reason.NODE_LOST),
        node_rank=1,
        max_steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "out-of-service",
        "node 1's kubelet is stopped and its Node gets the taint node.kubernetes.io/out-of-service",
        expect_restart(Reason.NODE_LOST),
        node_rank=1,
        max_steps_lost=SAVE_STEPS,
    ),
)
