"""Test what is reported as slowing a job down."""

import re

import pytest
import torch

from finetune_api.v1alpha1.training import Preflight
from finetune_supervisor.messages import NetworkBandwidth, NodePairBandwidth
from finetune_trainer.cluster_check.degradations import RankFacts, describe_cluster, describe_compute, require_bandwidth
from finetune_trainer.distributed.rank_context import Ranks
from finetune_trainer.errors import NetworkFault
from finetune_trainer.units import GIB

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
TWO_NODES = Ranks(rank=0, local_rank=0, local_world_size=2, world_size=4)


def build_facts(**fields: object) -> list[RankFacts]:
    """Return the facts of four ranks on two nodes with two GPUs; the fields apply to the last rank."""
    facts = [RankFacts(100.0, f"gpu-{rank}", 2, 0, "IB") for rank in range(4)]
    values = {**vars(facts[3]), **fields}
    return [*facts[:3], RankFacts(**values)]


def build_network(*gbps: float) -> NetworkBandwidth:
    names = ("0-1", "0-2", "1-2", "0-3", "1-3", "2-3")
    pairs = sorted((NodePairBandwidth(*pair) for pair in zip(names, gbps, strict=False)), key=lambda pair: pair.gbps)
    return NetworkBandwidth(10.0, 100.0, tuple(pairs))


def test_healthy_cluster_has_no_degradation() -> None:
    assert list(describe_cluster(build_facts(), build_network(10, 9, 11), TWO_NODES)) == []


@pytest.mark.parametrize(
    ("fields", "reason", "text"),
    [
        pytest.param({"transport": "Socket"}, "NetworkSockets", "by TCP sockets", id="sockets"),
        pytest.param({"clock": 107.4}, "ClockSkew", "differ by 7 s", id="clocks"),
        pytest.param({"gpu": "gpu-2"}, "SharedGpu", "2 ranks of node 1 share 1 GPUs", id="two ranks on one GPU"),
        pytest.param({"foreign_bytes": 9 * GIB}, "GpuInUse", "use 9.0 GiB of a GPU of node 1", id="other processes"),
    ],
)
def test_degradation_names_node_and_remedy(fields: dict[str, object], reason: str, text: str) -> None:
    (degradation,) = describe_cluster(build_facts(**fields), None, TWO_NODES)

    assert degradation.reason == reason
    assert text in degradation.message
    assert ";" in degradation.message


def test_idle_gpus_are_counted() -> None:
    facts = [RankFacts(0.0, f"gpu-{rank}", visible_gpus=4) for rank in range(2)]

    (degradation,) = describe_cluster(facts, None, Ranks(0, 0, 2, 2))

    assert degradation.reason == "IdleGpus"
    assert "node 0 has 4 GPUs, of which 2 are idle; raise spec.nprocPerNode" in degradation.message


def test_sockets_of_a_single_node_are_no_degradation() -> None:
    facts = [RankFacts(0.0, f"gpu-{rank}", 2, 0, "Socket") for rank in range(2)]

    assert list(describe_cluster(facts, None, Ranks(0, 0, 2, 2))) == []


def test_pair_of_nodes_that_is_half_as_fast_as_the_median_is_named() -> None:
    (degradation,) = describe_cluster(build_facts(), build_network(10, 10, 10, 4, 4, 10), TWO_NODES)

    assert degradation.reason == "SlowLink"
    assert "2 of 6 pairs" in degradation.message
    assert "node 3 is part of most of them" in degradation.message


def test_one_pair_is_not_compared() -> None:
    assert list(describe_cluster(build_facts(), build_network(0.001), TWO_NODES)) == []


@pytest.mark.parametrize(
    ("preflight", "message"),
    [
        pytest.param(
            Preflight(min_inter_node_gbps=8),
            "2 of 3 pairs of nodes exchange less than 8 Gbit/s (spec.training.preflight.minInterNodeGbps), the slowest"
            " of them 0-2 with 4; node 2 is part of most of them",
            id="between nodes",
        ),
        pytest.param(
            Preflight(min_intra_node_gbps=200), "an all-reduce within a node reaches 100 Gbit/s, less than 200", id="in"
        ),
    ],
)
def test_required_bandwidth_is_a_condition_of_the_attempt(preflight: Preflight, message: str) -> None:
    with pytest.raises(NetworkFault, match=re.escape(message)):
        require_bandwidth(build_network(10, 4, 5), preflight)


def test_sufficient_bandwidth_passes() -> None:
    require_bandwidth(build_network(10, 9, 9), Preflight(min_inter_node_gbps=8, min_intra_node_gbps=50))
    require_bandwidth(None, Preflight(min_inter_node_gbps=8))


@pytest.mark.parametrize(
    ("device", "dtype", "requested_dtype", "attention", "requested_attention", "reasons"),
    [
        pytest.param(GPU, torch.bfloat16, "auto", "sdpa", "auto", [], id="as it should be"),
        pytest.param(GPU, torch.float32, "auto", "sdpa", "auto", ["Float32"], id="float32 by default"),
        pytest.param(GPU, torch.float32, "float32", "sdpa", "auto", [], id="float32 requested"),
        pytest.param(GPU, torch.bfloat16, "auto", "eager", "auto", ["SlowAttention"], id="no fused attention"),
        pytest.param(GPU, torch.bfloat16, "auto", "eager", "eager", [], id="eager requested"),
        pytest.param(CPU, torch.float32, "auto", "eager", "auto", [], id="CPU"),
    ],
)
def test_slow_computation_is_reported_unless_the_spec_requests_it(
    device: torch.device,
    dtype: torch.dtype,
    requested_dtype: str,
    attention: str,
    requested_attention: str,
    reasons: list[str],
) -> None:
    degraded = describe_compute(
        device, dtype, requested_dtype=requested_dtype, attention=attention, requested_attention=requested_attention
    )

    assert [each.reason for each in degraded] == reasons
