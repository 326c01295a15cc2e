"""Tests of the degradations of a user command."""

from collections.abc import Callable
from pathlib import Path

import pytest

from finetune_supervisor.command_checks.command_checks import (
    CHECK_INTERVAL_SECONDS,
    GRACE_SECONDS,
    CommandChecks,
    CommandState,
)
from finetune_supervisor.contract import Node

GIB = 1 << 30
NODE = Node.from_environment(
    {
        "FINETUNE_NAMESPACE": "default",
        "FINETUNE_JOB": "job",
        "FINETUNE_JOB_UID": "uid",
        "FINETUNE_ATTEMPT": "0",
        "NODE_RANK": "1",
        "NNODES": "2",
        "NPROC_PER_NODE": "4",
        "FINETUNE_WORLD_SIZE": "8",
        "MASTER_ADDR": "job-0-0.job",
        "MASTER_PORT": "29500",
        "FINETUNE_RUN_DIR": str(Path("/run")),
    }
)
ALL = frozenset({4, 5, 6, 7})


def state(
    connected: frozenset[int] = ALL, *, ranks: frozenset[int] = ALL, gpus: tuple[float, ...] = ()
) -> CommandState:
    return CommandState(ranks, connected, [int(size * GIB) for size in gpus])


def run_checks(observe: Callable[[float], CommandState], *, seconds: float, planned_gpus: int = 4) -> list[str]:
    """Return the reasons at the end, after updates twice a second from time 1000."""
    now = 1000.0
    checks = CommandChecks(NODE, lambda: observe(now - 1000.0), planned_gpus=planned_gpus)
    degraded = checks.update(now=now)
    while now < 1000.0 + seconds:
        now += 0.5
        degraded = checks.update(now=now)
    return [degradation.reason for degradation in degraded]


AFTER_GRACE = GRACE_SECONDS + 2 * CHECK_INTERVAL_SECONDS


def test_ranks_that_have_not_joined_after_the_grace_period_are_reported() -> None:
    checks = CommandChecks(NODE, lambda: state(frozenset({4, 6})), planned_gpus=0)
    assert checks.update(now=0.0) == ()
    assert checks.update(now=GRACE_SECONDS - 1) == ()

    (degradation,) = checks.update(now=AFTER_GRACE)

    assert degradation.reason == "RanksAlone"
    assert (
        "2 of 4 ranks of node 1 (5, 7) have no connection to MASTER_ADDR:MASTER_PORT 5 minutes" in degradation.message
    )


def test_ranks_that_have_joined_once_are_not_alone() -> None:
    assert run_checks(lambda now: state(ALL if now < 100 else frozenset()), seconds=2 * AFTER_GRACE) == []


def test_the_report_ends_when_the_ranks_join() -> None:
    late = AFTER_GRACE + 60
    assert run_checks(lambda now: state(ALL if now > late else frozenset()), seconds=late) == ["RanksAlone"]
    assert run_checks(lambda now: state(ALL if now > late else frozenset()), seconds=late + 60) == []


def test_restarted_ranks_have_a_grace_period_of_their_own() -> None:
    def observe(now: float) -> CommandState:
        return state(frozenset(), ranks=frozenset() if now < GRACE_SECONDS else ALL)

    assert run_checks(observe, seconds=AFTER_GRACE) == []


def test_a_program_without_known_ranks_is_not_reported() -> None:
    assert run_checks(lambda _: state(frozenset(), ranks=frozenset()), seconds=AFTER_GRACE) == []


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ((40, 0.5, 0.5, 0.5), ["SharedGpu"]),
        ((40, 40, 0.1, 0), ["SharedGpu"]),
        ((40, 40, 40, 40), []),
        ((40, 1.5, 1.5, 1.5), []),  # a GPU with little used memory may still be used
        ((1.5, 0, 0, 0), []),  # the program may use little memory
        ((0, 0, 0, 0), []),
        ((40, 0), []),  # not the GPUs of this container
        ((), []),
    ],
)
def test_ranks_that_share_a_gpu_are_reported(gpus: tuple[float, ...], expected: list[str]) -> None:
    assert run_checks(lambda _: state(gpus=gpus), seconds=AFTER_GRACE) == expected
    assert run_checks(lambda _: state(gpus=gpus), seconds=GRACE_SECONDS - 1) == []


def test_gpus_that_are_used_for_a_while_only_are_not_reported() -> None:
    def observe(now: float) -> CommandState:
        return state(gpus=(40, 40, 40, 40) if now % 200 < CHECK_INTERVAL_SECONDS else (40, 0, 0, 0))

    assert run_checks(observe, seconds=5 * GRACE_SECONDS) == []


def test_gpus_without_ranks_are_idle() -> None:
    one_rank = frozenset({4})
    checks = CommandChecks(NODE, lambda: state(ranks=one_rank, gpus=(40, 0, 0, 0)), planned_gpus=4)
    checks.update(now=0.0)

    (degradation,) = checks.update(now=AFTER_GRACE)

    assert degradation.reason == "IdleGpus"
    assert "3 of 4 GPUs of node 1 have been empty for 5 minutes" in degradation.message


def test_the_command_is_observed_every_15_seconds() -> None:
    times: list[float] = []
    run_checks(lambda now: times.append(now) or state(), seconds=60)  # type: ignore[func-returns-value]
    assert times == [0, 15, 30, 45, 60]
