"""Tests that the supervisor uses only files of the ConfigMap that have the digests of the pod's environment."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from finetune_api.termination import parse_termination
from finetune_supervisor import contract
from finetune_supervisor.launch.config_files import ConfigMapReplaced, use_verified_config
from finetune_supervisor.launch.user_command import read_command
from testing.builders.manifests import build_first_pod_manifest, build_run_plan
from testing.processes.supervisors import REPOSITORY

FORGED = json.dumps({"command": {"exec": ["sh", "-c", "echo the program of a stranger"]}})


def mount_config(folder: Path) -> dict[str, str]:
    """Write the ConfigMap of a training job to a folder; return the environment of its pod with this folder."""
    container = build_first_pod_manifest()["spec"]["containers"][0]
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    for name, text in build_run_plan().config_files.items():
        (folder / name).write_text(text)
    return {
        **env,
        contract.CONFIG: str(folder / "job.json"),
        contract.RUN_DIR: str(folder / "run"),
        contract.TERMINATION_LOG: str(folder / "termination-log"),
        contract.OUTPUT: "",
    }


def test_verified_files_are_read_from_a_copy(tmp_path: Path) -> None:
    env = mount_config(tmp_path)
    (tmp_path / "defaults.json").write_text("{}")  # this attempt has no recorded defaults
    genuine = (tmp_path / "job.json").read_bytes()

    use_verified_config(env)
    (tmp_path / "job.json").write_text(FORGED)  # after the check

    copy = Path(env[contract.CONFIG])
    assert (copy.read_bytes(), [path.name for path in copy.parent.iterdir()]) == (genuine, ["job.json"])
    assert read_command(env) is None


@pytest.mark.parametrize(
    ("content", "found"),
    [pytest.param(FORGED, "found ", id="changed"), pytest.param(None, "No such file", id="missing")],
)
def test_other_files_are_rejected(tmp_path: Path, content: str | None, found: str) -> None:
    env = mount_config(tmp_path)
    (tmp_path / "job.json").unlink()
    if content is not None:
        (tmp_path / "job.json").write_text(content)

    with pytest.raises(ConfigMapReplaced, match=f"ConfigMap bert-0-11111111, key job.json: expected SHA-256 .*{found}"):
        use_verified_config(env)
    assert not (tmp_path / "run" / "config" / "job.json").exists()


def test_an_environment_of_an_earlier_release_is_left_unchanged(tmp_path: Path) -> None:
    env = mount_config(tmp_path)
    del env[contract.CONFIG_SHA256]
    before = dict(env)

    use_verified_config(env)

    assert env == before


def test_the_supervisor_of_the_trainer_image_does_not_run_the_command_of_another_config(tmp_path: Path) -> None:
    env = mount_config(tmp_path)
    (tmp_path / "job.json").write_text(FORGED)
    path = os.pathsep.join(str(REPOSITORY / part) for part in ("operator", "trainer"))

    process = subprocess.run(
        [sys.executable, "-m", "finetune_supervisor"],
        env={**env, "PATH": os.environ["PATH"], "PYTHONPATH": path, "NNODES": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    termination = parse_termination((tmp_path / "termination-log").read_text())
    assert termination is not None
    assert (process.returncode, termination.error_type) == (1, contract.CONFIG_MAP_REPLACED)
    assert "stranger" not in process.stdout
    assert "key job.json: expected SHA-256" in process.stderr
