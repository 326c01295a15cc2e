"""The expectations for all faults of the matrix, written before their first run; no cluster is needed to read them."""

from __future__ import annotations

from finetune_api.v1alpha1.reasons import Reason
from testing.faults.expectation import Expectation, failed, repaired, restarted

SAVE_STEPS = 10  # of training_program.py, which also saves at SIGTERM
TRAINER_SAVE_STEPS = 20  # of the operator's own trainer
STEPS_LOST_AFTER_SAVE = 1  # most steps lost if there was time to save

RANKS = (
    Expectation("rank-exception", "rank 3 raises a ValueError", failed(Reason.USER_CODE_ERROR), node_rank=1, rank=3),
    Expectation(
        "rank-exit-42",
        "rank 3 calls sys.exit(42)",
        restarted(Reason.UNEXPLAINED),
        node_rank=1,
        rank=3,
        steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "rank-sigkill", "SIGKILL to rank 3", restarted(Reason.RANK_KILLED), node_rank=1, rank=3, steps_lost=SAVE_STEPS
    ),
    Expectation(
        "rank-segfault",
        "rank 3 reads address 0",
        restarted(Reason.RANK_CRASHED),
        node_rank=1,
        rank=3,
        steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "rank-sigstop",
        "SIGSTOP to rank 3 of the operator's trainer; hangTimeoutSeconds 20",
        restarted(Reason.HANG),
        node_rank=1,
        rank=3,
        steps_lost=TRAINER_SAVE_STEPS,
    ),
    Expectation(
        "program-hangs",
        "a program of the user's own hangs and reports no more progress; hangTimeoutSeconds 10",
        restarted(Reason.HANG),
        steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "cuda-oom",
        "CUDA's OOM error, raised by micro-batches of more than one sample in the operator's trainer",
        repaired(Reason.CUDA_OUT_OF_MEMORY),
    ),
    Expectation(
        "cuda-oom-command",
        "CUDA's OOM error, raised by rank 3 of a program of the user's own, whose batch the operator cannot change",
        failed(Reason.CUDA_OUT_OF_MEMORY),
        node_rank=1,
        rank=3,
    ),
    Expectation(
        "gpu-ecc",
        "CUDA's uncorrectable ECC error, raised by rank 3; the next attempt must avoid that Kubernetes node",
        restarted(Reason.GPU_HARDWARE),
        node_rank=1,
        rank=3,
        steps_lost=SAVE_STEPS,
        avoids=True,
    ),
    Expectation(
        "port-in-use",
        "rank 3 raises EADDRINUSE",
        restarted(Reason.PORT_IN_USE),
        node_rank=1,
        rank=3,
        steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "link-lost",
        "rank 3 raises Python's own ConnectionResetError, as when the network fails: all are victims",
        restarted(Reason.PEER_LOST),
        steps_lost=SAVE_STEPS,
    ),
)

RESOURCES = (
    Expectation(
        "rank-oom",
        "rank 3 exceeds the container's memory limit; the kernel kills only that process (cgroup v1)",
        failed(Reason.HOST_OUT_OF_MEMORY),
        node_rank=1,
    ),
    Expectation(
        "container-oom",
        "files in a memory volume exceed the container's limit: the kernel kills processes until PID 1 is dead",
        failed(Reason.HOST_OUT_OF_MEMORY),
        node_rank=1,
    ),
    Expectation(
        "oom-more-memory",
        "as rank-oom, with restartPolicy.maxMemory above what the rank needs",
        repaired(Reason.HOST_OUT_OF_MEMORY),
        node_rank=1,
        steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "shm-full",
        "rank 3 writes more to /dev/shm than its size (ENOSPC)",
        repaired(Reason.SHARED_MEMORY_EXHAUSTED),
        node_rank=1,
        steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "shm-sigbus",
        "rank 3 maps a file in /dev/shm and writes more than its size (SIGBUS)",
        repaired(Reason.SHARED_MEMORY_EXHAUSTED),
        node_rank=1,
        steps_lost=SAVE_STEPS,
    ),
    Expectation("disk-full", "rank 3 writes to a volume that is full", failed(Reason.DISK_FULL), node_rank=1),
    Expectation(
        "storage-limit",
        "node 1 exceeds its ephemeral-storage limit and is evicted by the kubelet",
        failed(Reason.EVICTED),
        node_rank=1,
    ),
)

