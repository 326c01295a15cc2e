"""Tests of success, restarts, Ctrl-C and cleanup in the local runner, with fake supervisor processes."""

import asyncio
import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptState, Fault, Phase
from finetune_cli.local.cluster import LocalCluster, LocalResources
from finetune_cli.local.runner import LocalRunner
from finetune_cli.local.state_store import StateStore
from finetune_cli.progress_display import ProgressDisplay
from finetune_cli.run import _stop_on_signals
from finetune_operator import names
from finetune_operator.observation.pods import PodPhase, observe_pod
from testing.builders.job_files import job_file
from testing.fakes import supervisor
from testing.processes.waiting import wait_in_event_loop

FAKE_SUPERVISOR = (sys.executable, "-S", str(Path(supervisor.__file__)))


class LocalRun:
    """Local run of a job with a fake supervisor, and its console output."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        self.store = StateStore(folder / "bert.local")
        self.console_output = io.StringIO()
        file = job_file(folder, **fields)
        display = ProgressDisplay(Console(file=self.console_output, highlight=False))
        self.runner = LocalRunner(self.store.open_job(file, start_over=False), display)
        gpus = ((),) * file.job.spec.num_nodes
        resources = LocalResources(folder / "output", (), gpus, command=FAKE_SUPERVISOR)
        self.cluster = LocalCluster(resources, self.store, self.runner.children, on_event=display.print_event)

    async def run(self) -> FineTuneJob:
        async with asyncio.timeout(30):
            try:
                return await self.runner.run(self.cluster)
            finally:
                self.store.close()

    async def list_pods(self) -> tuple[dict[str, Any], ...]:
        return await self.cluster.list_pods("default", names.JOB_UID, self.runner.job["metadata"]["uid"])

    async def wait_for_message(self, text: str) -> None:
        """Wait until the termination message of each node contains this text."""
        logs = [self.cluster.get_attempt_folder("0") / f"node-{rank}/termination.json" for rank in (0, 1)]
        await wait_in_event_loop(lambda: all(log.exists() and text in log.read_text() for log in logs))


async def test_crashed_node_causes_one_restart_of_all_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_BEHAVIOURS", "0.1:crash,0.0:wait,*:succeed")
    local_run = LocalRun(tmp_path)

    job = await local_run.run()

    failed_attempt, last_attempt = job.status.attempts
    assert (failed_attempt.reason, failed_attempt.fault, failed_attempt.node_rank) == ("Unexplained", Fault.UNKNOWN, 1)
    assert failed_attempt.message == "node 1 (localhost) failed with exit 7: out of luck", (
        "the message is the end of the log"
    )
    assert last_attempt.state is AttemptState.SUCCEEDED
    assert (
        "Unexplained: node 1 (localhost) failed with exit 7: out of luck; attempt 1 starts"
        in local_run.console_output.getvalue()
    )


async def test_user_error_is_not_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_BEHAVIOURS", "0:rows,1:wait")

    job = await LocalRun(tmp_path).run()

    assert job.status.phase is Phase.FAILED
    assert [record.reason for record in job.status.attempts] == ["DatasetError"]
    assert "train.jsonl: line 3: no messages" in job.status.attempts[0].message


async def test_repeated_crash_fails_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_BEHAVIOURS", "*:crash")

    job = await LocalRun(tmp_path, restartPolicy={"maxRestarts": 5, "backoffSeconds": 0}).run()

    assert job.status.phase is Phase.FAILED
    assert "the same happened before" in job.status.attempts[-1].message


async def test_ctrl_c_suspends_the_job_and_the_next_run_starts_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_BEHAVIOURS", "*:wait")
    local_run = LocalRun(tmp_path)
    task = asyncio.create_task(local_run.run())
    await local_run.wait_for_message("running")
    local_run.runner.stop(local_run.cluster)
    job = await task

    assert job.status.phase is Phase.SUSPENDED
    assert [evidence.outcome for evidence in job.status.attempts[0].evidence] == ["stopped", "stopped"]

    monkeypatch.setenv("FAKE_BEHAVIOURS", "")
    job = await LocalRun(tmp_path).run()

    assert job.status.phase is Phase.COMPLETE
    assert [record.attempt for record in job.status.attempts] == [0, 1]


async def test_repeated_ctrl_c_kills_a_node_that_ignores_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_BEHAVIOURS", "0:ignore-sigterm,1:wait")
    local_run = LocalRun(tmp_path)
    task = asyncio.create_task(local_run.run())
    await local_run.wait_for_message("running")
    for _ in range(3):
        local_run.runner.stop(local_run.cluster)
        await asyncio.sleep(0.2)
    job = await task

    assert job.status.phase is Phase.SUSPENDED
    assert job.status.attempts[0].evidence[0].exit_code == 137


async def test_ctrl_c_before_the_nodes_start_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_BEHAVIOURS", "*:wait")
    local_run = LocalRun(tmp_path)
    local_run.runner.stop(local_run.cluster)

    job = await local_run.run()

    assert job.status.phase is Phase.SUSPENDED
    assert job.status.attempts == ()


async def test_deleted_pod_is_killed_after_its_grace_period(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses an abort grace period of one second instead of ten."""
    monkeypatch.setattr("finetune_operator.core.stop_attempt.ABORT_GRACE_SECONDS", 1)
    monkeypatch.setenv("FAKE_BEHAVIOURS", "0:ignore-sigterm,1:rows")

    job = await LocalRun(tmp_path).run()

    assert job.status.phase is Phase.FAILED
    assert job.status.attempts[0].reason == "DatasetError"


async def test_observe_pod_accepts_local_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_BEHAVIOURS", "*:wait")
    local_run = LocalRun(tmp_path)
    task = asyncio.create_task(local_run.run())
    await local_run.wait_for_message("running")
    nodes_before = [observe_pod(pod, is_tombstone=False) for pod in await local_run.list_pods()]
    local_run.cluster.force_stop(grace_seconds=30)
    nodes_while_stopping = [observe_pod(pod, is_tombstone=False) for pod in await local_run.list_pods()]
    local_run.runner.stop(local_run.cluster)
    await task

    assert [(node.node_rank, node.phase, node.is_terminating) for node in nodes_before if node] == [
        (0, PodPhase.RUNNING, False),
        (1, PodPhase.RUNNING, False),
    ]
    assert [node.is_terminating for node in nodes_while_stopping if node] == [True, True]


async def test_cancelled_run_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_BEHAVIOURS", "*:wait")
    local_run = LocalRun(tmp_path)
    task = asyncio.create_task(local_run.run())
    await local_run.wait_for_message("running")
    pids = [pod._process.pid for pod in local_run.cluster._pods.values() if pod._process]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_spec_is_written_to_a_file_for_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_BEHAVIOURS", "")
    local_run = LocalRun(tmp_path)

    job = await local_run.run()

    config_text = (local_run.cluster.get_attempt_folder("0") / names.CONFIG_KEY).read_text()
    assert type(job.spec).model_validate_json(config_text) == job.spec


async def test_a_hangup_that_nohup_ignores_does_not_stop_a_run(tmp_path: Path) -> None:
    local_run, loop = LocalRun(tmp_path), asyncio.get_running_loop()
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        _stop_on_signals(local_run.runner, local_run.cluster)

        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert [loop.remove_signal_handler(number) for number in (signal.SIGINT, signal.SIGTERM)] == [True, True]
    finally:
        signal.signal(signal.SIGHUP, previous)
        await local_run.cluster.close()
        local_run.store.close()
