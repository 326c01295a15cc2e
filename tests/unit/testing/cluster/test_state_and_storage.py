"""Tests of the stored cluster state and of the configuration of kind."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from testing.cluster.host.addresses import IpFamily
from testing.cluster.host.commands import HarnessError
from testing.cluster.host.versions import PINNED
from testing.cluster.kind import SHARED_IN_NODES, render_kind_config
from testing.cluster.state import ClusterState, read_state, require_state, write_state

STATE = ClusterState(name="dev", node_count=3, network="10.90.0.0/16", versions=PINNED)


def test_state_round_trips_through_its_file(tmp_path: Path) -> None:
    state = replace(STATE, dns_cache=True, ip_family=IpFamily.DUAL)
    write_state(tmp_path, state)

    assert read_state(tmp_path) == state
    assert len(STATE.layout(tmp_path).nodes) == 3


def test_state_of_a_cluster_without_an_ip_family_is_ipv4(tmp_path: Path) -> None:
    write_state(tmp_path, STATE)
    file = tmp_path / "cluster.json"
    document = json.loads(file.read_text())
    del document["ip_family"]
    file.write_text(json.dumps(document))

    assert read_state(tmp_path) == STATE


def test_missing_state_raises_error_that_cluster_is_not_up(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    with pytest.raises(HarnessError, match="run `up` first"):
        require_state(tmp_path)


def test_error_for_unreadable_state_contains_the_solution(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text("{")

    with pytest.raises(HarnessError, match="run `down`"):
        read_state(tmp_path)


def test_every_kind_node_mounts_the_same_folder() -> None:
    config = render_kind_config(node_count=2, shared_folder=Path("/host/shared"))

    assert [node["role"] for node in config["nodes"]] == ["control-plane", "worker", "worker"]
    mounts = [node["extraMounts"] for node in config["nodes"]]
    assert mounts == [[{"hostPath": "/host/shared", "containerPath": SHARED_IN_NODES}]] * 3
