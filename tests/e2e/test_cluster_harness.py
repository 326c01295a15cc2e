"""Tests of the throwaway cluster: networking, storage, fault injection and complete removal."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from testing.cluster.fault_injection import Chaos
from testing.cluster.host.commands import HarnessError
from testing.cluster.host.preflight import find_host_problem
from testing.cluster.images.project_images import ImageBuilder, get_image_name
from testing.cluster.kwok import start_kwok, stop_kwok
from testing.cluster.provider import ThrowawayProvider
from testing.cluster.throwaway import ThrowawayCluster

# the other suites show whether most of the harness works
pytestmark = [pytest.mark.cluster, pytest.mark.long("starts clusters of its own, for minutes"), pytest.mark.alone]

SERVER_COMMAND = (
    "for rank in 0 1; do RANK=$rank LOCAL_RANK=$rank sleep 600 & done; cd /shared; exec python -m http.server 8000"
)
GET_PROGRAM = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=2).read().decode())"
BUSY_PROGRAM = """
import time
end, before = time.monotonic() + 2, time.process_time()
while time.monotonic() < end:
    pass
print(time.process_time() - before)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThrowawayCluster]:
    reason = find_host_problem() or (None if shutil.which("go") else "Go is not installed")
    if reason:
        pytest.skip(reason)
    cluster = ThrowawayCluster.from_name("harness")
    cluster.up()
    yield cluster
    cluster.down(purge=True)


@pytest.fixture(scope="module")
def provider(cluster: ThrowawayCluster) -> ThrowawayProvider:
    """Return a cluster provider with a Service and two pods, one per node, which serve a shared folder."""
    provider = ThrowawayProvider(cluster)
    cluster.load_image(ImageBuilder(cluster.cache).build("operator"))
    cluster.kubectl.apply(*provider.build_shared_claim_objects("default", "files"))
    (provider.get_shared_folder("default", "files") / "greeting").write_text("hello from the host")
    pods = (build_web_pod(f"web-{number}", node=f"node{number}") for number in (1, 2))
    service = {"clusterIP": "None", "selector": {"app": "web"}, "publishNotReadyAddresses": True}
    cluster.kubectl.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": service},
        *pods,
    )
    cluster.kubectl("wait", "--for=condition=Ready", "pod/web-1", "pod/web-2", "--timeout=60s")
    return provider


def build_web_pod(name: str, *, node: str) -> dict[str, Any]:
    """Build a web server pod that complies with the restricted pod security level."""
    container = {
        "name": "main",
        "image": get_image_name("operator"),
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", SERVER_COMMAND],
        "volumeMounts": [{"name": "files", "mountPath": "/shared"}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "web"}},
        "spec": {
            "nodeName": node,
            "hostname": name,
            "subdomain": "web",
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "volumes": [{"name": "files", "persistentVolumeClaim": {"claimName": "files"}}],
            "containers": [container],
        },
    }


def fetch(cluster: ThrowawayCluster, url: str) -> str:
    """Return the response to an HTTP request from the first pod."""
    return cluster.kubectl("exec", "web-1", "--", "python", "-c", GET_PROGRAM, url).strip()


def fetch_greeting(cluster: ThrowawayCluster, *, host: str) -> str:
    """Return the served greeting, or the error message of the request."""
    try:
        return fetch(cluster, f"http://{host}:8000/greeting")
    except HarnessError as error:
        return str(error)


def wait_for_condition(condition: Callable[[], bool], *, timeout_seconds: float = 60) -> bool:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def get_pod_ip(cluster: ThrowawayCluster, name: str) -> str:
    return str(cluster.kubectl.get("pod", name, namespace="default")["status"]["podIP"])


def wait_for_greeting(cluster: ThrowawayCluster, name: str) -> None:
    """Wait until the web server of a pod that is Ready accepts connections."""
    address = get_pod_ip(cluster, name)
    assert wait_for_condition(lambda: fetch_greeting(cluster, host=address) == "hello from the host")


def test_starting_a_running_cluster_again_restarts_no_program(cluster: ThrowawayCluster) -> None:
    before = {daemon.name: daemon.pid() for daemon in cluster.daemons()}

    cluster.up()

    assert {daemon.name: daemon.pid() for daemon in cluster.daemons()} == before
    assert len(before) == 11
    assert None not in before.values()


def test_claim_is_the_same_host_folder_on_every_node(provider: ThrowawayProvider) -> None:
    kubectl = provider.cluster.kubectl

    kubectl("exec", "web-2", "--", "sh", "-c", "echo written on node2 > /shared/note")

    assert kubectl("exec", "web-1", "--", "cat", "/shared/note").strip() == "written on node2"
    assert (provider.get_shared_folder("default", "files") / "note").read_text().strip() == "written on node2"


def test_pods_on_two_nodes_reach_each_other_by_dns_name(provider: ThrowawayProvider) -> None:
    assert fetch_greeting(provider.cluster, host="web-2.web.default.svc.cluster.local") == "hello from the host"


@pytest.mark.parametrize("other_node", ["node1", None], ids=["from one node", "from everything"])
def test_partition_drops_packets_and_can_be_removed(provider: ThrowawayProvider, other_node: str | None) -> None:
    cluster, fault_injector = provider.cluster, provider.chaos
    address = get_pod_ip(cluster, "web-2")

    fault_injector.partition("node2", other_node=other_node)
    partitioned = fetch_greeting(cluster, host=address)
    fault_injector.heal("node2")

    assert "timed out" in partitioned
    assert fetch_greeting(cluster, host=address) == "hello from the host"


