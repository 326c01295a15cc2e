"""Where and as whom a rank runs: the launcher's numbers and the operator's names, read once."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from finetune_supervisor import contract
from finetune_supervisor.contract import RunFolder, number, text
from finetune_trainer.distributed.collectives import Ranks


@dataclass(frozen=True)
class Place:
    """One rank of one attempt of one job."""

    ranks: Ranks
    promised_world_size: int
    config: Path
    output: Path
    cache: Path
    run: RunFolder
    uid: str
    namespace: str
    job: str
    attempt: int

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> "Place":
        return cls(
            ranks=Ranks.from_environment(env),
            promised_world_size=number(env, contract.WORLD_SIZE),
            config=Path(text(env, contract.CONFIG)),
            output=Path(text(env, contract.OUTPUT)),
            cache=Path(text(env, contract.CACHE_DIR)),
            run=RunFolder(Path(text(env, contract.RUN_DIR))),
            uid=text(env, contract.JOB_UID),
            namespace=text(env, contract.NAMESPACE),
            job=text(env, contract.JOB),
            attempt=number(env, contract.ATTEMPT),
        )
