"""The throwaway cluster itself: its faults are real, and when it is down nothing of it is left."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from testing.cluster.fault_injection import Chaos
from testing.cluster.host.commands import ClusterError
from testing.cluster.host.preflight import reason_it_cannot_run
from testing.cluster.images.project_images import ImageBuilder, image_name
from testing.cluster.kwok import start_kwok, stop_kwok
from testing.cluster.provider import ThrowawayProvider
from testing.cluster.throwaway import ThrowawayCluster

pytestmark = pytest.mark.cluster

SERVE = "for rank in 0 1; do RANK=$rank LOCAL_RANK=$rank sleep 600 & done; cd /shared; exec python -m http.server 8000"
GET = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=2).read().decode())"
SPIN = """
import time
end, before = time.monotonic() + 2, time.process_time()
while time.monotonic() < end:
    pass
print(time.process_time() - before)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThrowawayCluster]:
    reason = reason_it_cannot_run() or (None if shutil.which("go") else "no Go")
    if reason:
        pytest.skip(reason)
    cluster = ThrowawayCluster.named("harness")
    cluster.up()
    yield cluster
    cluster.down(purge=True)


@pytest.fixture(scope="module")
def provider(cluster: ThrowawayCluster) -> ThrowawayProvider:
    """With a Service and two pods that serve a shared folder, one on each node."""
    provider = ThrowawayProvider(cluster)
    cluster.load_image(ImageBuilder(cluster.cache).build("operator"))
    cluster.kubectl.apply(*provider.shared_claim("default", "files"))
    (provider.shared_folder("default", "files") / "greeting").write_text("hello from the host")
    pods = (pod(f"web-{number}", node=f"node{number}") for number in (1, 2))
    service = {"clusterIP": "None", "selector": {"app": "web"}, "publishNotReadyAddresses": True}
    cluster.kubectl.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": service},
        *pods,
    )
    cluster.kubectl("wait", "--for=condition=Ready", "pod/web-1", "pod/web-2", "--timeout=60s")
    return provider


