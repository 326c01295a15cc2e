"""Ranks that compute alike, and what is said of those that do not."""

import re
from dataclasses import replace

import pytest
import torch

from finetune_trainer.distributed.hardware_check import Computes, check_alike, describe_rank
from finetune_trainer.errors import MixedHardware

H100 = Computes("NVIDIA H100 80GB HBM3", 80, "580.95.05", "2.13.0", "2.28.3", "transformers 5.23.0")


def test_a_rank_on_cpus_says_its_versions() -> None:
    found = describe_rank(torch.device("cpu"))

    assert found.device.startswith("cpu (")
    assert found.torch == torch.__version__
    assert re.fullmatch(r"transformers \S+, accelerate \S+, peft \S+", found.packages)


def test_equal_ranks_pass() -> None:
    check_alike([H100] * 16, per_node=8)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        pytest.param(
            [H100] * 2 + [replace(H100, device="NVIDIA A100-SXM4-80GB")] * 2,
            "device differs between ranks: NVIDIA H100 80GB HBM3 on node 0; NVIDIA A100-SXM4-80GB on node 1.",
            id="nodes of two kinds",
        ),
        pytest.param(
            [H100, replace(H100, memory_gib=40), H100, H100],
            "memory gib differs between ranks: 80 on node 0 rank 0, node 1; 40 on node 0 rank 1.",
            id="one GPU of a node",
        ),
        pytest.param(
            [H100, H100, *[replace(H100, driver="570.86.10")] * 4],
            "driver differs between ranks: 580.95.05 on node 0; 570.86.10 on node 1, node 2.",
            id="an older driver",
        ),
    ],
)
def test_what_differs_is_named_with_its_nodes(ranks: list[Computes], words: str) -> None:
    with pytest.raises(MixedHardware, match=re.escape(words)) as raised:
        check_alike(ranks, per_node=2)

    assert "spec.podTemplate.nodeSelector" in str(raised.value)
