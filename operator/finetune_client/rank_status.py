"""Status of each rank of a running job, which the supervisor of each node serves on its status port."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from finetune_client.connection import ClusterConnection
from finetune_client.errors import ClientError
from finetune_client.job import Job
from finetune_operator import names
from finetune_operator.kube.api_paths import object_path
from finetune_supervisor.contract import parse_json

TIMEOUT_SECONDS = 10
MAX_RANKS = 1024


class RankStatus(BaseModel):
    """Last heartbeat of a rank; memory is the peak, of the GPU or else the resident set."""

    model_config = ConfigDict(alias_generator=to_camel, extra="ignore", frozen=True)

    rank: int
    phase: str = Field(default="", max_length=64)
    step: int = 0
    heartbeat_age_seconds: float = 0.0
    peak_memory_bytes: int | None = None
    own_step_seconds: float | None = None


class NodeReport(BaseModel):
    """Response of the supervisor of a node."""

    model_config = ConfigDict(alias_generator=to_camel, extra="ignore", frozen=True)

    uid: str
    attempt: int
    ranks: tuple[RankStatus, ...] = Field(max_length=MAX_RANKS)


@dataclass(frozen=True)
class NodeRanks:
    """The ranks of one node, or the reason why they are unknown."""

    node_rank: int
    ranks: tuple[RankStatus, ...] = ()
    problem: str = ""


async def read_ranks(connection: ClusterConnection, job: Job, nodes: Iterable[int]) -> tuple[NodeRanks, ...]:
    """Return the ranks of these nodes of the current attempt, by the proxy of the API server."""
    return tuple(await asyncio.gather(*(_read_node(connection, job, node_rank) for node_rank in nodes)))


async def _read_node(connection: ClusterConnection, job: Job, node_rank: int) -> NodeRanks:
    pod = names.pod_name(job.name, job.status.attempt or 0, node_rank)
    path = object_path("Pod", job.namespace, f"{pod}:{_get_status_port(job)}", "proxy", "status")
    lines = connection.stream_lines(path, what=f"pod {job.namespace}/{pod}", params={})
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            report = NodeReport.model_validate(parse_json(await anext(lines, b"")))
    except TimeoutError:
        return NodeRanks(node_rank, problem=f"pod {pod}: no answer for {TIMEOUT_SECONDS} s")
    except (ClientError, ValueError, ValidationError) as error:
        detail = str(error) if isinstance(error, ClientError) else f"pod {pod}: its answer is not a status report"
        return NodeRanks(node_rank, problem=detail)
    finally:
        await lines.aclose()
    if (report.uid, report.attempt) != (job.metadata.uid, job.status.attempt):
        return NodeRanks(node_rank, problem=f"pod {pod}: its answer is that of another job or attempt")
    return NodeRanks(node_rank, report.ranks)


def _get_status_port(job: Job) -> int:
    try:
        return job.spec.status_port
    except ClientError:  # a newer release may have accepted a spec that this one cannot parse
        return names.STATUS_PORT
