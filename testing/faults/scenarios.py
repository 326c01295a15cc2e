"""Twenty scenarios of a shared cluster, and the faults, tests and simulated histories that cover each of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CoveredScenario:
    """A scenario and what covers it.

    faults: names of faults of the matrix.
    others: tests and programs that cover the rest of the scenario, with the reason if it is not in the matrix.
    """

    title: str
    faults: tuple[str, ...]
    others: str = ""


SCENARIOS = (
    CoveredScenario(
        "the leader pauses for 4, 12 and 25 s, then events arrive",
        ("leader-paused-4", "leader-paused-12", "leader-paused-25", "operators-paused-25"),
    ),
    CoveredScenario("an object that cannot be parsed, in a LIST and in a watch event", ("deep-object",)),
    CoveredScenario(
        "random termination messages and `/status` bodies in whole passes",
        ("message-pattern", "message-numbers", "status-numbers", "messages-fuzzed"),
        "`make fuzz`",
    ),
    CoveredScenario(
        "upgrade of the operator with jobs in every state",
        ("operator-upgraded",),
        "`make test-upgrade`, also with a checkpoint of the previous release",
    ),
    CoveredScenario("a CRD that is newer than the operator, and back", ("unknown-field",), "`make test-upgrade`"),
    CoveredScenario(
        "thousands of finished jobs, and a long soak",
        ("finished-jobs",),
        "10,000 finished jobs: `make bench-memory`, because etcd and API server would need an hour of the two cores;"
        " `make soak`",
    ),
    CoveredScenario(
        "jobs of 512 and 1,000 nodes that fail with multibyte messages", ("large-job-512", "large-job-1000")
    ),
    CoveredScenario("a slow admission webhook in one namespace", ("slow-webhook",)),
    CoveredScenario("suspend, change and resume while the operator is away", ("edited-while-operator-away",)),
    CoveredScenario("delete and apply again in a later attempt, with a user's program", ("applied-again-later",)),
    CoveredScenario(
        "denial without a code, denial by a policy, pod security raised while a job runs",
        ("denied-without-code", "policy-denied", "pod-security-raised"),
    ),
    CoveredScenario("change of TTL or restart policy after the end, then kubectl wait", ("finished-job-patched",)),
    CoveredScenario("etcd restored from a backup; CRD deleted and applied again", ("etcd-restored", "crd-recreated")),
    CoveredScenario(
        "deadline or finalizer on a pod, in-place resize, kubectl debug",
        ("pod-deadline", "pod-finalizer", "pod-debugged"),
    ),
    CoveredScenario(
        "a succeeded pod is removed while other nodes run, then the operator restarts", ("succeeded-pod-removed",)
    ),
    CoveredScenario(
        "the file server hangs; the output becomes read-only during a save",
        ("volume-frozen", "volume-hangs", "volume-read-only"),
    ),
    CoveredScenario("clocks of nodes differ by 5 s", ("clocks-apart",)),
    CoveredScenario(
        "a namespace is deleted while its job runs; RBAC is revoked and given back during a restart",
        ("namespace-deleted", "rbac-revoked"),
        "token rotation: `test_all_connections_use_the_rotated_token`, because kubelets rotate them about once an hour",
    ),
    CoveredScenario(
        "reuse of a pod IP, and decoy pods with the job's labels",
        ("decoy-pod",),
        "reuse of an IP: `test_response_of_another_pod_is_ignored`, because the IPs of this cluster are not reused"
        " within a run",
    ),
    CoveredScenario(
        "controller manager or DNS down during a restart; spot reclaim with 30 s of notice",
        ("controller-manager-down", "dns-down-restart", "spot-reclaim"),
        "overlapping releases: `test_release_that_overlaps_with_another_one_is_rejected`; IPv6 and Kubernetes versions:"
        " end-to-end tests",
    ),
)
