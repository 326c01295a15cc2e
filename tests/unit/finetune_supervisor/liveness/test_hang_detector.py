"""When a rank counts as hanging, and which one is blamed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from finetune_supervisor import contract
from finetune_supervisor.contract import RunFolder
from finetune_supervisor.liveness.hang_detector import Silence, StuckRank, Watch, explain_hang, parse_stack
from finetune_supervisor.liveness.heartbeat import Heartbeat, Progress
from finetune_supervisor.liveness.stack_dump import examine, process_state

LIMIT = 10.0
COLLECTIVE = ("/v/torch/distributed/distributed_c10d.py:2806 in all_reduce",)
LOADING = ("/v/finetune_trainer/data/images.py:40 in open", "/v/torch/utils/data/fetch.py:54 in fetch")


def beat(local_rank: int = 0, *, step: int = 5, phase: str = contract.TRAIN, time: float = 0.0) -> Heartbeat:
    return Heartbeat(
        rank=4 + local_rank,
        local_rank=local_rank,
        pid=7,
        time=time,
        phase=phase,
        first_step=3,
        progress=Progress(step=step),
    )


def watching(*beats: Heartbeat, ranks: int = 1, limit: float = LIMIT, still: bool = False) -> Watch:
    watch = Watch(limit=limit, now=0.0, is_still=lambda _: still)
    watch.expect(range(ranks), now=0.0)
    watch.listen(beats, now=0.0)
    return watch


def listen(watch: Watch, *beats: Heartbeat, until: float) -> None:
    """Every second, as the supervisor does; the heartbeats are there at the end."""
    while watch.listened + 1 < until:
        watch.listen((), now=watch.listened + 1)
    watch.listen(beats, now=until)


@pytest.mark.parametrize(
    ("seen", "seconds"),
    [
        ((), 30.0),  # not even begun
        ((beat(phase=contract.INIT),), 30.0),
        ((beat(phase=contract.LOAD),), 720.0),
        ((beat(step=3),), 60.0),  # the first step compiles
        ((beat(),), 10.0),
        ((beat(phase=contract.EVAL),), 60.0),
        ((beat(phase=contract.SAVE),), 60.0),
        ((beat(phase=contract.PUBLISH),), 720.0),  # up to the Hub
        ((beat(phase=contract.DONE),), 10.0),
    ],
)
def test_every_phase_has_its_own_patience(seen: tuple[Heartbeat, ...], seconds: float) -> None:
    watch = watching(*seen)

    assert watch.silence(now=seconds) is None
    assert watch.silence(now=seconds + 0.1) == Silence(0, seconds + 0.1, seconds)


@pytest.mark.parametrize("phase", [contract.LOAD, contract.SAVE, contract.PUBLISH, contract.TRAIN])
def test_a_process_that_cannot_go_on_is_given_no_more_time_in_any_phase(phase: str) -> None:
    watch = watching(beat(phase=phase), still=True)

    assert watch.silence(now=9.9) is None
    assert watch.silence(now=10.1) == Silence(0, 10.1, 10.0)


def test_a_supervisor_that_stood_still_itself_blames_nobody() -> None:
    watch = watching(beat())
    listen(watch, until=8.0)
    watch.listen((), now=1000.0)

    assert watch.silence(now=1001.0) is None
    listen(watch, until=1002.5)
    assert watch.silence(now=1002.5) is not None


def test_without_a_limit_nothing_hangs() -> None:
    assert watching(beat(), limit=0).silence(now=1e9) is None


def test_the_same_file_read_again_is_no_sign_of_life() -> None:
    watch = watching(beat())
    listen(watch, beat(), until=9.0)
    assert watch.silence(now=10.5) is not None

    listen(watch, beat(time=1.0), until=10.5)
    assert watch.silence(now=20.0) is None


def test_the_clock_of_the_heartbeats_may_jump() -> None:
    watch = watching(beat(time=1e9))
    listen(watch, beat(time=5.0), until=8.0)

    assert watch.silence(now=17.0) is None


def test_slow_steps_are_given_time_and_pauses_between_them_do_not_count() -> None:
    watch = watching(beat(step=4))
    for number in range(1, 6):
        listen(watch, beat(step=4 + number, time=number), until=6.0 * number)
    assert watch.silence(now=30.0 + 29.9) is None
    silence = watch.silence(now=30.0 + 30.1)
    assert silence is not None
    assert silence.limit == 30.0  # five times six seconds

    listen(watch, beat(step=9, time=6, phase=contract.EVAL), until=31.0)
    listen(watch, beat(step=9, time=7), until=80.0)
    listen(watch, beat(step=10, time=8), until=86.0)
    assert watch.silence(now=86.0 + 30.1) is not None


def test_ranks_are_waited_for_from_when_torchrun_starts_them(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    watch = watching(ranks=0)
    listen(watch, until=1000.0)
    assert (watch.silence(now=1000.0), run.ranks_began()) == (None, False)

    (tmp_path / "torchrun" / "none_ab12" / "attempt_0" / "0").mkdir(parents=True)
    assert run.ranks_began()
    watch.expect([0], now=1000.0)
    watch.expect([0], now=1020.0)
    listen(watch, until=1031.0)
    assert watch.silence(now=1031.0) == Silence(0, 31.0, 30.0)


def test_the_most_silent_by_its_own_measure_is_named() -> None:
    watch = watching(beat(0, phase=contract.EVAL), beat(1), ranks=2)
    listen(watch, beat(0, phase=contract.EVAL, time=1), until=1.0)

    assert watch.silence(now=15.0) == Silence(1, 15.0, 10.0)


def test_a_node_that_is_stopped_just_before_its_own_limit_hung_too() -> None:
    watch = watching(beat())

    assert watch.silence(now=9.0) is None
    assert watch.nearly(now=9.0) is not None
    assert watch.nearly(now=7.0) is None


def test_a_program_of_the_users_own_is_watched_from_its_first_report() -> None:
    watch = watching(ranks=0)
    assert watch.silence(now=1000.0) is None

    listen(watch, beat(), until=1000.0)
    assert watch.silence(now=1011.0) is not None


def stuck(rank: int, *, state: str = "S", stack: tuple[str, ...] = COLLECTIVE, silent: float = 11.0) -> StuckRank:
    return StuckRank(rank % 4, rank, silent, contract.TRAIN, 12, state, "", stack)


SILENCE = Silence(0, 12.0, 10.0)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (
            stuck(6, state="T", stack=()),
            "rank 6 is stopped by a signal (SIGSTOP): no sign of life for 12 s (limit 10 s)",
        ),
        (replace(stuck(6, state="D", stack=()), kernel="nfs_wait"), "rank 6 waits for a device or a file system"),
        (stuck(6, state="", stack=()), "rank 6 is gone"),
        (stuck(6, stack=()), "rank 6 does not answer"),
        (stuck(6, stack=LOADING), "rank 6 stands in /v/finetune_trainer/data/images.py:40 in open"),
    ],
)
def test_who_does_not_wait_for_others_is_blamed(odd: StuckRank, words: str) -> None:
    found, said = explain_hang([stuck(4, silent=99.0), stuck(5), odd], SILENCE)

    assert found is odd
    assert found.stands_out
    assert said.startswith(words)
    assert "in phase train after step 12" in said
    assert "rank 4 waits for others in /v/torch/distributed/distributed_c10d.py:2806 in all_reduce" in said


def test_where_all_wait_nobody_on_this_node_stands_out() -> None:
    found, _ = explain_hang([stuck(4), stuck(5, silent=11.5)], SILENCE)

    assert found is not None
    assert (found.rank, found.stands_out) == (5, False)


def test_ranks_that_never_began_have_no_name() -> None:
    assert explain_hang([], SILENCE) == (None, "no sign of life for 12 s (limit 10 s)")


DUMP = """Thread 0x00007f6 (most recent call first):
  File "/x/threading.py", line 327 in wait

