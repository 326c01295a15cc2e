"""Tests of progress reports from the KubeflowCallback of transformers."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import KubeflowCallback
from transformers.integrations.integration_utils import get_reporting_integration_callbacks

from finetune_supervisor import contract
from finetune_supervisor.liveness.heartbeat import read_heartbeats
from finetune_supervisor.messages import TrainingProgress
from finetune_supervisor.status.http_server import NodeSnapshot, start_status_server
from finetune_supervisor.status.progress_reports import MAX_REPORT_BYTES, REPORT_PATH, ProgressReports, parse_report
from testing.builders.nodes import node
from testing.processes.supervisors import find_free_port


def build_report(percent: int = 0, eta_seconds: int | None = None, **metrics: Any) -> bytes:
    """Build a report in the format of the callback, with metrics as strings."""
    encoded = [{"name": name, "value": str(value)} for name, value in metrics.items()]
    status = {"lastUpdatedTime": "2026-11-21T12:00:00+00:00", "progressPercentage": percent, "metrics": encoded}
    return json.dumps(
        {"trainerStatus": status if eta_seconds is None else {**status, "estimatedRemainingSeconds": eta_seconds}}
    ).encode()


@dataclass(frozen=True)
class RunningServer:
    """HTTP server of a supervisor, with the environment of the user command."""

    heartbeats: Path
    environment: dict[str, str]

    def post(self, body: bytes, *, credentials: str | None = None, path: str = REPORT_PATH) -> int:
        address = urlsplit(self.environment["KUBEFLOW_TRAINER_SERVER_URL"])
        token = Path(self.environment["KUBEFLOW_TRAINER_SERVER_TOKEN"]).read_text()
        connection = HTTPConnection(address.netloc, timeout=5)
        connection.request("POST", path, body, {"Authorization": f"Bearer {credentials or token}"})
        return connection.getresponse().status


@pytest.fixture
def running_server(tmp_path: Path) -> Iterator[RunningServer]:
    this_node = node(tmp_path, status_port=find_free_port())
    this_node.run_folder.heartbeats.mkdir()
    reports = ProgressReports(this_node)
    server = start_status_server(this_node, lambda: NodeSnapshot("", contract.RUNNING, ()), reports=reports)
    yield RunningServer(
        this_node.run_folder.heartbeats, reports.add_report_variables({"KUBEFLOW_TRAINER_SERVER_CA_CERT": "/nowhere"})
    )
    server.shutdown()
    server.server_close()


def test_transformers_sends_reports_without_script_changes(
    running_server: RunningServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in running_server.environment.items():
        monkeypatch.setenv(name, value)
    arguments = TrainingArguments(output_dir=str(tmp_path / "out"), report_to="none", use_cpu=True)
    assert KubeflowCallback in get_reporting_integration_callbacks(arguments.report_to)
    callback, control = KubeflowCallback(), TrainerControl()
    state = TrainerState(max_steps=40, is_world_process_zero=True)

    callback.on_train_begin(arguments, state, control)
    state.global_step, state.epoch = 10, 0.5
    callback.on_log(arguments, state, control, logs={"loss": 1.25, "learning_rate": 1e-4, "grad_norm": 2.0})
    callback._last_update_time = 0.0  # skip the minimum interval of five seconds between reports
    callback.on_step_end(arguments, state, control)

    (heartbeat,) = read_heartbeats(running_server.heartbeats)
    assert (heartbeat.rank, heartbeat.local_rank, heartbeat.pid, heartbeat.phase) == (0, 0, None, contract.TRAIN)
    progress = heartbeat.progress
    assert (progress.step, progress.total_steps, progress.epoch, progress.loss) == (10, 40, 0.5, 1.25)
    assert (progress.learning_rate, progress.grad_norm) == (1e-4, 2.0)
    assert progress.eta_seconds is not None
    assert heartbeat.first_step_time is not None
    callback.on_train_end(arguments, state, control)
    assert read_heartbeats(running_server.heartbeats)[0].progress.step == 40


def test_report_requires_the_token(running_server: RunningServer) -> None:
    assert running_server.post(build_report(current_step=1), credentials="guess") == 401
    assert running_server.post(build_report(current_step=1), path="/elsewhere") == 404
    assert read_heartbeats(running_server.heartbeats) == ()
    assert running_server.post(build_report(current_step=1)) == 200
    assert Path(running_server.environment["KUBEFLOW_TRAINER_SERVER_TOKEN"]).stat().st_mode & 0o777 == 0o600


def test_user_guide_snippet_sends_a_report(running_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in running_server.environment.items():
        monkeypatch.setenv(name, value)
    (snippet,) = re.findall(r"```python\n(.*?)```", Path("docs/user-guide/command.md").read_text(), re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(snippet, namespace)  # noqa: S102  code of this project's documentation

    namespace["report"](12, 60, 1.5)

    (heartbeat,) = read_heartbeats(running_server.heartbeats)
    assert heartbeat.progress == TrainingProgress(step=12, total_steps=60, loss=1.5)


def test_first_step_time_is_set_once_the_step_increases(running_server: RunningServer) -> None:
    times = []
    for step in (20, 20, 21, 22):  # the first report may contain the step of a resumed checkpoint
        running_server.post(build_report(current_step=step))
        times.append(read_heartbeats(running_server.heartbeats)[0].first_step_time)

    assert times[:2] == [None, None]
    assert times[2] is not None
    assert times[3] == times[2]


@pytest.mark.parametrize(
    "body", [b"", b"no json", b"[]", b'{"trainerStatus": 7}', b'{"trainerStatus": {"metrics": [1]}}']
)
def test_invalid_report_is_rejected(running_server: RunningServer, body: bytes) -> None:
    assert running_server.post(body) == 400
    assert read_heartbeats(running_server.heartbeats) == ()


def test_report_above_the_size_limit_is_rejected(running_server: RunningServer) -> None:
    assert running_server.post(b"x" * (MAX_REPORT_BYTES + 1)) == 413


def test_node_without_a_command_accepts_no_reports(tmp_path: Path) -> None:
    this_node = node(tmp_path, status_port=find_free_port())
    server = start_status_server(this_node, lambda: NodeSnapshot("", contract.RUNNING, ()))
    token = tmp_path / "token"
    token.write_text("any")
    url = f"http://127.0.0.1:{this_node.status_port}{REPORT_PATH}"
    environment = {"KUBEFLOW_TRAINER_SERVER_URL": url, "KUBEFLOW_TRAINER_SERVER_TOKEN": str(token)}

    assert RunningServer(tmp_path, environment).post(build_report()) == 404
    server.shutdown()
    server.server_close()


def test_report_updates_only_the_metrics_it_contains() -> None:
    before = TrainingProgress(step=7, total_steps=20, loss=2.0, eta_seconds=30)

    assert parse_report(build_report(35, loss=1.5), before) == TrainingProgress(
        step=7, total_steps=20, loss=1.5, eta_seconds=30
    )
    assert parse_report(build_report(99, eta_seconds=1, current_step=20), before) == TrainingProgress(
        20, total_steps=20, loss=2.0, eta_seconds=1
    )
    assert parse_report(build_report(100, eta_seconds=0), before) == TrainingProgress(
        step=20, total_steps=20, loss=2.0, eta_seconds=0
    )
    assert parse_report(build_report(100), TrainingProgress()) == TrainingProgress()


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e300", "many"])
def test_invalid_step_is_ignored(value: str) -> None:
    assert parse_report(build_report(current_step=value), TrainingProgress(step=3)) == TrainingProgress(step=3)


def test_server_configured_by_the_user_takes_precedence(tmp_path: Path) -> None:
    configured = {"KUBEFLOW_TRAINER_SERVER_URL": "https://user-server", "KUBEFLOW_TRAINER_SERVER_CA_CERT": "/ca"}

    assert ProgressReports(node(tmp_path)).add_report_variables(configured) == configured
    assert not node(tmp_path).run_folder.token.exists()


def test_reports_bypass_an_http_proxy(tmp_path: Path) -> None:
    env = ProgressReports(node(tmp_path)).add_report_variables(
        {"http_proxy": "http://proxy:3128", "NO_PROXY": "hub.internal"}
    )

    assert env["no_proxy"] == env["NO_PROXY"] == "hub.internal,127.0.0.1"
    assert "no_proxy" not in ProgressReports(node(tmp_path)).add_report_variables({})