PODS = (
    Expectation(
        "container-kill",
        "SIGKILL to PID 1 of node 1",
        restarted(Reason.CONTAINER_KILLED),
        node_rank=1,
        steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "pod-delete", "kubectl delete pod", restarted(Reason.POD_DELETED), node_rank=1, steps_lost=STEPS_LOST_AFTER_SAVE
    ),
    Expectation(
        "pod-evict", "the eviction API", restarted(Reason.PREEMPTED), node_rank=1, steps_lost=STEPS_LOST_AFTER_SAVE
    ),
    Expectation(
        "drain",
        "kubectl drain of node 1's Kubernetes node",
        restarted(Reason.PREEMPTED),
        node_rank=1,
        steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    Expectation(
        "preemption",
        "a pod of higher priority preempts node 1 for 8 s",
        restarted(Reason.PREEMPTED),
        node_rank=1,
        steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    Expectation(
        "sigterm-ignored",
        "kubectl delete pod with a grace period of 15 s; the program ignores SIGTERM until it is killed",
        restarted(Reason.POD_DELETED),
        node_rank=1,
        steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "service-deleted",
        "the job's Service is deleted, then PID 1 of node 1 is killed",
        restarted(Reason.CONTAINER_KILLED),
        node_rank=1,
        steps_lost=SAVE_STEPS,
    ),
)

USER_CHANGES = (
    Expectation(
        "pod-relabelled",
        "kubectl label pod removes the job's label from node 1",
        restarted(Reason.POD_DELETED),
        node_rank=1,
        steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    Expectation(
        "image-edited",
        "kubectl set image of node 1's pod; its kubelet restarts the container in place",
        restarted(Reason.POD_DELETED),
        node_rank=1,
        steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "name-taken-later",
        "another ConfigMap has the name of the next attempt's for 8 s; PID 1 of node 1 is killed",
        restarted(Reason.CONTAINER_KILLED),
        waits_for=Reason.NAME_TAKEN,
        node_rank=1,
        steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "container-not-made",
        "the seccomp profile of the job is missing on all Kubernetes nodes for 8 s",
        waits_for=Reason.CREATE_CONTAINER_ERROR,
        steps_lost=0,
    ),
    Expectation(
        "service-edited",
        "the job's Service is edited to select no pod; once the operator has restored it, PID 1 of node 1 is killed",
        restarted(Reason.CONTAINER_KILLED),
        node_rank=1,
        steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "applied-again",
        "the job is deleted and applied again at once",
        waits_for=Reason.PREDECESSOR_TERMINATING,
        steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    Expectation(
        "config-map-deleted",
        "a nodeSelector that no Kubernetes node matches for 8 s; the job's ConfigMap is deleted meanwhile",
        waits_for=Reason.VOLUMES_NOT_READY,
        steps_lost=0,
    ),
    Expectation(
        "volume-missing",
        "a Secret of spec.volumes is created after 65 s",
        waits_for=Reason.VOLUMES_NOT_READY,
        steps_lost=0,
    ),
    Expectation(
        "quota-incomplete",
        "a ResourceQuota allows one of two pods for 16 s; startupDeadlineSeconds 8",
        restarted(Reason.GANG_INCOMPLETE),
        waits_for=Reason.CREATE_REFUSED,
    ),
    Expectation(
        "webhook-down",
        "an admission webhook for the job's pods does not answer for 8 s",
        waits_for=Reason.CREATE_REFUSED,
        steps_lost=0,
    ),
)

K8S_NODES = (
    Expectation(
        "kubelet-stop",
        "node 1's kubelet is stopped, its containers keep running (tolerationSeconds 5 for this job)",
        restarted(Reason.NODE_LOST),
        node_rank=1,
        steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    Expectation("kubelet-restart", "node 1's kubelet is stopped for 10 s", steps_lost=0),
    Expectation(
        "partition",
        "node 1's Kubernetes node is partitioned until the job trains elsewhere (tolerationSeconds 5; the program"
        " waits 15 s for a peer)",
        restarted(Reason.NODE_LOST),
        node_rank=1,
        steps_lost=SAVE_STEPS,
    ),
    Expectation("partition-healed", "the same for 6 s, less than the program's timeout", steps_lost=0),
    Expectation(
        "node-delete",
        "node 1's Kubernetes node is gone: kubelet stopped, Node deleted",
        restarted(Reason.NODE_LOST),
        node_rank=1,
        steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "out-of-service",
        "node 1's kubelet is stopped and its Node tainted node.kubernetes.io/out-of-service",
        restarted(Reason.NODE_LOST),
        node_rank=1,
        steps_lost=SAVE_STEPS,
    ),
)

STARTS = (
    Expectation(
        "image-missing",
        "an image that does not exist; pendingDeadlineSeconds 30",
        failed(Reason.PENDING_DEADLINE_EXCEEDED),
        waits_for=Reason.IMAGE_PULL_FAILED,
    ),
    Expectation("image-name-invalid", "spec.image is not a valid image name", failed(Reason.IMAGE_PULL_FAILED)),
    Expectation("image-without-python", "spec.image has no Python", failed(Reason.START_ERROR)),
    Expectation(
        "unschedulable",
        "a nodeSelector that no Kubernetes node matches for 8 s",
        waits_for=Reason.UNSCHEDULABLE,
        steps_lost=0,
    ),
    Expectation(
        "unschedulable-for-ever",
        "the same permanently; pendingDeadlineSeconds 10",
        failed(Reason.PENDING_DEADLINE_EXCEEDED),
        waits_for=Reason.UNSCHEDULABLE,
    ),
    Expectation(
        "gang-incomplete",
        "resources for only one of two nodes for 16 s; startupDeadlineSeconds 8",
        restarted(Reason.GANG_INCOMPLETE),
        waits_for=Reason.UNSCHEDULABLE,
    ),
    Expectation("quota", "a ResourceQuota allows no pod for 8 s", waits_for=Reason.CREATE_REFUSED, steps_lost=0),
    Expectation(
        "secret-missing", "a Secret of spec.env is created after 8 s", waits_for=Reason.CONFIG_MISSING, steps_lost=0
    ),
    Expectation("dns-blocked", "no DNS server for the first 20 s", steps_lost=0),
    Expectation("name-taken", "a Service of another owner has the job's name", failed(Reason.NAME_TAKEN)),
)

CONTROL_PLANE = (
    Expectation("api-server-down", "the API server is stopped for 60 s", steps_lost=0),
    Expectation(
        "killed-while-api-server-down",
        "the API server is stopped for 20 s; meanwhile PID 1 of node 1 is killed",
        restarted(Reason.CONTAINER_KILLED),
        node_rank=1,
        steps_lost=SAVE_STEPS,
    ),
    Expectation("etcd-restart", "etcd is restarted", steps_lost=0),
    Expectation("operator-killed-starting", "SIGKILL to both replicas when the first attempt starts", steps_lost=0),
    Expectation("operator-killed-running", "SIGKILL to both replicas while the job trains", steps_lost=0),
    Expectation(
        "operator-killed-stopping",
        "SIGKILL to both replicas while an attempt stops after its pod was deleted",
        restarted(Reason.POD_DELETED),
        node_rank=1,
        steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    Expectation(
        "connections-forgotten",
        "every connection of the leading replica is dropped, as by a load balancer that fails over; then PID 1 of"
        " node 1 is killed",
        restarted(Reason.CONTAINER_KILLED),
        node_rank=1,
        steps_lost=SAVE_STEPS,
    ),
    Expectation(
        "leader-partitioned",
        "the leading replica's Kubernetes node is partitioned for 30 s; then PID 1 of node 1 elsewhere is killed",
        restarted(Reason.CONTAINER_KILLED),
        node_rank=1,
        steps_lost=SAVE_STEPS,
    ),
)

DATA = (
    Expectation(
        "checkpoint-truncated",
        "SIGKILL to rank 3 of the operator's trainer; the newest checkpoint is truncated",
        restarted(Reason.RANK_KILLED),
        node_rank=1,
        rank=3,
        steps_lost=2 * TRAINER_SAVE_STEPS,
    ),
    Expectation(
        "checkpoints-truncated",
        "the same with every checkpoint",
        (*restarted(Reason.RANK_KILLED), *failed(Reason.CHECKPOINT_CORRUPT)),
        node_rank=1,
        rank=3,
    ),
    Expectation(
        "dataset-vanished",
        "SIGKILL to rank 3 of the operator's trainer; the dataset is removed",
        (*restarted(Reason.RANK_KILLED), *failed(Reason.DATASET_ERROR)),
        node_rank=1,
        rank=3,
    ),
    Expectation("nan-loss", "the model of the operator's trainer starts to return NaN", failed(Reason.NON_FINITE_LOSS)),
)

EXPECTATIONS = (*RANKS, *RESOURCES, *PODS, *USER_CHANGES, *K8S_NODES, *STARTS, *CONTROL_PLANE, *DATA)
