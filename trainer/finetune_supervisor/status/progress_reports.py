"""Progress of programs that know nothing of us: what transformers' KubeflowCallback posts becomes a heartbeat."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace

from finetune_supervisor import contract
from finetune_supervisor.contract import Node
from finetune_supervisor.liveness.heartbeat import Heartbeat, Progress, write_heartbeat

PATH = "/progress"
LARGEST_REPORT = 64 * 1024
_URL, _TOKEN, _CA_CERT = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "TOKEN", "CA_CERT"))


class Reports:
    """Takes the reports of one node's program, which proves itself by a token that only it can read."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._token = secrets.token_hex(16)
        self._progress = Progress()
        self._first_told: int | None = None  # before or after a first step, nobody knows
        self._first_step_time: float | None = None

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """What makes transformers report here, without a change of the script. A server of the user's own stays."""
        if env.get(_URL):
            return dict(env)
        descriptor = os.open(self._node.run.token, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(self._token)
        url = f"http://127.0.0.1:{self._node.status_port}{PATH}"
        rest = {name: value for name, value in env.items() if name != _CA_CERT}  # plain HTTP within the pod
        return {**rest, **_without_proxy(env), _URL: url, _TOKEN: str(self._node.run.token)}

    def is_ours(self, authorization: str) -> bool:
        return hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode())

    def take(self, body: bytes) -> bool:
        """False if it is no report."""
        progress = parse_report(body, self._progress)
        if progress is None:
            return False
        self._progress = progress
        now = time.time()
        if self._first_told is None:
            self._first_told = progress.step
        if self._first_step_time is None and progress.step > self._first_told:
            self._first_step_time = now
        beat = Heartbeat(
            self._node.global_rank(0),
            local_rank=0,
            pid=None,
            time=now,
            phase=contract.TRAIN,
            first_step_time=self._first_step_time,
            progress=progress,
        )
        write_heartbeat(self._node.run.heartbeats, beat)
        return True


def parse_report(body: bytes, before: Progress) -> Progress | None:
    """What is known now; a report says only what changed, and its numbers are text."""
    try:
        status = json.loads(body)["trainerStatus"]
        told = {str(metric["name"]): str(metric["value"]) for metric in status.get("metrics") or ()}
        eta, percent = status.get("estimatedRemainingSeconds"), status.get("progressPercentage")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    metrics = {name: number for name, text in told.items() if (number := _number(text)) is not None}
    total = _whole(metrics.get("total_steps"), before.total_steps)
    at_the_end = total if percent == 100 and total is not None else before.step
    step = _whole(metrics.get("current_step"), at_the_end)
    return replace(
        before,
        step=step or 0,
        total_steps=total,
        epoch=metrics.get("current_epoch", metrics.get("epoch", before.epoch)),
        loss=metrics.get("loss", before.loss),
        eval_loss=metrics.get("eval_loss", before.eval_loss),
        learning_rate=metrics.get("learning_rate", before.learning_rate),
        grad_norm=metrics.get("grad_norm", before.grad_norm),
        tokens_per_second=metrics.get("tokens_per_second", before.tokens_per_second),
        eta_seconds=eta if isinstance(eta, int) else before.eta_seconds,
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _whole(number: float | None, otherwise: int | None) -> int | None:
    return int(number) if number is not None and 0 <= number < 2**63 else otherwise


def _without_proxy(env: Mapping[str, str]) -> dict[str, str]:
    """Where HTTP goes through a proxy, not to ourselves."""
    if not (env.get("http_proxy") or env.get("HTTP_PROXY")):
        return {}
    excepted = (env.get("no_proxy") or env.get("NO_PROXY") or "").split(",")
    joined = ",".join([*filter(None, excepted), "127.0.0.1"])
    return {"no_proxy": joined, "NO_PROXY": joined}