Current thread 0x00007f7 (most recent call first):
  File "/x/stuck.py", line 9 in forever
  File "/x/stuck.py", line 12 in <module>
"""


def test_the_main_threads_stack_is_read() -> None:
    assert parse_stack(DUMP) == ("/x/stuck.py:9 in forever", "/x/stuck.py:12 in <module>")
    assert parse_stack("") == ()


SLEEPER = """
import sys, threading, time
from pathlib import Path
from finetune_supervisor.contract import RunFolder
from finetune_supervisor.liveness.stack_dump import answer_with_stack
answer_with_stack(RunFolder(Path(sys.argv[1])), 1)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
def forever():
    print("ready", flush=True)
    time.sleep(60)
forever()
"""


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SLEEPER, str(tmp_path)]
    path = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_a_process_is_asked_where_it_stands(tmp_path: Path, sleeper: subprocess.Popen[str]) -> None:
    beats = [replace(beat(1), pid=sleeper.pid)]

    for _ in range(2):  # it goes on, and may be asked again
        (found,) = examine(RunFolder(tmp_path), beats, {1: 11.0})
        assert (found.rank, found.stands_out) == (5, True)
        assert found.state in ("S", "R")
        assert found.stack[0].endswith(" in forever")
        assert len(found.stack) == 2

    sleeper.send_signal(signal.SIGSTOP)
    while process_state(sleeper.pid) != "T":
        pass
    (found,) = examine(RunFolder(tmp_path), beats, {1: 11.0})
    assert (found.state, found.stack) == ("T", ())
    assert found.explanation == "rank 5 is stopped by a signal (SIGSTOP)"


def test_who_cannot_answer_is_not_asked(tmp_path: Path) -> None:
    """The signal would end a process that has not said that it answers."""
    (tmp_path / "stacks").mkdir()
    with subprocess.Popen(["sleep", "60"]) as process:
        (found,) = examine(RunFolder(tmp_path), [replace(beat(), pid=process.pid)], {0: 1.0})
        assert process.poll() is None
        process.kill()
    assert found.explanation == "rank 4 does not answer"
    assert process_state(process.pid) == ""
