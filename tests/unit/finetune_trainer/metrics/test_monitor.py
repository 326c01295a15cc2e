"""From the measurements of single ranks to the summary of all ranks and the log line."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune_supervisor.messages import TrainingProgress
from finetune_trainer.data.token_dataset import IGNORE_INDEX
from finetune_trainer.metrics.cross_rank import LOGGED_METRICS, find_slow_rank, summarise_ranks
from finetune_trainer.metrics.flops import FlopsEstimate
from finetune_trainer.metrics.throughput import MeasuredInterval, ThroughputMeter
from finetune_trainer.training.callbacks import describe_memory, describe_speed, format_log_line

GIB = 2**30


def interval(**fields: float) -> MeasuredInterval:
    default = MeasuredInterval(
        steps=4, seconds=8, data_wait_seconds=0.4, loss_seconds=2, samples=32, tokens=4000, flops=8e12, peak_bytes=GIB
    )
    return default._replace(**fields)


def test_throughput_is_the_sum_over_all_ranks() -> None:
    summary = summarise_ranks([interval(), interval(tokens=2000, samples=16)], peak_flops=1e12)

    assert summary.step_seconds == 2
    assert (summary.tokens_per_second, summary.samples_per_second) == (750, 6)
    assert summary.mfu == pytest.approx(16e12 / (8 * 1e12 * 2))


def test_the_data_wait_share_is_that_of_the_rank_that_waits_most() -> None:
    summary = summarise_ranks([interval(), interval(data_wait_seconds=3)], peak_flops=None)

    assert summary.data_wait_share == pytest.approx(3 / 8)


def test_mfu_is_not_logged_if_the_peak_flops_are_unknown() -> None:
    logged = summarise_ranks([interval()], peak_flops=None).as_log()

    assert sorted(logged) == sorted(set(LOGGED_METRICS) - {"mfu"})


@pytest.mark.parametrize(
    ("own_step_seconds", "slow"),
    [
        pytest.param((1.0, 1.05, 1.0, 1.0), None, id="within 10 percent"),
        pytest.param((1.0, 1.0, 1.3, 1.1), (2, 0.3), id="one of four slow"),
        pytest.param((1.0, 1.2), (1, 0.2), id="one of two slow"),
        pytest.param((1.0,), None, id="one rank"),
        pytest.param((0.0, 0.0), None, id="no time measured"),
    ],
)
def test_a_rank_is_slow_if_it_exceeds_the_median_by_a_tenth(
    own_step_seconds: tuple[float, ...], slow: tuple[int, float] | None
) -> None:
    slow_rank = find_slow_rank(own_step_seconds)

    assert (slow_rank and (slow_rank.rank, round(slow_rank.excess, 6))) == slow


@given(st.lists(st.floats(min_value=1e-4, max_value=1e4), min_size=1, max_size=64))
def test_a_slow_rank_is_slower_than_half_of_the_ranks(own_step_seconds: list[float]) -> None:
    slow = find_slow_rank(own_step_seconds)

    half = len(own_step_seconds) / 2
    assert slow is None or sum(own_step_seconds[slow.rank] > 1.1 * each for each in own_step_seconds) >= half


def test_memory_peaks_name_their_ranks_and_the_cause_of_the_highest() -> None:
    peaks = summarise_ranks(
        [
            interval(peak_bytes=5),
            interval(peak_bytes=9, peak_step=7, peak_longest_sequence=44, reserved_bytes=12),
            interval(peak_bytes=4),
        ],
        peak_flops=None,
    ).memory

    memory = describe_memory(peaks, forecast_bytes=10)

    assert (memory.peak_highest, memory.peak_highest_rank) == (9, 1)
    assert (memory.peak_lowest, memory.peak_lowest_rank) == (4, 2)
    assert (memory.forecast, memory.reserved, memory.cause) == (10, 12, "step 7, longest sequence 44 tokens")


def test_a_log_line_contains_loss_speed_memory_and_the_metrics_of_the_method() -> None:
    summary = summarise_ranks([interval(), interval(loss_seconds=3)], peak_flops=1e13)
    progress = TrainingProgress(
        step=3,
        total_steps=9,
        eta_seconds=75,
        slow_rank=str(find_slow_rank(summary.own_step_seconds)),
        memory=describe_memory(summary.memory, forecast_bytes=None),
        **describe_speed(summary),
    )

    line = format_log_line(progress, {"loss": 1.25, "grad_norm": 0.5, "learning_rate": 1e-4, "rewards/margins": 0.1})

    assert line == (
        "step 3/9  loss 1.2500  grad_norm 0.5000  lr 1.000e-04  2 s/step  tokens/s 1000  samples/s 8  mfu 10.0%"
        "  data 5%  memory 1.00 GiB  slowest rank 1 +42%  eta 01:15  rewards/margins 0.1000"
    )


def test_a_meter_measures_the_steps_since_the_last_collect() -> None:
    meter = ThroughputMeter(FlopsEstimate(per_token=10, per_attention_pair=1), sequences=1, on_gpu=False)
    batch = {"attention_mask": torch.tensor([[1, 1, 0]]), "labels": torch.tensor([[1, 1, IGNORE_INDEX]])}

    for step in (1, 2):
        with meter.waiting_for_data():
            time.sleep(0.02)
        meter.add_micro_batches([batch, batch])
        with meter.computing_loss():
            time.sleep(0.01)
        meter.end_step(step)
    measured = meter.collect()

    assert (measured.steps, measured.samples, measured.tokens) == (2, 4, 8)
    assert measured.flops == 8 * 10 + 4 * 3
    assert 0.04 <= measured.data_wait_seconds < measured.seconds
    assert measured.loss_seconds >= 0.02
    assert measured.own_step_seconds == pytest.approx((measured.data_wait_seconds + measured.loss_seconds) / 2)
    assert measured.peak_bytes > 1_000_000
    assert measured.peak_longest_sequence == 2
    assert meter.collect().steps == 0
    assert meter.collect().peak_bytes == measured.peak_bytes  # peaks are not reset
