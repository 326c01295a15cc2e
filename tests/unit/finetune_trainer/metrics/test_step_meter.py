"""Test the measurements of one rank between two log entries."""

import math
import time

import pytest
import torch

from finetune_trainer.metrics.flops import FlopsEstimate
from finetune_trainer.metrics.step_meter import StepMeter
from testing.models.micro_batches import build_micro_batch

CPU = torch.device("cpu")


def test_meter_measures_the_steps_since_the_last_call_of_collect() -> None:
    flops = FlopsEstimate(per_token=10, per_attention_pair=1)
    meter = StepMeter(flops, sequences_per_sample=1, device=CPU, recomputed_share=0.0)
    batch = build_micro_batch([1, 1])

    for step in (1, 2):
        with meter.measure_data_wait():
            time.sleep(0.02)
        meter.add_micro_batches([batch, batch])
        with meter.measure_loss():
            time.sleep(0.01)
        meter.end_step(step)
    interval = meter.collect()

    assert (interval.steps, interval.samples, interval.tokens) == (2, 4, 8)
    assert interval.flops == 8 * 10 + 4 * 3
    assert 0.04 <= interval.data_wait_seconds < interval.seconds
    assert interval.loss_seconds >= 0.02
    assert interval.own_step_seconds == pytest.approx((interval.data_wait_seconds + interval.loss_seconds) / 2)
    assert interval.compute_seconds == pytest.approx(interval.data_wait_seconds + 3 * interval.loss_seconds)
    assert math.isnan(interval.gpu_utilization)
    assert interval.peak_bytes > 1_000_000
    assert interval.peak_longest_sequence == 2
    assert meter.collect().steps == 0
    assert meter.collect().peak_bytes == interval.peak_bytes  # memory peaks are not reset


def test_recomputed_forward_passes_count_as_computation() -> None:
    meters = [
        StepMeter(
            FlopsEstimate(10, 1, forward_multiple=2.5), sequences_per_sample=1, device=CPU, recomputed_share=share
        )
        for share in (0.0, 1.0)
    ]

    intervals = []
    for meter in meters:
        with meter.measure_loss():
            time.sleep(0.01)
        intervals.append(meter.collect())

    assert [interval.compute_seconds / interval.loss_seconds for interval in intervals] == pytest.approx([2.5, 3.5])
