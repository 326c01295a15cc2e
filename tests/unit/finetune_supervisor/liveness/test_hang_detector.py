"""Tests of detecting hanging ranks and finding the suspect."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from finetune_supervisor import contract
from finetune_supervisor.contract import RunFolder
from finetune_supervisor.liveness import stack_dump
from finetune_supervisor.liveness.hang_detector import (
    HangDetector,
    HeartbeatTimeout,
    InspectedRank,
    explain_hang,
    may_be_reported_by_launcher,
    parse_stack,
)
from finetune_supervisor.liveness.heartbeat import Heartbeat
from finetune_supervisor.liveness.stack_dump import inspect_ranks, read_activity, read_process_state
from finetune_supervisor.messages import TrainingProgress

LIMIT_SECONDS = 10.0
COLLECTIVE_STACK = ("/v/torch/distributed/distributed_c10d.py:2806 in all_reduce",)
MIB = 2**20
LOADING_STACK = ("/v/finetune_trainer/data/images.py:40 in open", "/v/torch/utils/data/fetch.py:54 in fetch")


def build_heartbeat(local_rank: int = 0, *, step: int = 5, phase: str = contract.TRAIN, time: float = 0.0) -> Heartbeat:
    return Heartbeat(
        rank=4 + local_rank,
        local_rank=local_rank,
        pid=7,
        time=time,
        phase=phase,
        first_step=3,
        progress=TrainingProgress(step=step),
    )


def build_detector(
    *heartbeats: Heartbeat,
    rank_count: int = 1,
    limit_seconds: float = LIMIT_SECONDS,
    is_stopped: bool = False,
    read_activity: Callable[[int], tuple[int, float] | None] = lambda _: None,
) -> HangDetector:
    detector = HangDetector(
        limit_seconds=limit_seconds, now=0.0, is_stopped=lambda _: is_stopped, read_activity=read_activity
    )
    detector.expect_heartbeats(range(rank_count), now=0.0)
    detector.record_heartbeats(heartbeats, now=0.0)
    return detector


def advance_and_record(detector: HangDetector, *heartbeats: Heartbeat, end_time: float) -> None:
    """Advance to `end_time` in steps of one second without heartbeats, and then record these heartbeats."""
    while detector.recorded_at + 1 < end_time:
        detector.record_heartbeats((), now=detector.recorded_at + 1)
    detector.record_heartbeats(heartbeats, now=end_time)


@pytest.mark.parametrize(
    ("heartbeats", "limit_seconds"),
    [
        ((), 30.0),  # no heartbeat yet
        ((build_heartbeat(phase=contract.INIT),), 30.0),
        ((build_heartbeat(phase=contract.LOAD),), 720.0),
        ((build_heartbeat(step=3),), 60.0),  # the first step may include compilation
        ((build_heartbeat(),), 10.0),
        ((build_heartbeat(phase=contract.EVAL),), 60.0),
        ((build_heartbeat(phase=contract.SAVE),), 60.0),
        ((build_heartbeat(phase=contract.PUBLISH),), 720.0),  # publishing may include an upload to the Hub
        ((build_heartbeat(phase=contract.DONE),), 10.0),
    ],
)
def test_time_limit_depends_on_the_phase(heartbeats: tuple[Heartbeat, ...], limit_seconds: float) -> None:
    detector = build_detector(*heartbeats)

    assert detector.find_timeout(now=limit_seconds) is None
    assert detector.find_timeout(now=limit_seconds + 0.1) == HeartbeatTimeout(0, limit_seconds + 0.1, limit_seconds)


@pytest.mark.parametrize(("busy", "limit_seconds"), [(1.0, 120.0), (0.1, 720.0)])
def test_a_loading_rank_that_only_computes_has_a_lower_limit_than_one_that_waits(
    busy: float, limit_seconds: float
) -> None:
    activity = (5 * MIB, 1.0)
    heartbeat = build_heartbeat(phase=contract.LOAD)
    detector = build_detector(heartbeat, read_activity=lambda _: activity)
    for second in range(1, 1001):  # it reads from slow storage
        activity = (5 * MIB + second * MIB // 60, float(second))
        detector.record_heartbeats((heartbeat,), now=second)
    progress_at = 960  # when it had read another MiB
    for second in range(1001, progress_at + int(limit_seconds) + 1):
        activity = (activity[0], activity[1] + busy)
        detector.record_heartbeats((heartbeat,), now=second)

    assert detector.find_timeout(now=progress_at + limit_seconds) is None
    assert detector.find_timeout(now=progress_at + limit_seconds + 0.1) is not None


@pytest.mark.parametrize("phase", [contract.LOAD, contract.SAVE, contract.PUBLISH, contract.TRAIN])
def test_step_limit_applies_to_a_stopped_process_in_every_phase(phase: str) -> None:
    detector = build_detector(build_heartbeat(phase=phase), is_stopped=True)

    assert detector.find_timeout(now=9.9) is None
    assert detector.find_timeout(now=10.1) == HeartbeatTimeout(0, 10.1, 10.0)


def test_pause_of_the_supervisor_does_not_cause_a_timeout() -> None:
    detector = build_detector(build_heartbeat())
    advance_and_record(detector, end_time=8.0)
    detector.record_heartbeats((), now=1000.0)

    assert detector.find_timeout(now=1001.0) is None
    advance_and_record(detector, end_time=1002.5)
    assert detector.find_timeout(now=1002.5) is not None


def test_limit_of_zero_disables_detection() -> None:
    assert build_detector(build_heartbeat(), limit_seconds=0).find_timeout(now=1e9) is None


def test_unchanged_heartbeat_does_not_reset_the_timeout() -> None:
    detector = build_detector(build_heartbeat())
    advance_and_record(detector, build_heartbeat(), end_time=9.0)
    assert detector.find_timeout(now=10.5) is not None

    advance_and_record(detector, build_heartbeat(time=1.0), end_time=10.5)
    assert detector.find_timeout(now=20.0) is None


def test_clock_jump_in_heartbeat_times_is_ignored() -> None:
    detector = build_detector(build_heartbeat(time=1e9))
    advance_and_record(detector, build_heartbeat(time=5.0), end_time=8.0)

    assert detector.find_timeout(now=17.0) is None


def test_slow_steps_raise_the_limit_but_evaluations_do_not() -> None:
    detector = build_detector(build_heartbeat(step=4))
    for number in range(1, 6):
        advance_and_record(detector, build_heartbeat(step=4 + number, time=number), end_time=6.0 * number)
    assert detector.find_timeout(now=30.0 + 29.9) is None
    timeout = detector.find_timeout(now=30.0 + 30.1)
    assert timeout is not None
    assert timeout.limit_seconds == 30.0  # five times the step time of 6 s

    advance_and_record(detector, build_heartbeat(step=9, time=6, phase=contract.EVAL), end_time=31.0)
    advance_and_record(detector, build_heartbeat(step=9, time=7), end_time=80.0)
    advance_and_record(detector, build_heartbeat(step=10, time=8), end_time=86.0)
    assert detector.find_timeout(now=86.0 + 30.1) is not None


def test_heartbeats_are_expected_once_the_ranks_have_started(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    detector = build_detector(rank_count=0)
    advance_and_record(detector, end_time=1000.0)
    assert (detector.find_timeout(now=1000.0), run.have_ranks_started()) == (None, False)

    (tmp_path / "torchrun" / "none_ab12" / "attempt_0" / "0").mkdir(parents=True)
    assert run.have_ranks_started()
    detector.expect_heartbeats([0], now=1000.0)
    detector.expect_heartbeats([0], now=1020.0)
    advance_and_record(detector, end_time=1031.0)
    assert detector.find_timeout(now=1031.0) == HeartbeatTimeout(0, 31.0, 30.0)


def test_rank_that_exceeds_its_limit_by_the_largest_factor_is_returned() -> None:
    detector = build_detector(build_heartbeat(0, phase=contract.EVAL), build_heartbeat(1), rank_count=2)
    advance_and_record(detector, build_heartbeat(0, phase=contract.EVAL, time=1), end_time=1.0)

    assert detector.find_timeout(now=15.0) == HeartbeatTimeout(1, 15.0, 10.0)


def test_rank_near_its_limit_is_found_only_by_find_near_timeout() -> None:
    detector = build_detector(build_heartbeat())

    assert detector.find_timeout(now=9.0) is None
    assert detector.find_near_timeout(now=9.0) is not None
    assert detector.find_near_timeout(now=7.0) is None


def test_user_command_is_monitored_after_its_first_report() -> None:
    detector = build_detector(rank_count=0)
    assert detector.find_timeout(now=1000.0) is None

    advance_and_record(detector, build_heartbeat(), end_time=1000.0)
    assert detector.find_timeout(now=1011.0) is not None


def build_inspected_rank(
    rank: int, *, state: str = "S", stack: tuple[str, ...] = COLLECTIVE_STACK, silent_seconds: float = 11.0
) -> InspectedRank:
    return InspectedRank(rank % 4, rank, silent_seconds, contract.TRAIN, 12, state, "", stack)


TIMEOUT = HeartbeatTimeout(0, 12.0, 10.0)


@pytest.mark.parametrize(
    ("suspect", "message_start"),
    [
        (
            build_inspected_rank(6, state="T", stack=()),
            "rank 6 is stopped by a signal (SIGSTOP): no heartbeat for 12 s (limit 10 s)",
        ),
        (
            replace(build_inspected_rank(6, state="D", stack=()), kernel_function="nfs_wait"),
            "rank 6 waits for a device or a file system",
        ),
        (build_inspected_rank(6, state="", stack=()), "rank 6 has disappeared"),
        (build_inspected_rank(6, stack=()), "rank 6 does not respond"),
        (build_inspected_rank(6, stack=LOADING_STACK), "rank 6 is in /v/finetune_trainer/data/images.py:40 in open"),
    ],
)
def test_rank_that_does_not_wait_for_others_is_the_suspect(suspect: InspectedRank, message_start: str) -> None:
    found, message = explain_hang(
        [build_inspected_rank(4, silent_seconds=99.0), build_inspected_rank(5), suspect], TIMEOUT
    )

    assert found is suspect
    assert found.is_suspicious
    assert message.startswith(message_start)
    assert "in phase train after step 12" in message
    assert "rank 4 waits for other ranks in /v/torch/distributed/distributed_c10d.py:2806 in all_reduce" in message


def test_no_rank_is_suspicious_if_all_wait_for_others() -> None:
    found, _ = explain_hang([build_inspected_rank(4), build_inspected_rank(5, silent_seconds=11.5)], TIMEOUT)

    assert found is not None
    assert (found.rank, found.is_suspicious) == (5, False)


def test_hang_before_the_ranks_start_has_no_suspect() -> None:
    assert explain_hang([], TIMEOUT) == (None, "no heartbeat for 12 s (limit 10 s)")


STACK_DUMP = """Thread 0x00007f6 (most recent call first):
  File "/x/threading.py", line 327 in wait

