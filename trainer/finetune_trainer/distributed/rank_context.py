"""Rank numbers and rank context, read once from the environment variables of torchrun and the operator."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from finetune_supervisor import contract
from finetune_supervisor.contract import RunFolder, read_int, read_text
from finetune_trainer.errors import WorldSizeMismatch


@dataclass(frozen=True)
class Ranks:
    """Rank, local rank and world sizes of this process, as torch.distributed defines them."""

    rank: int
    local_rank: int
    local_world_size: int
    world_size: int

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> "Ranks":
        """Read the rank numbers from the variables of torchrun."""
        return cls(
            rank=int(env["RANK"]),
            local_rank=int(env["LOCAL_RANK"]),
            local_world_size=int(env["LOCAL_WORLD_SIZE"]),
            world_size=int(env["WORLD_SIZE"]),
        )

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0 of the job."""
        return self.rank == 0

    @property
    def node_count(self) -> int:
        """The number of nodes of the job."""
        return self.world_size // self.local_world_size


def check_world_size(ranks: Ranks, *, planned_world_size: int) -> None:
    """Raise WorldSizeMismatch if the world size is not the planned one, because this changes the effective batch."""
    if ranks.world_size != planned_world_size:
        raise WorldSizeMismatch(
            f"{ranks.world_size} ranks were started, but the job plans {planned_world_size}"
            " (numNodes x nprocPerNode); do not set torchrun's variables in the image or in spec.env"
        )


@dataclass(frozen=True)
class RankContext:
    """The job, attempt, rank numbers and paths of one rank."""

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
    planned_cpus: float | None = None
    """CPUs of the container: its limit or its request; None if it has neither."""
    planned_gpus: int = 0
    """NVIDIA GPUs in the limits of the container."""
    other_gpus: str = ""
    """Resource of the GPUs of another vendor in the limits, such as amd.com/gpu; empty if there are none."""

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
            planned_cpus=float(env[contract.CPUS]) if contract.CPUS in env else None,
            planned_gpus=int(env.get(contract.GPUS, "0")),
            other_gpus=env.get(contract.OTHER_GPUS, ""),
        )
