"""What every rank does at the very end."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from finetune_supervisor import contract
from finetune_supervisor.liveness.heartbeat import read_heartbeats
from finetune_trainer import train


def test_a_rank_says_that_it_is_done_before_it_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process group may hang when it is left, and then it must be known that nothing was left to do."""
    ranks = SimpleNamespace(rank=0, local_rank=0)
    place = SimpleNamespace(run=contract.RunFolder(tmp_path), ranks=ranks, config=tmp_path)
    told: list[str] = []
    monkeypatch.setattr(train, "Place", SimpleNamespace(from_environment=lambda _: place))
    for name in ("die_with_parent", "answer_with_stack", "read_spec"):
        monkeypatch.setattr(train, name, lambda *_: None)
    monkeypatch.setattr(train, "run", lambda *_: contract.DONE)
    beats = contract.RunFolder(tmp_path).heartbeats
    monkeypatch.setattr(train, "leave_process_group", lambda: told.extend(b.phase for b in read_heartbeats(beats)))

    train.main()

    assert told == [contract.DONE]
