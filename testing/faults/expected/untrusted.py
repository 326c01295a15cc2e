"""Expected results of faults that objects, messages and users of a shared cluster cause."""

from __future__ import annotations

from finetune_api.v1alpha1.reasons import Reason
from testing.faults.expectation import (
    NO_OPERATOR_RESTARTS,
    SAVE_STEPS,
    STEPS_LOST_AFTER_SAVE,
    Expectation,
    ExpectedValue,
    expect_restart,
)

SUSPENDED = ExpectedValue("suspended after, s", at_most=40)
NO_LEADER_CHANGE = ExpectedValue("changes of the leader", equal_to=0)

UNTRUSTED = (
    Expectation(
        "deep-object",
        "another tenant creates a job with 9,000 levels of nesting; the replicas are restarted; PID 1 of node 1 is"
        " killed",
        expect_restart(Reason.CONTAINER_KILLED),
        node_rank=1,
        max_steps_lost=SAVE_STEPS,
        values=(NO_OPERATOR_RESTARTS, ExpectedValue("levels in the stored object", equal_to=9000)),
    ),
    Expectation(
        "message-pattern",
        "the termination message of node 1 has an error type of 4 KB that is expensive to match; PID 1 is killed",
        expect_restart(Reason.CONTAINER_KILLED),
        node_rank=1,
        max_steps_lost=SAVE_STEPS,
        values=(NO_OPERATOR_RESTARTS, NO_LEADER_CHANGE),
    ),
    Expectation(
        "message-numbers",
        "the termination message of node 1 has the time 1e308 and the loss nan; PID 1 is killed; in the"
        " next attempt the job is suspended and resumed",
        expect_restart(Reason.CONTAINER_KILLED),
        node_rank=1,
        max_steps_lost=SAVE_STEPS + STEPS_LOST_AFTER_SAVE,
        values=(NO_OPERATOR_RESTARTS, SUSPENDED),
    ),
    Expectation(
        "status-numbers",
        "/status of node 0 reports the loss nan and steps of 1e308 and 2**60; the job is suspended and resumed",
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
        values=(NO_OPERATOR_RESTARTS, SUSPENDED, ExpectedValue("loss in /status", equal_to="nan")),
    ),
    Expectation(
        "messages-fuzzed",
        "64 nodes of another job fail with randomly changed termination messages while no replica runs",
        max_steps_lost=0,
        values=(
            NO_OPERATOR_RESTARTS,
            ExpectedValue("attempt of the other job", equal_to="Failed"),
            ExpectedValue("verdict on the other job after, s", at_most=60),
        ),
    ),
    Expectation(
        "forged-config-map",
        "another tenant creates the next attempt's ConfigMap with an ownerReference of the job and another program;"
        " PID 1 of node 1 is killed",
        expect_restart(Reason.CONTAINER_KILLED),
        node_rank=1,
        max_steps_lost=SAVE_STEPS,
        values=(ExpectedValue("content of the ConfigMap", equal_to="the operator's"),),
    ),
    Expectation(
        "decoy-pod",
        "another tenant's pod has the labels of node 0 and reports step 1e9 for 25 s; PID 1 of node 1 is killed",
        expect_restart(Reason.CONTAINER_KILLED),
        node_rank=1,
        max_steps_lost=SAVE_STEPS,
        values=(ExpectedValue("largest step in the status", at_most=100_000),),
    ),
    Expectation(
        "unknown-field",
        "a newer CRD has one more field, which is set in the running job; the replicas are restarted; PID 1 of node 1"
        " is killed; then the older CRD is installed again",
        expect_restart(Reason.CONTAINER_KILLED),
        node_rank=1,
        max_steps_lost=SAVE_STEPS,
        values=(NO_OPERATOR_RESTARTS, ExpectedValue("field in the stored object", equal_to="set by a user")),
    ),
    Expectation(
        "operator-upgraded",
        "helm upgrade sets another default image, which does not exist; then SIGKILL to rank 3 of the operator's"
        " trainer",
        expect_restart(Reason.RANK_KILLED),
        node_rank=1,
        rank=3,
        max_steps_lost=20,
        values=(ExpectedValue("default image after the upgrade", equal_to="localhost/chaos/none:v2"),),
    ),
    Expectation(
        "finished-job-patched",
        "ttlSecondsAfterFinished and restartPolicy of another, finished job are changed; then kubectl wait"
        " --for=condition=Complete",
        max_steps_lost=0,
        values=(NO_OPERATOR_RESTARTS, ExpectedValue("kubectl wait returns after, s", at_most=20)),
    ),
    Expectation(
        "applied-again-later",
        "the job is deleted in its second attempt, while its program saves for 5 s, and immediately applied again",
        pending_reason=Reason.PREDECESSOR_TERMINATING,
        max_steps_lost=SAVE_STEPS + STEPS_LOST_AFTER_SAVE,
    ),
    Expectation(
        "pod-deadline",
        "kubectl patch sets activeDeadlineSeconds: 1 in the pod of node 1",
        expect_restart(Reason.STOPPED),
        node_rank=1,
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    Expectation(
        "pod-finalizer",
        "a finalizer of another controller is added to the pod of node 1, which is then deleted; the finalizer stays"
        " until the job trains again",
        expect_restart(Reason.POD_DELETED),
        node_rank=1,
        max_steps_lost=STEPS_LOST_AFTER_SAVE,
    ),
    Expectation(
        "pod-debugged",
        "the pod of node 1 is resized in place and gets an ephemeral container (kubectl debug)",
        max_steps_lost=0,
        values=(ExpectedValue("ephemeral containers", equal_to=1), ExpectedValue("CPU request", equal_to="150m")),
    ),
    Expectation(
        "succeeded-pod-removed",
        "node 1 of another job has succeeded; 15 s later its pod is removed and the replicas are restarted, while"
        " node 0 runs",
        max_steps_lost=0,
        values=(
            ExpectedValue("phase of the other job", equal_to="Complete"),
            ExpectedValue("restarts of the other job", equal_to=0),
        ),
    ),
)
