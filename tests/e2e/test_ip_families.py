"""Test of training over IPv6, which `make test-matrix` runs on an IPv6-only and on a dual-stack cluster."""

from collections.abc import Callable
from ipaddress import ip_address

import pytest

from testing.cluster.fault_injection import Chaos
from testing.cluster.host.addresses import IpFamily
from testing.processes.cluster_training import build_training_fields, wait_for_checkpoint
from testing.processes.operator_stack import OperatorInstallation, RawBody, get_reported_step, has_condition

pytestmark = [pytest.mark.cluster, pytest.mark.ip_family]

VERSIONS_OF_POD_ADDRESSES = {IpFamily.IPV4: [4], IpFamily.IPV6: [6], IpFamily.DUAL: [4, 6]}
LOOKUP = "import os, socket; print(*{a[4][0] for a in socket.getaddrinfo(os.environ['MASTER_ADDR'], None)})"


def list_address_versions(pod: RawBody) -> list[int]:
    return sorted(ip_address(address["ip"]).version for address in pod["status"]["podIPs"])


def test_job_on_two_nodes_reports_progress_and_restarts_after_a_killed_rank(
    deployment: OperatorInstallation, fault_injector: Chaos, start_job: Callable[..., str]
) -> None:
    job = start_job(training=build_training_fields(max_steps=200, save_steps=20))
    saved = wait_for_checkpoint(deployment, job)

    pods = deployment.list_pods(job)
    expected = VERSIONS_OF_POD_ADDRESSES[fault_injector.cluster.state.ip_family]
    assert [list_address_versions(pod) for pod in pods] == [expected, expected]
    # a headless Service has the primary family only
    looked_up = deployment.kubectl("exec", f"{job}-0-1", "--", "python", "-c", LOOKUP).split()
    assert looked_up == [pod["status"]["podIP"] for pod in pods if pod["metadata"]["name"] == f"{job}-0-0"]

    running = deployment.wait_until(job, lambda j: get_reported_step(j) > 0, description="reporting its progress")
    assert running["status"]["phase"] == "Running"
    fault_injector.kill_rank(deployment.namespace, f"{job}-0-1", rank=3)
    finished = deployment.wait_until_finished(job, timeout_seconds=480)

    assert has_condition(finished, "Complete"), finished["status"]
    failed, last = finished["status"]["attempts"]
    assert (failed["reason"], failed["nodeRank"]) == ("RankKilled", 1)
    assert last["firstStep"] >= saved > 0
    assert finished["status"]["progress"]["step"] == 200
