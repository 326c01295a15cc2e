"""Tests of the printer columns of `kubectl get`."""

from typing import Any

import pytest

from finetune_api.v1alpha1.status import AttemptState, Display
from finetune_operator.core.printer_columns import format_duration, format_number
from testing.builders.jobs import RawBody, job, pod, running_pod, terminating_pod
from testing.builders.statuses import build_progress_report, derive_status_with_progress

JOB = job()


def derive_printer_columns(*pods: RawBody, **fields: Any) -> Display:
    display = derive_status_with_progress(*pods, **fields).display
    assert display is not None
    return display


def test_columns_of_a_running_job_contain_step_loss_throughput_and_eta() -> None:
    progress = build_progress_report(40, total_steps=120, loss=1.23456, tokens_per_second=18432.0, eta_seconds=1320)
    assert derive_printer_columns(running_pod(JOB, 0), running_pod(JOB, 1), polled_progress=progress) == Display(
        nodes="2/2", progress="33% 40/120", loss="1.235", tokens_per_second="18.4k", eta="22m"
    )


def test_columns_of_a_stopping_job_contain_no_throughput_or_eta() -> None:
    progress = build_progress_report(40, total_steps=120, loss=1.0, tokens_per_second=18432.0, eta_seconds=1320)
    assert derive_printer_columns(previous_progress=progress, state=AttemptState.STOPPING) == Display(
        nodes="0/2", progress="33% 40/120", loss="1.000"
    )


def test_columns_without_a_value_are_blank() -> None:
    assert (
        derive_printer_columns(polled_progress=build_progress_report(0))
        == derive_printer_columns()
        == Display(nodes="0/2")
    )


def test_the_nodes_column_counts_running_pods_that_are_not_terminating() -> None:
    assert derive_printer_columns(running_pod(JOB, 0), pod(JOB, 1)).nodes == "1/2"
    assert derive_printer_columns(running_pod(JOB, 0), terminating_pod(running_pod(JOB, 1))).nodes == "1/2"


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1.0k"), (18432, "18.4k"), (2.5e6, "2.5M"), (7e9, "7.0G"), (12.4, "12")],
)
def test_numbers_are_abbreviated(number: float, text: str) -> None:
    assert format_number(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (119, "119s"),
        (120, "2m"),
        (1320, "22m"),
        (7199, "119m"),
        (7200, "2h0m"),
        (172_799, "47h59m"),
        (172_800, "2d"),
    ],
)
def test_durations_are_formatted_like_kubectl_ages(seconds: int, text: str) -> None:
    assert format_duration(seconds) == text