def pod(name: str, *, node: str) -> dict[str, Any]:
    """Its name is its host name; it passes the restricted pod security level."""
    container = {
        "name": "main",
        "image": image_name("operator"),
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", SERVE],
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
    """What the first pod gets by HTTP."""
    return cluster.kubectl("exec", "web-1", "--", "python", "-c", GET, url).strip()


def greeting(cluster: ThrowawayCluster, *, host: str) -> str:
    """The served greeting, or what stood in the way of it."""
    try:
        return fetch(cluster, f"http://{host}:8000/greeting")
    except ClusterError as failed:
        return str(failed)


def soon(holds: Callable[[], bool], *, timeout_seconds: float = 60) -> bool:
    deadline = time.monotonic() + timeout_seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def address_of(cluster: ThrowawayCluster, name: str) -> str:
    return str(cluster.kubectl.get("pod", name, namespace="default")["status"]["podIP"])


def test_a_second_up_changes_nothing(cluster: ThrowawayCluster) -> None:
    before = {daemon.name: daemon.pid() for daemon in cluster.daemons()}

    cluster.up()

    assert {daemon.name: daemon.pid() for daemon in cluster.daemons()} == before
    assert len(before) == 11
    assert None not in before.values()


def test_a_claim_is_one_folder_of_this_machine_on_every_node(provider: ThrowawayProvider) -> None:
    kubectl = provider.cluster.kubectl

    kubectl("exec", "web-2", "--", "sh", "-c", "echo written on node2 > /shared/note")

    assert kubectl("exec", "web-1", "--", "cat", "/shared/note").strip() == "written on node2"
    assert (provider.shared_folder("default", "files") / "note").read_text().strip() == "written on node2"


def test_pods_of_two_nodes_find_each_other_by_name(provider: ThrowawayProvider) -> None:
    assert greeting(provider.cluster, host="web-2.web.default.svc.cluster.local") == "hello from the host"


@pytest.mark.parametrize("away_from", ["node1", None], ids=["from one node", "from everything"])
def test_a_partition_is_silent_and_heals(provider: ThrowawayProvider, away_from: str | None) -> None:
    cluster, chaos = provider.cluster, provider.chaos
    address = address_of(cluster, "web-2")

    chaos.partition("node2", away_from=away_from)
    cut = greeting(cluster, host=address)
    chaos.heal("node2")

    assert "timed out" in cut
    assert greeting(cluster, host=address) == "hello from the host"


def test_a_name_asked_too_early_stays_unknown_only_with_cached_dns(provider: ThrowawayProvider) -> None:
    cluster, chaos = provider.cluster, provider.chaos
    seen = {}
    for cached in (True, False):
        chaos.set_dns_cache(cached)
        name = f"late-{cached}".lower()
        assert "hello" not in greeting(cluster, host=f"{name}.web")
        cluster.kubectl.apply(pod(name, node="node2"))
        cluster.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=30s")
        time.sleep(1)  # an HTTP server takes its time to start
        seen[cached] = greeting(cluster, host=f"{name}.web")
        cluster.kubectl("delete", "pod", name)

    assert "Name or service not known" in seen[True] or "name resolution" in seen[True]
    assert seen[False] == "hello from the host"


def test_a_stopped_kubelet_loses_sight_of_pods_that_run_on(provider: ThrowawayProvider) -> None:
    cluster, chaos = provider.cluster, provider.chaos

    chaos.stop_kubelet("node2")
    alone = greeting(cluster, host="web-2.web")
    unseen = soon(lambda: "node2" not in cluster.kubectl.ready_nodes())
    chaos.start_kubelet("node2")

    assert alone == "hello from the host"
    assert unseen
    assert soon(lambda: "node2" in cluster.kubectl.ready_nodes())


def test_an_api_server_and_an_etcd_come_back_with_what_they_knew(provider: ThrowawayProvider) -> None:
    cluster, chaos = provider.cluster, provider.chaos
    chaos.stop_api_server()
    assert not cluster.kubectl.succeeds("get", "--raw", "/readyz")

    chaos.start_api_server()
    chaos.restart_etcd()

    assert "web-1" in cluster.kubectl("get", "pods", "--output", "name")


def test_a_throttled_node_gets_its_share_and_no_more(provider: ThrowawayProvider) -> None:
    cluster, chaos = provider.cluster, provider.chaos

    chaos.limit_cpu("node1", cores=0.2)
    throttled = float(cluster.kubectl("exec", "web-1", "--", "python", "-c", SPIN))
    chaos.limit_cpu("node1", cores=None)

    assert throttled < 0.7


def test_a_slow_link_takes_its_time(provider: ThrowawayProvider) -> None:
    cluster, chaos = provider.cluster, provider.chaos
    large = provider.shared_folder("default", "files") / "large"
    large.write_bytes(b"x" * 400_000)
    url = f"http://{address_of(cluster, 'web-2')}:8000/large"

    chaos.limit_network("node2", kbit_per_second=1000)
    began = time.monotonic()
    got = fetch(cluster, url)
    seconds = time.monotonic() - began
    chaos.limit_network("node2", kbit_per_second=None)

    assert len(got) == 400_000
    assert 2.5 < seconds < 30


def test_one_rank_or_the_whole_container_can_be_killed(provider: ThrowawayProvider) -> None:
    cluster, chaos = provider.cluster, provider.chaos
    assert sorted(chaos.ranks("default", "web-2")) == [0, 1]

    chaos.kill_rank("default", "web-2", rank=1)
    assert soon(lambda: sorted(chaos.ranks("default", "web-2")) == [0])
    assert greeting(cluster, host="web-2.web") == "hello from the host"

    chaos.kill_container("default", "web-2")
    assert soon(lambda: exit_code(cluster, "web-2") == 137)


def exit_code(cluster: ThrowawayCluster, name: str) -> int | None:
    status = cluster.kubectl.get("pod", name, namespace="default")["status"]["containerStatuses"][0]
    code: int | None = status["state"].get("terminated", {}).get("exitCode")
    return code


def test_fake_nodes_run_pods_that_use_nothing(cluster: ThrowawayCluster) -> None:
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


def test_down_leaves_nothing_and_up_begins_anew(cluster: ThrowawayCluster, provider: ThrowawayProvider) -> None:
    """Last, with pods still running: images stay in the nodes, nothing else does."""
    Chaos(cluster).partition("node1")
    assert cluster.leftovers()  # the check sees a cluster that is up

    cluster.down()

    assert cluster.leftovers() == ()
    cluster.up()
    assert cluster.kubectl("get", "pods", "--output", "name") == ""
    assert image_in_nodes(cluster) == 2


def image_in_nodes(cluster: ThrowawayCluster) -> int:
    """On how many nodes the kubelet can start the image without bringing it there again."""
    nodes = json.loads(cluster.kubectl("get", "nodes", "--output=json"))["items"]
    images = ({name for image in node["status"]["images"] for name in image["names"]} for node in nodes)
    return sum(image_name("operator") in names for names in images)
