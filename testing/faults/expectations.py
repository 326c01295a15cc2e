"""Expectations for all faults of the matrix, written before their first run."""

from __future__ import annotations

from finetune_api.v1alpha1.reasons import Reason
from testing.faults.expectation import Expectation, expect_failure, expect_repair, expect_restart

SAVE_STEPS = 10  # steps between saves of training_program.py, which also saves on SIGTERM
TRAINER_SAVE_STEPS = 20  # steps between saves of finetune_trainer
STEPS_LOST_AFTER_SAVE = 1  # maximum number of lost steps if the program saved before it stopped

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

STARTS = (
    Expectation(
        "image-missing",
        "an image that does not exist; pendingDeadlineSeconds 30",
        expect_failure(Reason.PENDING_DEADLINE_EXCEEDED),
        pending_reason=Reason.IMAGE_PULL_FAILED,
    ),
    Expectation("image-name-invalid", "spec.image is not a valid image name", expect_failure(Reason.IMAGE_PULL_FAILED)),
    Expectation("image-without-python", "spec.image has no Python", expect_failure(Reason.START_ERROR)),
    Expectation(
        "unschedulable",
        "no Kubernetes node matches the nodeSelector for 8 s",
        pending_reason=Reason.UNSCHEDULABLE,
        max_steps_lost=0,
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
    Expectation(
        "quota", "a ResourceQuota allows no pod for 8 s", pending_reason=Reason.CREATE_REFUSED, max_steps_lost=0
    ),
    Expectation(
        "secret-missing",
        "a Secret in spec.env is created after 8 s",
        pending_reason=Reason.CONFIG_MISSING,
        max_steps_lost=0,
    ),
    Expectation("dns-blocked", "the DNS server is stopped for the first 20 s", max_steps_lost=0),
    Expectation("name-taken", "another Service already has the job's name", expect_failure(Reason.NAME_TAKEN)),
)

CONTROL_PLANE = (
    Expectation("api-server-down", "the API server is stopped for 60 s", max_steps_lost=0),
    Expectation(
        "killed-while-api-server-down",
        "PID 1 of node 1 is killed while the API server is stopped for 20 s",
        expect_restart(Reason.CONTAINER_KILLED),
        node_rank=1,
        max_steps_lost=SAVE_STEPS,
    ),
    Expectation("etcd-restart", "etcd is restarted", max_steps_lost=0),
    Expectation("operator-killed-starting", "SIGKILL to both replicas when the first attempt starts", max_steps_lost=0),
    Expectation("operator-killed-running", "SIGKILL to both replicas while the job trains", max_steps_lost=0),
    Expectation(
        "operator-killed-stopping",
        "SIGKILL to both replicas while an attempt stops after a pod deletion",
        expect_restart(Reason.POD_DELETED),
        node_rank=1,
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    Expectation(
        "connections-forgotten",
        "all connections of the leading replica are dropped, as at a load balancer's failover; then PID 1 of node 1"
        " is killed",
        expect_restart(Reason.CONTAINER_KILLED),
        node_rank=1,
        max_steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "leader-partitioned",
        "the leading replica's Kubernetes node is partitioned for 30 s; PID 1 of node 1, on another node, is killed",
        expect_restart(Reason.CONTAINER_KILLED),
        node_rank=1,
        max_steps_lost=SAVE_STEPS,
    ),
)

DATA = (
    Expectation(
        "checkpoint-truncated",
        "SIGKILL to rank 3 of the operator's trainer; the newest checkpoint is truncated",
        expect_restart(Reason.RANK_KILLED),
        node_rank=1,
        rank=3,
        max_steps_lost=2 * TRAINER_SAVE_STEPS,
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

EXPECTATIONS = (*RANKS, *RESOURCES, *PODS, *USER_CHANGES, *K8S_NODES, *STARTS, *CONTROL_PLANE, *DATA)
