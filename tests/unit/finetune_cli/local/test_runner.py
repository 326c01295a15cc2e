"""Local mode's loop with real processes that play a training node: ends, restarts, stops and what is left behind."""

import asyncio
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptState, Fault, Phase
from finetune_cli.local.cluster import LocalCluster, Machine
from finetune_cli.local.progress_display import Screen
from finetune_cli.local.runner import Drive
from finetune_cli.local.state_store import Record
from finetune_operator import names
from finetune_operator.observation.pods import Life, observe_pod
from testing.builders.job_files import job_file
from testing.fakes import supervisor as fake_supervisor

NODE = (sys.executable, "-S", str(Path(fake_supervisor.__file__)))


class Stage:
    """One run, and what it printed."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        self.record = Record(folder / "bert.local")
        self.printed = io.StringIO()
        file = job_file(folder, **fields)
        screen = Screen(Console(file=self.printed, highlight=False))
        self.drive = Drive(self.record.begin(file, fresh=False), screen)
        gpus = ((),) * file.job.spec.num_nodes
        machine = Machine(folder / "output", (), gpus, command=NODE)
        self.cluster = LocalCluster(machine, self.record, self.drive.children, on_event=screen.event)

    async def run(self) -> FineTuneJob:
        async with asyncio.timeout(30):
            try:
                return await self.drive.run(self.cluster)
            finally:
                self.record.close()

    async def pods(self) -> tuple[dict[str, Any], ...]:
        return await self.cluster.list_pods("default", self.drive.job["metadata"]["uid"])

    async def when_all_say(self, words: str) -> None:
        """Until every node has left these words."""
        logs = [self.cluster.attempt_folder("0") / f"node-{rank}/termination.json" for rank in (0, 1)]
        await until(lambda: all(log.exists() and words in log.read_text() for log in logs))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110  what a process does sets no event
            await asyncio.sleep(0.01)


async def test_all_nodes_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAY", "")

    job = await Stage(tmp_path).run()

    assert job.status.phase is Phase.COMPLETE
    assert job.status.attempts[0].state is AttemptState.SUCCEEDED


async def test_a_node_that_crashes_is_one_restart_of_all_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAY", "0.1:crash,0.0:wait,*:succeed")
    stage = Stage(tmp_path)

    job = await stage.run()

    crashed, last = job.status.attempts
    assert (crashed.reason, crashed.fault, crashed.node_rank) == ("Unexplained", Fault.UNKNOWN, 1)
    assert crashed.message == "node 1 (localhost) failed with exit 7: out of luck", "the end of its log"
    assert last.state is AttemptState.SUCCEEDED
    assert (
        "Unexplained: node 1 (localhost) failed with exit 7: out of luck; attempt 1 starts" in stage.printed.getvalue()
    )


async def test_a_users_mistake_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAY", "0:rows,1:wait")

    job = await Stage(tmp_path).run()

    assert job.status.phase is Phase.FAILED
    assert [record.reason for record in job.status.attempts] == ["DatasetError"]
    assert "train.jsonl: line 3: no messages" in job.status.attempts[0].message


async def test_a_crash_that_comes_again_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAY", "*:crash")

    job = await Stage(tmp_path, restartPolicy={"maxRestarts": 5, "backoffSeconds": 0}).run()

    assert job.status.phase is Phase.FAILED
    assert "the same happened before" in job.status.attempts[-1].message


async def test_ctrl_c_suspends_and_the_next_run_is_another_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAY", "*:wait")
    stage = Stage(tmp_path)
    running = asyncio.create_task(stage.run())
    await stage.when_all_say("running")
    stage.drive.stop(stage.cluster)
    job = await running

    assert job.status.phase is Phase.SUSPENDED
    assert [evidence.outcome for evidence in job.status.attempts[0].evidence] == ["stopped", "stopped"]

    monkeypatch.setenv("PLAY", "")
    job = await Stage(tmp_path).run()

    assert job.status.phase is Phase.COMPLETE
    assert [record.attempt for record in job.status.attempts] == [0, 1]


async def test_ctrl_c_again_does_not_wait_for_a_node_that_does_not_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAY", "0:deaf,1:wait")
    stage = Stage(tmp_path)
    running = asyncio.create_task(stage.run())
    await stage.when_all_say("running")
    for _ in range(3):
        stage.drive.stop(stage.cluster)
        await asyncio.sleep(0.2)
    job = await running

    assert job.status.phase is Phase.SUSPENDED
    assert job.status.attempts[0].evidence[0].exit_code == 137


async def test_ctrl_c_before_anything_started_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAY", "*:wait")
    stage = Stage(tmp_path)
    stage.drive.stop(stage.cluster)

    job = await stage.run()

    assert job.status.phase is Phase.SUSPENDED
    assert job.status.attempts == ()


async def test_a_pod_deleted_with_a_grace_is_killed_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sibling that does not listen gets the ten seconds of an abort at most; here less, to save time."""
    monkeypatch.setattr("finetune_operator.core.stop_attempt.ABORT_GRACE_SECONDS", 1)
    monkeypatch.setenv("PLAY", "0:deaf,1:rows")

    job = await Stage(tmp_path).run()

    assert job.status.phase is Phase.FAILED
    assert job.status.attempts[0].reason == "DatasetError"


async def test_pods_are_shown_as_the_api_server_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAY", "*:wait")
    stage = Stage(tmp_path)
    running = asyncio.create_task(stage.run())
    await stage.when_all_say("running")
    before = [observe_pod(pod, gone=False) for pod in await stage.pods()]
    stage.cluster.hurry(grace_seconds=30)
    during = [observe_pod(pod, gone=False) for pod in await stage.pods()]
    stage.drive.stop(stage.cluster)
    await running

    assert [(node.node_rank, node.life, node.deleting) for node in before if node] == [
        (0, Life.RUNNING, False),
        (1, Life.RUNNING, False),
    ]
    assert [node.deleting for node in during if node] == [True, True]


async def test_nothing_is_left_when_the_loop_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAY", "*:wait")
    stage = Stage(tmp_path)
    running = asyncio.create_task(stage.run())
    await stage.when_all_say("running")
    pids = [pod._process.pid for pod in stage.cluster._pods.values() if pod._process]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_the_trainer_gets_the_spec_as_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAY", "")
    stage = Stage(tmp_path)

    job = await stage.run()

    written = (stage.cluster.attempt_folder("0") / names.CONFIG_KEY).read_text()
    assert type(job.spec).model_validate_json(written) == job.spec
