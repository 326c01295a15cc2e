"""Receives progress reports of user commands from transformers' KubeflowCallback and writes them as heartbeats.

See decisions/305.
"""

from __future__ import annotations

import hmac
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace

from finetune_supervisor.contract import Node, parse_json
from finetune_supervisor.liveness.heartbeat import write_heartbeat
from finetune_supervisor.messages import TrainingProgress
from finetune_supervisor.status.command_heartbeat import CommandHeartbeatBuilder
from finetune_supervisor.status.progress_lines import parse_number

REPORT_PATH = "/progress"
MAX_REPORT_BYTES = 64 * 1024
_URL, _TOKEN, _CA_CERT = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "TOKEN", "CA_CERT"))


class ProgressReports:
    """Receives the progress reports of one node's user command, authenticated by a token."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._token = secrets.token_hex(16)
        self._progress = TrainingProgress()
        self._builder = CommandHeartbeatBuilder(node)

    def add_report_variables(self, env: Mapping[str, str]) -> dict[str, str]:
        """Write the token file and add the variables that make transformers send reports to this server.

        A server configured by the user takes precedence.
        """
        if env.get(_URL):
            return dict(env)
        descriptor = os.open(self._node.run_folder.token, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(self._token)
        url = f"http://127.0.0.1:{self._node.status_port}{REPORT_PATH}"
        # The CA certificate is not needed for HTTP within the pod.
        inherited_variables = {name: value for name, value in env.items() if name != _CA_CERT}
        return {**inherited_variables, **_bypass_proxy(env), _URL: url, _TOKEN: str(self._node.run_folder.token)}

    def is_authorized(self, authorization: str) -> bool:
        """Return whether an Authorization header contains the token of this node."""
        return hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode())

    def record_report(self, body: bytes) -> bool:
        """Write the report as a heartbeat of local rank 0, and return whether the body is a valid report."""
        progress = parse_report(body, self._progress)
        if progress is None:
            return False
        self._progress = progress
        heartbeat = self._builder.build(progress, now=time.time())
        write_heartbeat(self._node.run_folder.heartbeats, heartbeat)
        return True


def parse_report(body: bytes, previous_progress: TrainingProgress) -> TrainingProgress | None:
    """Return the progress updated with the changed metrics of a report, or None if the report is invalid."""
    try:
        status = parse_json(body)["trainerStatus"]
        texts = {str(metric["name"]): str(metric["value"]) for metric in status.get("metrics") or ()}
        eta, percent = status.get("estimatedRemainingSeconds"), status.get("progressPercentage")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    metrics = {name: number for name, text in texts.items() if (number := parse_number(text)) is not None}
    total_steps = _to_valid_int(metrics.get("total_steps"), previous_progress.total_steps)
    default_step = total_steps if percent == 100 and total_steps is not None else previous_progress.step
    step = _to_valid_int(metrics.get("current_step"), default_step)
    return replace(
        previous_progress,
        step=step or 0,
        total_steps=total_steps,
        epoch=metrics.get("current_epoch", metrics.get("epoch", previous_progress.epoch)),
        loss=metrics.get("loss", previous_progress.loss),
        eval_loss=metrics.get("eval_loss", previous_progress.eval_loss),
        learning_rate=metrics.get("learning_rate", previous_progress.learning_rate),
        grad_norm=metrics.get("grad_norm", previous_progress.grad_norm),
        tokens_per_second=metrics.get("tokens_per_second", previous_progress.tokens_per_second),
        eta_seconds=eta if isinstance(eta, int) else previous_progress.eta_seconds,
    )


def _to_valid_int(number: float | None, default: int | None) -> int | None:
    return int(number) if number is not None and 0 <= number < 2**63 else default


def _bypass_proxy(env: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that exclude localhost from a configured HTTP proxy."""
    if not (env.get("http_proxy") or env.get("HTTP_PROXY")):
        return {}
    hosts = (env.get("no_proxy") or env.get("NO_PROXY") or "").split(",")
    no_proxy = ",".join([*filter(None, hosts), "127.0.0.1"])
    return {"no_proxy": no_proxy, "NO_PROXY": no_proxy}
