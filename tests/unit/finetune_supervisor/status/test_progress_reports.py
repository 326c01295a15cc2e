"""Reports of transformers' KubeflowCallback, over HTTP as it sends them."""

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
from finetune_supervisor.liveness.heartbeat import Progress, read_heartbeats
from finetune_supervisor.status.http_server import Snapshot, serve
from finetune_supervisor.status.progress_reports import LARGEST_REPORT, PATH, Reports, parse_report
from testing.builders.nodes import node
from testing.processes.supervisors import free_port


def report(percent: int = 0, eta: int | None = None, **metrics: Any) -> bytes:
    """As the callback writes it: every metric is text."""
    told = [{"name": name, "value": str(value)} for name, value in metrics.items()]
    status = {"lastUpdatedTime": "2026-11-21T12:00:00+00:00", "progressPercentage": percent, "metrics": told}
    return json.dumps(
        {"trainerStatus": status if eta is None else {**status, "estimatedRemainingSeconds": eta}}
    ).encode()


@dataclass(frozen=True)
class Listening:
    """A supervisor's server, and the environment it gives its program."""

    heartbeats: Path
    environment: dict[str, str]

    def post(self, body: bytes, *, bearer: str | None = None, path: str = PATH) -> int:
        address = urlsplit(self.environment["KUBEFLOW_TRAINER_SERVER_URL"])
        read = Path(self.environment["KUBEFLOW_TRAINER_SERVER_TOKEN"]).read_text()
        connection = HTTPConnection(address.netloc, timeout=5)
        connection.request("POST", path, body, {"Authorization": f"Bearer {bearer or read}"})
        return connection.getresponse().status


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Listening]:
    of = node(tmp_path, status_port=free_port())
    of.run.heartbeats.mkdir()
    reports = Reports(of)
    server = serve(of, lambda: Snapshot("", contract.RUNNING, ()), reports=reports)
    yield Listening(of.run.heartbeats, reports.environment({"KUBEFLOW_TRAINER_SERVER_CA_CERT": "/nowhere"}))
    server.shutdown()
    server.server_close()


def test_transformers_reports_here_without_being_asked(
    listening: Listening, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in listening.environment.items():
        monkeypatch.setenv(name, value)
    arguments = TrainingArguments(output_dir=str(tmp_path / "out"), report_to="none", use_cpu=True)
    assert KubeflowCallback in get_reporting_integration_callbacks(arguments.report_to)
    callback, control = KubeflowCallback(), TrainerControl()
    state = TrainerState(max_steps=40, is_world_process_zero=True)

    callback.on_train_begin(arguments, state, control)
    state.global_step, state.epoch = 10, 0.5
    callback.on_log(arguments, state, control, logs={"loss": 1.25, "learning_rate": 1e-4, "grad_norm": 2.0})
    callback._last_update_time = 0.0  # five seconds have passed
    callback.on_step_end(arguments, state, control)

    (beat,) = read_heartbeats(listening.heartbeats)
    assert (beat.rank, beat.local_rank, beat.pid, beat.phase) == (0, 0, None, contract.TRAIN)
    told = beat.progress
    assert (told.step, told.total_steps, told.epoch, told.loss) == (10, 40, 0.5, 1.25)
    assert (told.learning_rate, told.grad_norm) == (1e-4, 2.0)
    assert told.eta_seconds is not None
    assert beat.first_step_time is not None
    callback.on_train_end(arguments, state, control)
    assert read_heartbeats(listening.heartbeats)[0].progress.step == 40


def test_only_who_can_read_the_token_is_believed(listening: Listening) -> None:
    assert listening.post(report(current_step=1), bearer="guess") == 401
    assert listening.post(report(current_step=1), path="/elsewhere") == 404
    assert read_heartbeats(listening.heartbeats) == ()
    assert listening.post(report(current_step=1)) == 200
    assert Path(listening.environment["KUBEFLOW_TRAINER_SERVER_TOKEN"]).stat().st_mode & 0o777 == 0o600


def test_the_few_lines_of_the_manual_are_a_report(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in listening.environment.items():
        monkeypatch.setenv(name, value)
    (lines,) = re.findall(r"```python\n(.*?)```", Path("docs/user-guide/command.md").read_text(), re.DOTALL)
    manual: dict[str, Any] = {}
    exec(lines, manual)  # noqa: S102  our own page

    manual["report"](12, 60, 1.5)

    (beat,) = read_heartbeats(listening.heartbeats)
    assert beat.progress == Progress(step=12, total_steps=60, loss=1.5)


def test_a_first_step_is_known_once_steps_advance(listening: Listening) -> None:
    times = []
    for step in (20, 20, 21, 22):  # the first may be what it goes on from
        listening.post(report(current_step=step))
        times.append(read_heartbeats(listening.heartbeats)[0].first_step_time)

    assert times[:2] == [None, None]
    assert times[2] is not None
    assert times[3] == times[2]


@pytest.mark.parametrize(
    "body", [b"", b"no json", b"[]", b'{"trainerStatus": 7}', b'{"trainerStatus": {"metrics": [1]}}']
)
def test_what_is_no_report_is_refused(listening: Listening, body: bytes) -> None:
    assert listening.post(body) == 400
    assert read_heartbeats(listening.heartbeats) == ()


def test_a_report_has_a_largest_size(listening: Listening) -> None:
    assert listening.post(b"x" * (LARGEST_REPORT + 1)) == 413


def test_a_trainer_of_ours_takes_no_reports(tmp_path: Path) -> None:
    of = node(tmp_path, status_port=free_port())
    server = serve(of, lambda: Snapshot("", contract.RUNNING, ()))
    token = tmp_path / "token"
    token.write_text("any")
    url = f"http://127.0.0.1:{of.status_port}{PATH}"
    environment = {"KUBEFLOW_TRAINER_SERVER_URL": url, "KUBEFLOW_TRAINER_SERVER_TOKEN": str(token)}

    assert Listening(tmp_path, environment).post(report()) == 404
    server.shutdown()
    server.server_close()


def test_a_report_says_only_what_changed() -> None:
    before = Progress(step=7, total_steps=20, loss=2.0, eta_seconds=30)

    assert parse_report(report(35, loss=1.5), before) == Progress(step=7, total_steps=20, loss=1.5, eta_seconds=30)
    assert parse_report(report(99, eta=1, current_step=20), before) == Progress(20, 20, loss=2.0, eta_seconds=1)
    assert parse_report(report(100, eta=0), before) == Progress(step=20, total_steps=20, loss=2.0, eta_seconds=0)
    assert parse_report(report(100), Progress()) == Progress()


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e300", "many"])
def test_a_step_that_is_none_leaves_the_last_one(value: str) -> None:
    assert parse_report(report(current_step=value), Progress(step=3)) == Progress(step=3)


def test_a_server_of_the_users_own_stays(tmp_path: Path) -> None:
    theirs = {"KUBEFLOW_TRAINER_SERVER_URL": "https://theirs", "KUBEFLOW_TRAINER_SERVER_CA_CERT": "/ca"}

    assert Reports(node(tmp_path)).environment(theirs) == theirs
    assert not node(tmp_path).run.token.exists()


def test_a_proxy_is_not_asked_for_what_is_here(tmp_path: Path) -> None:
    given = Reports(node(tmp_path)).environment({"http_proxy": "http://proxy:3128", "NO_PROXY": "hub.internal"})

    assert given["no_proxy"] == given["NO_PROXY"] == "hub.internal,127.0.0.1"
    assert "no_proxy" not in Reports(node(tmp_path)).environment({})