Current thread 0x00007f7 (most recent call first):
  File "/x/stuck.py", line 9 in forever
  File "/x/stuck.py", line 12 in <module>
"""


def test_stack_of_the_main_thread_is_parsed() -> None:
    assert parse_stack(STACK_DUMP) == ("/x/stuck.py:9 in forever", "/x/stuck.py:12 in <module>")
    assert parse_stack("") == ()


@pytest.mark.parametrize(
    ("state", "silent_seconds", "expected"),
    [
        pytest.param("", 12.0, True, id="gone"),
        pytest.param("Z", 12.0, True, id="zombie"),
        pytest.param("", 25.0, False, id="gone for long"),
        pytest.param("S", 12.0, False, id="sleeping"),
        pytest.param("T", 12.0, False, id="stopped"),
    ],
)
def test_the_end_of_a_rank_is_left_to_its_launcher_for_ten_seconds(
    state: str, silent_seconds: float, expected: bool
) -> None:
    ranks = (build_inspected_rank(4), build_inspected_rank(5, state=state))

    assert may_be_reported_by_launcher(ranks, HeartbeatTimeout(0, silent_seconds, 10.0)) is expected


SAVING_DUMP = """Thread 0x1 (most recent call first):
  File "/v/safetensors/torch.py", line 300 in save_file
  File "/t/finetune_trainer/training/checkpoint_saver.py", line 78 in _run
  File "/p/threading.py", line 982 in run

