"""From the measurements of ranks to what a log line says."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune_supervisor.liveness.heartbeat import Progress
from finetune_trainer.data.token_dataset import IGNORED
from finetune_trainer.metrics.cross_rank import LOGGED, find_slow, summarise
from finetune_trainer.metrics.flops import Work
from finetune_trainer.metrics.throughput import Interval, Meter
from finetune_trainer.training.callbacks import describe_memory, describe_speed, log_line

GIB = 2**30


def rank(**fields: float) -> Interval:
    usual = Interval(
        steps=4, seconds=8, waited_seconds=0.4, loss_seconds=2, samples=32, tokens=4000, flops=8e12, peak_memory=GIB
    )
    return usual._replace(**fields)


def test_throughput_is_that_of_all_ranks() -> None:
    summary = summarise([rank(), rank(tokens=2000, samples=16)], peak_flops=1e12)

    assert summary.step_seconds == 2
    assert (summary.tokens_per_second, summary.samples_per_second) == (750, 6)
    assert summary.mfu == pytest.approx(16e12 / (8 * 1e12 * 2))


def test_the_rank_that_waits_most_decides_how_data_bound_a_run_is() -> None:
    assert summarise([rank(), rank(waited_seconds=3)], peak_flops=None).data_wait_share == pytest.approx(3 / 8)


def test_without_a_known_peak_nothing_is_said_of_utilisation() -> None:
    told = summarise([rank()], peak_flops=None).as_log()

    assert sorted(told) == sorted(set(LOGGED) - {"mfu"})


@pytest.mark.parametrize(
    ("own", "slow"),
    [
        ((1.0, 1.05, 1.0, 1.0), None),
        ((1.0, 1.0, 1.3, 1.1), (2, 0.3)),
        ((1.0, 1.2), (1, 0.2)),
        ((1.0,), None),
        ((0.0, 0.0), None),
    ],
)
def test_a_rank_is_named_when_it_is_a_tenth_slower_than_the_median(
    own: tuple[float, ...], slow: tuple[int, float] | None
) -> None:
    found = find_slow(own)

    assert (found and (found.rank, round(found.excess, 6))) == slow


@given(st.lists(st.floats(min_value=1e-4, max_value=1e4), min_size=1, max_size=64))
def test_a_slow_rank_is_slower_than_half_of_the_ranks(own: list[float]) -> None:
    slow = find_slow(own)

    assert slow is None or sum(own[slow.rank] > 1.1 * each for each in own) >= len(own) / 2


def test_the_peaks_of_memory_name_their_ranks_and_what_caused_the_highest() -> None:
    peaks = summarise(
        [
            rank(peak_memory=5),
            rank(peak_memory=9, peak_step=7, peak_longest=44, reserved_memory=12),
            rank(peak_memory=4),
        ],
        peak_flops=None,
    ).memory

    told = describe_memory(peaks, forecast=10)

    assert (told.peak_highest, told.peak_highest_rank, told.peak_lowest, told.peak_lowest_rank) == (9, 1, 4, 2)
    assert (told.forecast, told.reserved, told.cause) == (10, 12, "step 7, longest sequence 44 tokens")


def test_a_line_of_the_log_says_what_is_learned_and_how_fast() -> None:
    summary = summarise([rank(), rank(loss_seconds=3)], peak_flops=1e13)
    progress = Progress(
        step=3,
        total_steps=9,
        eta_seconds=75,
        slow_rank=str(find_slow(summary.own_seconds)),
        memory=describe_memory(summary.memory, forecast=None),
        **describe_speed(summary),
    )

    said = log_line(progress, {"loss": 1.25, "grad_norm": 0.5, "learning_rate": 1e-4, "rewards/margins": 0.1})

    assert said == (
        "step 3/9  loss 1.2500  grad_norm 0.5000  lr 1.000e-04  2 s/step  tokens/s 1000  samples/s 8  mfu 10.0%"
        "  data 5%  memory 1.00 GiB  slowest rank 1 +42%  eta 01:15  rewards/margins 0.1000"
    )


def test_a_meter_counts_what_passes_between_two_log_lines() -> None:
    meter = Meter(Work(per_token=10, per_pair=1), sequences=1, on_gpu=False)
    batch = {"attention_mask": torch.tensor([[1, 1, 0]]), "labels": torch.tensor([[1, 1, IGNORED]])}

    for step in (1, 2):
        with meter.waiting_for_data():
            time.sleep(0.02)
        meter.take_in([batch, batch])
        with meter.computing_loss():
            time.sleep(0.01)
        meter.end_step(step)
    measured = meter.take()

    assert (measured.steps, measured.samples, measured.tokens) == (2, 4, 8)
    assert measured.flops == 8 * 10 + 4 * 3
    assert 0.04 <= measured.waited_seconds < measured.seconds
    assert measured.loss_seconds >= 0.02
    assert measured.own_seconds == pytest.approx((measured.waited_seconds + measured.loss_seconds) / 2)
    assert measured.peak_memory > 1_000_000
    assert measured.peak_longest == 2
    assert meter.take().steps == 0
    assert meter.take().peak_memory == measured.peak_memory  # what was needed once stays known
