"""Test the order in which a rank reports its final phase and leaves the process group."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from finetune_supervisor import contract
from finetune_supervisor.liveness.heartbeat import read_heartbeats
from finetune_trainer import train


def test_rank_reports_done_before_destroying_the_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Destroying the process group may hang; therefore the final phase is reported first."""
    ranks = SimpleNamespace(rank=0, local_rank=0)
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