Current thread 0x2 (most recent call first):
  File "/p/threading.py", line 327 in wait
  File "/p/concurrent/futures/_base.py", line 451 in result
  File "/t/finetune_trainer/training/checkpoint_saver.py", line 66 in wait
  File "/t/finetune_trainer/training/base_trainer.py", line 240 in finish_save
"""


def test_stack_of_the_saving_thread_is_parsed_if_the_main_thread_waits_for_it() -> None:
    assert parse_stack(SAVING_DUMP)[0] == "/v/safetensors/torch.py:300 in save_file"
    training = SAVING_DUMP.replace("line 66 in wait", "line 60 in start")
    assert parse_stack(training)[0] == "/p/threading.py:327 in wait"


SLEEPING_PROGRAM = """
import sys, threading, time
from pathlib import Path
from finetune_supervisor.contract import RunFolder
from finetune_supervisor.liveness.stack_dump import register_stack_dump
register_stack_dump(RunFolder(Path(sys.argv[1])), 1)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
def forever():
    print("ready", flush=True)
    time.sleep(60)
forever()
"""


@pytest.fixture
def sleeping_process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SLEEPING_PROGRAM, str(tmp_path)]
    path = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_only_a_running_process_dumps_its_stack(
    tmp_path: Path, sleeping_process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeats = [replace(build_heartbeat(1), pid=sleeping_process.pid)]

    for _ in range(2):  # repeated dumps are possible
        (found,) = inspect_ranks(RunFolder(tmp_path), heartbeats, {1: 11.0})
        assert (found.rank, found.is_suspicious) == (5, True)
        assert found.state in ("S", "R")
        assert found.stack[0].endswith(" in forever")
        assert len(found.stack) == 2

    monkeypatch.setattr(stack_dump, "_DUMP_TIMEOUT_SECONDS", 0.1)
    sleeping_process.send_signal(signal.SIGSTOP)
    while read_process_state(sleeping_process.pid) != "T":
        pass
    (found,) = inspect_ranks(RunFolder(tmp_path), heartbeats, {1: 11.0})
    assert (found.state, found.stack) == ("T", ())
    assert found.explanation == "rank 5 is stopped by a signal (SIGSTOP)"


def test_process_without_a_dump_handler_gets_no_signal(tmp_path: Path) -> None:
    """Without a handler, the signal would kill the process."""
    (tmp_path / "stacks").mkdir()
    with subprocess.Popen(["sleep", "60"]) as process:
        (found,) = inspect_ranks(RunFolder(tmp_path), [replace(build_heartbeat(), pid=process.pid)], {0: 1.0})
        assert process.poll() is None
        process.kill()
    assert found.explanation == "rank 4 does not respond"
    assert read_process_state(process.pid) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc exists on Linux only")
def test_bytes_and_cpu_time_of_a_process_are_read(tmp_path: Path) -> None:
    before = read_activity(os.getpid())
    (tmp_path / "file").write_bytes(b"x" * MIB)
    started_at = time.process_time()
    while time.process_time() - started_at < 0.1:
        pass
    after = read_activity(os.getpid())

    assert before is not None
    assert after is not None
    assert after[0] - before[0] >= MIB
    assert after[1] > before[1]
    assert read_activity(os.getpid(), proc_folder=tmp_path) is None
