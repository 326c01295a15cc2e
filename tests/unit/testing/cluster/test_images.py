"""Tests of the inputs of the image builds."""

from pathlib import Path

import pytest

from testing.cluster.host.cache import Cache
from testing.cluster.images.project_images import BUILD_FILES, CODE, LOCKS, REPOSITORY, ImageBuilder


def write_repository(folder: Path) -> Path:
    (folder / "requirements").mkdir(parents=True)
    for name in (*BUILD_FILES, *(lock for locks in LOCKS.values() for lock in locks)):
        (folder / name).write_text(name)
    for code in {code for codes in CODE.values() for code in codes}:
        (folder / code).mkdir(parents=True, exist_ok=True)
        (folder / code / "module.py").write_text(code)
    return folder


@pytest.mark.parametrize(
    ("changed_path", "rebuilt_targets"),
    [
        pytest.param("operator/finetune_operator/module.py", {"operator"}, id="operator"),
        pytest.param("trainer/finetune_trainer/module.py", {"trainer"}, id="trainer"),
        pytest.param("trainer/finetune_supervisor/module.py", {"operator", "trainer"}, id="supervisor"),
        pytest.param("operator/finetune_api/module.py", {"operator", "trainer"}, id="api"),
        pytest.param("requirements/operator.txt", {"operator"}, id="lock of the operator"),
        pytest.param("requirements/torch.txt", {"trainer"}, id="lock of torch"),
        pytest.param("requirements/hatchling.txt", {"operator", "trainer"}, id="lock of the build backend"),
    ],
)
def test_content_key_changes_only_with_source_files_of_the_image(
    tmp_path: Path, changed_path: str, rebuilt_targets: set[str]
) -> None:
    source = write_repository(tmp_path)
    builder = ImageBuilder(Cache(tmp_path / "cache"), repository=source)
    previous_keys = {target: builder.compute_content_key(target) for target in CODE}

    (source / changed_path).write_text("changed")

    assert {
        target for target in CODE if builder.compute_content_key(target) != previous_keys[target]
    } == rebuilt_targets


def test_every_installation_of_the_dockerfile_verifies_hashes() -> None:
    dockerfile = (REPOSITORY / "Dockerfile").read_text().replace("\\\n", "").replace("&&", "\n")
    commands = [line for line in dockerfile.splitlines() if "pip install" in line and not line.startswith("#")]
    unverified = [command for command in commands if "--require-hashes" not in command]

    assert len(commands) == 5
    # only the project itself, from the build context, with a build backend that was verified
    assert [command.partition("pip")[2].split() for command in unverified] == [
        ["install", "--no-deps", "--no-build-isolation", "--target", "/code", "."]
    ]


def test_files_that_the_dockerfile_copies_are_in_the_content_key() -> None:
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    copied = {word for word in dockerfile.split() if word.startswith("requirements/") and word.endswith(".txt")}

    locks = {lock for locks in LOCKS.values() for lock in locks}
    assert copied - {"requirements/${TORCH}.txt"} == locks - {"requirements/torch.txt", "requirements/torch-cpu.txt"}
    assert [lock for lock in locks if not (REPOSITORY / lock).is_file()] == []


@pytest.mark.parametrize("torch", ["torch", "torch-cpu", "torch-cuda12"])
def test_dockerfile_has_a_stage_with_debian_packages_for_each_build_of_torch(torch: str) -> None:
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    parents = {line.split()[3]: line.split()[1] for line in dockerfile.splitlines() if line.startswith("FROM ")}

    assert parents["trainer-dependencies"] == "system-${TORCH}"
    assert parents[f"system-{torch}"] == ("system-torch" if torch == "torch-cuda12" else "base")


def test_only_the_stage_for_gpus_installs_debian_packages() -> None:
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    stages = {stage.split("\n", 1)[0].split()[-1]: stage for stage in dockerfile.split("\nFROM ")[1:]}

    assert [name for name, stage in stages.items() if "apt-get install" in stage] == ["system-torch"]
    for package in ("libibverbs1", "ibverbs-providers", "librdmacm1", "libnuma1", "gcc", "libc6-dev"):
        assert f" {package} " in stages["system-torch"]
