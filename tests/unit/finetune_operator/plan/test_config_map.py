"""Tests of the ConfigMap of an attempt, and of the command that verifies it before a pod runs its content."""

import ast
import base64
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from finetune_api.termination import Termination, parse_termination
from finetune_operator import names
from finetune_operator.plan.config_map import build_config_map, build_supervisor_start, compute_config_hash
from finetune_operator.plan.supervisor_bundle import pack_supervisor
from testing.builders.jobs import SETTINGS, command
from testing.builders.manifests import build_run_plan, build_trainer_container
from testing.processes.supervisor_environment import build_supervisor_environment

BUNDLED = replace(SETTINGS, supervisor=pack_supervisor())
PROGRAM = command({"exec": ["true"]})


class Mount:
    """A folder that replaces the mounted ConfigMap, and the other folders of the container."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.working_dir = folder / "config", folder / "run", folder / "image"
        for path in (self.folder, self.run, self.working_dir):
            path.mkdir()
        self.marker, self.termination_log = folder / "marker", folder / "termination-log"
        config_map = build_config_map(build_run_plan(settings=BUNDLED, **PROGRAM))
        self.file = self.folder / names.SUPERVISOR_KEY
        self.file.write_bytes(base64.b64decode(config_map["binaryData"][names.SUPERVISOR_KEY]))

    def start_container(self, **env: str) -> subprocess.Popen[str]:
        """Start the command of the container with this Python."""
        arguments = build_supervisor_start(build_run_plan(settings=BUNDLED, **PROGRAM))
        mounted = str(Path(names.CONFIG_DIR, names.SUPERVISOR_KEY))
        assert (arguments[0], arguments.count(mounted)) == ("python3", 1)
        local = [sys.executable, *(str(self.file) if part == mounted else part for part in arguments[1:])]
        env = {names.ENV_RUN_DIR: str(self.run), names.ENV_TERMINATION_LOG: str(self.termination_log), **env}
        return subprocess.Popen(local, env=env, cwd=self.working_dir, stdout=PIPE, stderr=PIPE, text=True)

    def run_container(self, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start_container(**env)
        output, errors = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def read_termination(self) -> Termination:
        termination = parse_termination(self.termination_log.read_text())
        assert termination is not None
        return termination


@pytest.fixture
def mount(tmp_path: Path) -> Mount:
    return Mount(tmp_path)


def test_the_supervisor_of_the_operator_is_run_from_a_private_copy(mount: Mount) -> None:
    process = mount.run_container()

    assert (process.returncode, process.stderr.count("FINETUNE_NAMESPACE is missing")) == (2, 1), process.stderr
    assert (mount.run / names.SUPERVISOR_KEY).read_bytes() == mount.file.read_bytes()
    assert not mount.termination_log.exists()


def test_a_signal_before_the_supervisor_runs_stops_it(mount: Mount, tmp_path: Path) -> None:
    content, pod = mount.file.read_bytes(), tmp_path / "pod"
    mount.file.unlink()
    os.mkfifo(mount.file)
    pod.mkdir()
    process = mount.start_container(**build_supervisor_environment(pod))
    with mount.file.open("wb") as file:  # blocks until the program opens the file
        process.send_signal(signal.SIGTERM)
        file.write(content)
    process.communicate()

    assert process.returncode == 128 + signal.SIGTERM
    assert json.loads((pod / "termination-log").read_text())["message"] == "stopped before training began"


def test_another_supervisor_is_not_run(mount: Mount) -> None:
    mount.file.write_text(f"open({str(mount.marker)!r}, 'w')")
    assert subprocess.run([sys.executable, str(mount.file)], check=False).returncode == 0
    mount.marker.unlink()  # the program would have created it

    process = mount.run_container()

    termination = mount.read_termination()
    assert (process.returncode, mount.marker.exists(), list(mount.run.iterdir())) == (1, False, [])
    assert (termination.final, termination.outcome, termination.error_type) == (True, "failed", "ConfigMapReplaced")
    assert termination.message.startswith("ConfigMap bert-0-11111111, key supervisor.pyz: expected SHA-256 ")
    assert f"supervisor: {termination.message}" in process.stderr


def test_a_missing_supervisor_is_reported(mount: Mount) -> None:
    mount.file.unlink()

    assert mount.run_container().returncode == 1
    assert "No such file" in mount.read_termination().message


def test_the_check_imports_no_module_of_the_image(mount: Mount) -> None:
    for module in ("hashlib", "json", "sitecustomize"):
        (mount.working_dir / f"{module}.py").write_text(f"open({str(mount.marker)!r}, 'w')")
    mount.file.write_text("")

    assert mount.run_container(PYTHONPATH=str(mount.working_dir)).returncode == 1
    assert not mount.marker.exists()


def test_the_check_is_valid_in_old_versions_of_python_and_kubernetes_expands_nothing_in_it() -> None:
    arguments = build_trainer_container(**PROGRAM)["command"]
    program = arguments[arguments.index("-c") + 1]

    assert ast.parse(program, feature_version=(3, 4)).body
    assert "$" not in program


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"ttlSecondsAfterFinished": 9}, id="ttl"),
        pytest.param({"restartPolicy": {"maxRestarts": 9}}, id="restart policy"),
        pytest.param({"suspend": True}, id="suspend"),
    ],
)
def test_fields_that_can_be_changed_at_any_time_are_not_in_the_config_map(change: dict[str, Any]) -> None:
    before, after = build_run_plan(), build_run_plan(**change)

    assert build_config_map(before) == build_config_map(after)
    assert compute_config_hash(before) == compute_config_hash(after)


def test_the_hash_of_the_config_map_depends_on_each_file() -> None:
    plans = (
        build_run_plan(),
        build_run_plan(numNodes=3),
        replace(build_run_plan(), defaults="{}"),
        build_run_plan(**PROGRAM),
        build_run_plan(settings=BUNDLED, **PROGRAM),
    )
    assert len({compute_config_hash(plan) for plan in plans}) == len(plans)
