"""Test the throughput computed from the measurements of all ranks."""

import pytest

from finetune_trainer.metrics.step_meter import MeasuredInterval
from finetune_trainer.metrics.throughput import LOGGED_METRICS, summarise_ranks

GIB = 2**30


def build_interval(**fields: float) -> MeasuredInterval:
    default = MeasuredInterval(
        steps=4, seconds=8, data_wait_seconds=0.4, loss_seconds=2, samples=32, tokens=4000, flops=8e12, peak_bytes=GIB
    )
    return default._replace(**fields)


def test_throughput_is_the_sum_over_all_ranks() -> None:
    summary = summarise_ranks([build_interval(), build_interval(tokens=2000, samples=16)], peak_flops=1e12)

    assert summary.step_seconds == 2
    assert (summary.tokens_per_second, summary.samples_per_second) == (750, 6)
    assert summary.mfu == pytest.approx(16e12 / (8 * 1e12 * 2))


def test_data_wait_share_is_the_maximum_over_all_ranks() -> None:
    summary = summarise_ranks([build_interval(), build_interval(data_wait_seconds=3)], peak_flops=None)

    assert summary.data_wait_share == pytest.approx(3 / 8)


def test_mfu_is_not_logged_if_the_peak_flops_are_unknown() -> None:
    logged_values = summarise_ranks([build_interval()], peak_flops=None).to_log_values()

    assert sorted(logged_values) == sorted(set(LOGGED_METRICS) - {"mfu", "scaling_efficiency", "gpu_utilization"})


def test_scaling_efficiency_is_the_share_of_a_step_in_which_ranks_compute() -> None:
    intervals = [build_interval(compute_seconds=6), build_interval(compute_seconds=4)]

    assert summarise_ranks(intervals, peak_flops=None).scaling_efficiency == pytest.approx(5 / 8)
    assert summarise_ranks(intervals[:1], peak_flops=None).scaling_efficiency is None
    assert summarise_ranks(intervals, peak_flops=None).tokens_per_second_per_rank == 500


def test_gpu_utilization_is_the_mean_over_the_gpus_that_report_it() -> None:
    intervals = [build_interval(gpu_utilization=0.9), build_interval(gpu_utilization=0.5), build_interval()]

    assert summarise_ranks(intervals, peak_flops=None).gpu_utilization == pytest.approx(0.7)
