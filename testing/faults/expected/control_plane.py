"""Expected results of faults of the control plane and of the data of a job."""

from __future__ import annotations

from finetune_api.v1alpha1.reasons import Reason
from testing.faults.expectation import (
    SAVE_STEPS,
    STEPS_LOST_AFTER_SAVE,
    TRAINER_SAVE_STEPS,
    Expectation,
    expect_failure,
    expect_restart,
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
