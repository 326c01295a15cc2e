"""Tests of what a rank reports about its checkpoint and rows, and when it reports its final phase."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune_supervisor import contract
from finetune_supervisor.liveness.heartbeat import read_heartbeats
from finetune_trainer import train
from finetune_trainer.checkpoint.checkpoints import ResumePoint
from finetune_trainer.distributed.heartbeat_writer import HeartbeatWriter


def test_rank_reports_done_before_destroying_the_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Destroying the process group may hang; therefore the final phase is reported first."""
    ranks = SimpleNamespace(rank=0, local_rank=0, is_rank_zero=True)
    run_folder = contract.RunFolder(tmp_path)
    context = SimpleNamespace(run=run_folder, ranks=ranks, config=tmp_path)
    phases: list[str] = []

    def record_phases() -> None:
        phases.extend(heartbeat.phase for heartbeat in read_heartbeats(run_folder.heartbeats))

    monkeypatch.setattr(train, "RankContext", SimpleNamespace(from_environment=lambda _: context))
    for name in ("die_with_parent", "register_stack_dump", "read_spec"):
        monkeypatch.setattr(train, name, lambda *_: None)
    monkeypatch.setattr(train, "run", lambda *_: contract.DONE)
    monkeypatch.setattr(train, "destroy_process_group", record_phases)

    train.main()

    assert phases == [contract.DONE]


@pytest.mark.parametrize(
    ("is_verified", "training", "evaluation", "unverified"),
    [
        pytest.param(True, "digest", None, "", id="nothing"),
        pytest.param(True, "digest", "", "the cached evaluation rows", id="evaluation"),
        pytest.param(False, "", "digest", "the checkpoint and the cached training rows", id="others"),
    ],
)
def test_what_a_release_without_checksums_wrote_is_named(
    tmp_path: Path, is_verified: bool, training: str, evaluation: str | None, unverified: str
) -> None:
    heartbeat = HeartbeatWriter(tmp_path, rank=0, local_rank=0)
    eval_rows = None if evaluation is None else SimpleNamespace(content_digest=evaluation)
    data = SimpleNamespace(train=SimpleNamespace(content_digest=training), eval=eval_rows)
    inputs: Any = SimpleNamespace(data=data, heartbeat=heartbeat, ranks=SimpleNamespace(is_rank_zero=True))

    train.report_integrity(inputs, ResumePoint(None, is_verified=is_verified))

    found = [f"{each.reason}: {each.message}" for each in heartbeat.degraded]
    assert len(found) == bool(unverified)
    assert all(f"Unverified: a release without checksums wrote {unverified}, so" in each for each in found)
