"""Test the check that all ranks have the same hardware and library versions."""

import re
from dataclasses import replace

import pytest
import torch

from finetune_trainer.distributed.hardware_check import RankHardware, check_same_hardware, describe_rank_hardware
from finetune_trainer.errors import MixedHardware

H100 = RankHardware("NVIDIA H100 80GB HBM3", 80, "580.95.05", "2.13.0", "2.28.3", "transformers 5.23.0")


def test_cpu_rank_reports_library_versions() -> None:
    hardware = describe_rank_hardware(torch.device("cpu"))

    assert hardware.device.startswith("cpu (")
    assert hardware.torch == torch.__version__
    assert re.fullmatch(r"transformers \S+, accelerate \S+, peft \S+", hardware.packages)


def test_ranks_with_equal_hardware_pass_the_check() -> None:
    check_same_hardware([H100] * 16, ranks_per_node=8)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        pytest.param(
            [H100] * 2 + [replace(H100, device="NVIDIA A100-SXM4-80GB")] * 2,
            "device differs between ranks: NVIDIA H100 80GB HBM3 on node 0; NVIDIA A100-SXM4-80GB on node 1.",
            id="nodes with different GPUs",
        ),
        pytest.param(
            [H100, replace(H100, memory_gib=40), H100, H100],
            "memory gib differs between ranks: 80 on node 0 rank 0, node 1; 40 on node 0 rank 1.",
            id="one GPU with less memory",
        ),
        pytest.param(
            [H100, H100, *[replace(H100, driver="570.86.10")] * 4],
            "driver differs between ranks: 580.95.05 on node 0; 570.86.10 on node 1, node 2.",
            id="nodes with an older driver",
        ),
    ],
)
def test_first_difference_is_reported_by_node(ranks: list[RankHardware], message: str) -> None:
    with pytest.raises(MixedHardware, match=re.escape(message)) as raised:
        check_same_hardware(ranks, ranks_per_node=2)

    assert "spec.podTemplate.nodeSelector" in str(raised.value)
