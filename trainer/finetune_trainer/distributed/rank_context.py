"""The context of one rank: torchrun's variables and those of the operator, read from the environment once."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from finetune_supervisor import contract
from finetune_supervisor.contract import RunFolder, read_int, read_text
from finetune_trainer.distributed.collectives import Ranks


@dataclass(frozen=True)
class RankContext:
    """One rank of one attempt of a job, and the paths it reads and writes."""

    ranks: Ranks
    planned_world_size: int
    config: Path
    output: Path
    cache: Path
    run: RunFolder
    uid: str
    namespace: str
    job: str
    attempt: int

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> "RankContext":
        """Read the context from environment variables. Raises InvalidEnvironment."""
        return cls(
            ranks=Ranks.from_environment(env),
            planned_world_size=read_int(env, contract.WORLD_SIZE),
            config=Path(read_text(env, contract.CONFIG)),
            output=Path(read_text(env, contract.OUTPUT)),
            cache=Path(read_text(env, contract.CACHE_DIR)),
            run=RunFolder(Path(read_text(env, contract.RUN_DIR))),
            uid=read_text(env, contract.JOB_UID),
            namespace=read_text(env, contract.NAMESPACE),
            job=read_text(env, contract.JOB),
            attempt=read_int(env, contract.ATTEMPT),
        )
