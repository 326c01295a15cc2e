"""What Kubernetes 1.36.3 answers to the stories of contract.py; tests hold both the simulator and a cluster to it."""

from typing import Any

ANSWERS: dict[str, dict[str, Any]] = {
    "names_and_uids": {
        "create": "ok",
        "create again": "409 AlreadyExists",
        "delete another uid": "409 Conflict",
        "delete this uid": "ok",
        "delete what is gone": "404 NotFound",
        "read what is gone": "404 NotFound",
        "create anew": "ok",
        "a new uid": True,
        "the old uid is no precondition for the new": "409 Conflict",
    },
    "lists": {"selected": ["list-b"], "kind": "ConfigMapList", "as new as the newest": True},
    "status_of_a_job": {
        "create": "ok",
        "the spec stays": True,
        "generation": 1,
        "an unchanged status is no new version": True,
        "a status on an old version": "409 Conflict",
        "a status of another uid": "409 Conflict",
        "delete in the background": "ok",
        "gone at once": "404 NotFound",
        "a status of what is gone": "404 NotFound",
    },
    "graceful_deletion": {
        "create": "ok",
        "delete within 20 s": "ok",
        "grace after that of 20 s": 20,
        "delete within 40 s": "ok",
        "grace after that of 40 s": 20,
        "delete within 8 s": "ok",
        "grace after that of 8 s": 8,
        "deadlines move by": [0.0, 0.0, -12.0],
        "the name is taken meanwhile": "409 AlreadyExists",
        "it runs meanwhile": "Running",
        "the name is free after": "ok",
        "by force": "ok",
        "gone at once": "404 NotFound",
    },
    "deletion_without_a_kubelet": {
        "unplaced": "ok",
        "unplaced, then": "404 NotFound",
        "ended": "ok",
        "ended, then": "404 NotFound",
    },
    "order_of_events": {
        "types": ["ADDED", "MODIFIED", "DELETED"],
        "versions rise": True,
        "one uid": 1,
        "told again": True,
        "the container's end before the pod's": True,
        "the deletion has a version of its own": True,
        "the deletion carries the last state": "Failed",
    },
}
