"""Incidents in which user code or a newer release writes values that the operator does not expect."""

from typing import Any

from testing.simulator.incidents.job_incidents import Incident, kill_container
from testing.simulator.world.job import SimulatedJob
from testing.simulator.world.world import World

DEEP_LIST = "[" * 1500 + "]" * 1500
TERMINATION_MESSAGES = (
    '{"final":true,"outcome":"failed","time":1e308}',
    '{"final":true,"outcome":"failed","time":-1e15,"exitCode":99999999999999999999}',
    '{"final":true,"outcome":"failed","time":NaN,"progress":{"loss":Infinity,"step":-1}}',
    '{"final":true,"outcome":"failed","errorType":"' + "cu" * 1900 + '"}',
    '{"final":true,"outcome":"failed","message":"' + "\\ud800\\u0000" * 300 + '"}',
    '{"final":true,"outcome":"failed","message":"' + "\u4e2d" * 1300 + '"}',
    '{"final":true,"outcome":"somethingNew","rank":9007199254740993,"step":' + "9" * 3000 + "}",
    '{"final":true,"outcome":"failed","progress":' + DEEP_LIST + "}",
    '{"final":true,"outcome":"failed","attempt":7,"nodeRank":-3,"firstStep":1e30,"victim":"no"}',
    DEEP_LIST,
    "\x00",
)
PROGRESS_RESPONSES = (
    b'"progress":{"step":1e308,"loss":"nan","updateTime":"9999-12-31T23:59:59Z"}}',
    b'"progress":{"step":' + b"9" * 4299 + b',"updateTime":"2026-01-01T12:00:00Z"}}',
    b'"progress":{"step":9007199254740991,"totalSteps":-1,"updateTime":"0001-01-01T00:00:00Z"}}',
    b'"progress":' + DEEP_LIST.encode() + b"}",
    b'"progress":{"step":NaN,"lastCheckpoint":"' + b"x" * 60_000 + b'","updateTime":"2026-01-01T12:00:00Z"}}',
    b'"progress":{"memory":{"peakHighest":-1e300},"updateTime":"2026-01-01T12:00:00Z"}}',
)
SPEC_CHANGES: tuple[dict[str, Any], ...] = (
    {"futureField": {"a": [1, {"b": "c"}]}},
    {"restartPolicy": {"maxRestarts": "many"}},
    {"restartPolicy": {"maxRestarts": 3, "futureKnob": {"deep": [[[]]]}}},
    {"sft": {"futureLoss": "x" * 100_000}},
    {"startupDeadlineSeconds": 2**53},
    {"output": {"somethingElse": {"claim": "models"}}},
    {"numNodes": "two"},
)
NEW_CONDITION = {"type": "New", "status": "Unknown", "reason": "SomethingNew", "message": ""}
STATUS_CHANGES: tuple[dict[str, Any], ...] = (
    {"phase": "Levitating", "futureStatus": {"a": [1, 2, {"b": None}]}},
    {"waiting": {"reason": "SomethingNew", "message": "m" * 5000, "since": "2026-01-01T12:00:00Z"}},
    {"restarts": 2**53 - 1, "withoutProgress": {"counted": 2**31, "infrastructure": 2**31}},
    {"conditions": [{**NEW_CONDITION, "lastTransitionTime": "2099-12-31T23:59:59Z"}]},
    {"progress": {"step": 2**53 - 1, "loss": 1e30, "updateTime": "1970-01-01T00:00:00Z"}},
    {"nodes": [{"nodeRank": 2**40, "podName": "x" * 5000}]},
)


def poison_termination_message(world: World, job: SimulatedJob) -> None:
    """Make a process exit with a poisoned termination message."""
    if process := job.pick_process():
        world.trainer.exit_with_message(process, world.choices.pick(TERMINATION_MESSAGES))


def poison_status_response(world: World, job: SimulatedJob) -> None:
    """Make all pods of the job respond to /status with poisoned progress."""
    attempt = job.status.get("attempt") or 0
    identity = f'{{"uid":"{job.uid}","attempt":{attempt},'
    world.trainer.poisoned_responses[job.uid] = identity.encode() + world.choices.pick(PROGRESS_RESPONSES)


def poison_spec(world: World, job: SimulatedJob) -> None:
    """Write fields or values of a newer CRD to the spec."""
    job.edit_spec(**world.choices.pick(SPEC_CHANGES))


def poison_status(world: World, job: SimulatedJob) -> None:
    """Write values of a newer release to the status."""
    if job.status:
        status = {**job.status, **world.choices.pick(STATUS_CHANGES)}
        world.server.replace_fields(job.key, actor="newer release", status=status)


POISON: tuple[Incident, ...] = (
    poison_termination_message,
    poison_status_response,
    poison_spec,
    poison_status,
    kill_container,
)
