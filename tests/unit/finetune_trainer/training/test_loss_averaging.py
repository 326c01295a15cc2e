"""Test loss divisors and mean metrics on one rank."""

import pytest
import torch

from finetune_trainer.training.loss_averaging import MetricSums, compute_divisors

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("stop_requested", [False, True])
def test_divisor_is_the_unit_count_of_a_step_or_one(*, stop_requested: bool) -> None:
    micro_batches = [(2.0, 0.0), (3.0, 0.0)]

    divisors, stop_agreed = compute_divisors(micro_batches, across_ranks=True, stop_requested=stop_requested)

    assert divisors.tolist() == [5.0, 1.0]
    assert stop_agreed is stop_requested


def test_logged_metrics_are_means_per_unit_since_the_last_log() -> None:
    metrics = MetricSums()
    metrics.add(torch.tensor(2), {"rewards/margins": torch.tensor(3.0)})
    with metrics.reset_temporarily():
        metrics.add(torch.tensor(1), {"rewards/margins": torch.tensor(100.0)})
    metrics.add(torch.tensor(2), {"rewards/margins": torch.tensor(5.0)})

    assert metrics.reduce_means() == {"rewards/margins": 2.0}
    assert metrics.reduce_means() == {}