def test_failed_lookup_is_cached_only_with_the_dns_cache(provider: ThrowawayProvider) -> None:
    cluster, fault_injector = provider.cluster, provider.chaos
    responses = {}
    for cached in (True, False):
        fault_injector.set_dns_cache(cached)
        name = f"late-{cached}".lower()
        assert "hello" not in fetch_greeting(cluster, host=f"{name}.web")
        cluster.kubectl.apply(build_web_pod(name, node="node2"))
        cluster.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=30s")
        wait_for_greeting(cluster, name)
        responses[cached] = fetch_greeting(cluster, host=f"{name}.web")
        cluster.kubectl("delete", "pod", name)

    assert "Name or service not known" in responses[True] or "name resolution" in responses[True]
    assert responses[False] == "hello from the host"


def test_pods_keep_running_while_their_kubelet_is_stopped(provider: ThrowawayProvider) -> None:
    cluster, fault_injector = provider.cluster, provider.chaos

    fault_injector.stop_kubelet("node2")
    response = fetch_greeting(cluster, host="web-2.web")
    not_ready = wait_for_condition(lambda: "node2" not in cluster.kubectl.list_ready_nodes())
    fault_injector.start_kubelet("node2")

    assert response == "hello from the host"
    assert not_ready
    assert wait_for_condition(lambda: "node2" in cluster.kubectl.list_ready_nodes())


def test_objects_survive_a_restart_of_api_server_and_etcd(provider: ThrowawayProvider) -> None:
    cluster, fault_injector = provider.cluster, provider.chaos
    fault_injector.stop_api_server()
    assert not cluster.kubectl.succeeds("get", "--raw", "/readyz")

    fault_injector.start_api_server()
    fault_injector.restart_etcd()

    assert "web-1" in cluster.kubectl("get", "pods", "--output", "name")


def test_cpu_limit_throttles_all_pods_of_a_node(provider: ThrowawayProvider) -> None:
    cluster, fault_injector = provider.cluster, provider.chaos

    fault_injector.limit_cpu("node1", cores=0.2)
    cpu_seconds = float(cluster.kubectl("exec", "web-1", "--", "python", "-c", BUSY_PROGRAM))
    fault_injector.limit_cpu("node1", cores=None)

    assert cpu_seconds < 0.7


def test_network_limit_slows_down_a_transfer(provider: ThrowawayProvider) -> None:
    cluster, fault_injector = provider.cluster, provider.chaos
    large = provider.get_shared_folder("default", "files") / "large"
    large.write_bytes(b"x" * 400_000)
    url = f"http://{get_pod_ip(cluster, 'web-2')}:8000/large"

    fault_injector.limit_network("node2", kbit_per_second=1000)
    started_at = time.monotonic()
    content = fetch(cluster, url)
    seconds = time.monotonic() - started_at
    fault_injector.limit_network("node2", kbit_per_second=None)

    assert len(content) == 400_000
    assert 2.5 < seconds < 30


def test_single_rank_or_whole_container_can_be_killed(provider: ThrowawayProvider) -> None:
    cluster, fault_injector = provider.cluster, provider.chaos
    assert sorted(fault_injector.find_rank_processes("default", "web-2")) == [0, 1]

    fault_injector.kill_rank("default", "web-2", rank=1)
    assert wait_for_condition(lambda: sorted(fault_injector.find_rank_processes("default", "web-2")) == [0])
    assert fetch_greeting(cluster, host="web-2.web") == "hello from the host"

    fault_injector.kill_container("default", "web-2")
    assert wait_for_condition(lambda: get_exit_code(cluster, "web-2") == 137)


def get_exit_code(cluster: ThrowawayCluster, name: str) -> int | None:
    status = cluster.kubectl.get("pod", name, namespace="default")["status"]["containerStatuses"][0]
    code: int | None = status["state"].get("terminated", {}).get("exitCode")
    return code


def test_pods_on_fake_nodes_become_ready(cluster: ThrowawayCluster) -> None:
    start_kwok(cluster, 3)
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "fake"},
        "spec": {
            "nodeSelector": {"type": "kwok"},
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "main", "image": "none"}],
        },
    }

    cluster.kubectl.apply(body)
    cluster.kubectl("wait", "--for=condition=Ready", "pod/fake", "--timeout=30s")
    nodes = json.loads(cluster.kubectl("get", "nodes", "--selector=type=kwok", "--output=json"))["items"]
    stop_kwok(cluster)

    assert len(nodes) == 3


def test_removing_the_cluster_keeps_only_the_images(cluster: ThrowawayCluster, provider: ThrowawayProvider) -> None:
    """This test must be the last one, because it removes the cluster while pods are running."""
    Chaos(cluster).partition("node1")
    assert cluster.find_leftovers()  # a running cluster has leftovers

    cluster.down()

    assert cluster.find_leftovers() == ()
    cluster.up()
    assert cluster.kubectl("get", "pods", "--output", "name") == ""
    assert count_nodes_with_image(cluster) == 2


def count_nodes_with_image(cluster: ThrowawayCluster) -> int:
    """Return the number of nodes that still have the operator image."""
    nodes = json.loads(cluster.kubectl("get", "nodes", "--output=json"))["items"]
    images = ({name for image in node["status"]["images"] for name in image["names"]} for node in nodes)
    return sum(get_image_name("operator") in names for names in images)
