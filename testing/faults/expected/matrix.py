"""All expectations of the fault matrix, each of which was committed before the first run of its fault."""

from __future__ import annotations

from testing.faults.expected.jobs import DATA, RANKS, RESOURCES, STARTS
from testing.faults.expected.pods import K8S_NODES, PODS, USER_CHANGES
from testing.faults.expected.shared_cluster import CONTROL_PLANE, SHARED_CLUSTER, UNTRUSTED

JOB_EXPECTATIONS = (*RANKS, *RESOURCES, *PODS, *USER_CHANGES, *K8S_NODES, *STARTS)
EXPECTATIONS = (*JOB_EXPECTATIONS, *CONTROL_PLANE, *DATA, *UNTRUSTED, *SHARED_CLUSTER)
