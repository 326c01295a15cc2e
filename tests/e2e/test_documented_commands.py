"""Run the shell blocks of README.md and docs/ that need a cluster, as they are printed, and print their seconds.

The nodes contain the images of this checkout under the names of the release, because the test cluster has no registry.
All jobs are in a namespace of their own, which the kubeconfig selects.
"""

import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from testing.builders.jobs import command
from testing.cluster.host.commands import run
from testing.cluster.images.project_images import get_image_name
from testing.cluster.node.nodes import build_ctr_command
from testing.cluster.provider import ThrowawayProvider
from testing.cluster.throwaway import DEFAULT_NAME, ThrowawayCluster
from testing.documented_commands import (
    CommandBlock,
    Place,
    build_environment,
    copy_clone,
    run_block,
    select_blocks,
    write_swift_command,
)
from testing.models import tiny_text
from testing.processes.operator_stack import (
    CHART,
    OPERATOR_NAMESPACE,
    REPOSITORY,
    OperatorInstallation,
    RawBody,
    build_example_job,
    has_condition,
)

pytestmark = pytest.mark.cluster

BLOCKS = select_blocks(Place.CLUSTER)
INSTALL_MANIFEST = REPOSITORY / "manifests" / "install.yaml"
KEPT_KINDS = ("CustomResourceDefinition", "Namespace")
SUSPENDED_JOBS = {"docs/operations/installation.md": "llama", "docs/user-guide/parallelism.md": "support-lora"}


@dataclass
class Newcomer:
    """A cluster as a reader of the pages uses it: a namespace, and a kubeconfig that selects it."""

    deployment: OperatorInstallation
    kubeconfig: Path
    has_removed_operator: bool = False

    def remove_operator(self) -> None:
        """Remove the operator, which the chart or the manifest installed, and its Lease; keep CRD and namespace."""
        self.has_removed_operator = True
        arguments = ("--namespace", OPERATOR_NAMESPACE, "--wait", "--ignore-not-found")
        self.deployment.helm("uninstall", "finetune-operator", *arguments)
        objects = yaml.safe_load_all(INSTALL_MANIFEST.read_text())
        removed = yaml.safe_dump_all(body for body in objects if body["kind"] not in KEPT_KINDS)
        kubectl = (self.deployment.provider.kubectl, "--kubeconfig", self.kubeconfig)
        run(*kubectl, "delete", "--ignore-not-found", "--wait", "--timeout=120s", "-f", "-", stdin=removed)
        # its roles are deleted before its pods end, so that it cannot release the Lease, and the next one would wait
        self.deployment.kubectl("delete", "lease", "--all", "--namespace", OPERATOR_NAMESPACE)

    def restore_operator(self) -> None:
        """Install the operator as the other tests use it."""
        self.remove_operator()
        self.deployment.install_operator()
        self.has_removed_operator = False

    def remove_jobs(self) -> None:
        """Delete all jobs of the namespace with their output, so that a later page can use their names."""
        self.deployment.kubectl("delete", "ftj", "--all", "--wait", "--timeout=60s")
        # a pod may finish its step and save a checkpoint
        self.deployment.kubectl("wait", "--for=delete", "pods", "-l", "finetune.dev/job-name", "--timeout=180s")
        shutil.rmtree(self.deployment.get_claim_folder("models") / self.deployment.namespace, ignore_errors=True)

    def start_job(self, name: str) -> None:
        """Start a job that does not end by itself, and wait until it runs."""
        self.deployment.apply(build_command_job(name, "sleep", "3600"))
        self.wait_until_running(name)

    def wait_until_running(self, name: str) -> None:
        self.deployment.wait_until(name, lambda job: has_condition(job, "Running"), description="Running")


@pytest.fixture(scope="module")
def newcomer(deployment: OperatorInstallation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    provider = deployment.provider
    if not isinstance(provider, ThrowawayProvider) or provider.cluster.name != DEFAULT_NAME:
        pytest.skip(f"`make cluster-claim` needs the throwaway cluster with the name {DEFAULT_NAME}")
    namespace = f"documented-{secrets.token_hex(3)}"
    jobs = OperatorInstallation(provider, namespace=namespace)
    kubeconfig = write_kubeconfig(provider.kubeconfig, tmp_path_factory.mktemp("kube") / "config", namespace)
    reader = Newcomer(jobs, kubeconfig)
    add_release_names(provider.cluster)
    jobs.prepare_namespace()
    jobs.prepare_storage()
    yield reader
    if reader.has_removed_operator:
        reader.restore_operator()
    jobs.kubectl("delete", "namespace", namespace, "--wait", "--timeout=120s")
    for claim in ("datasets", "models"):
        jobs.kubectl("delete", "pv", f"{namespace}-{claim}", "--ignore-not-found")
    shutil.rmtree(jobs.get_claim_folder("models").parent)


def write_kubeconfig(source: Path, path: Path, namespace: str) -> Path:
    """Write a copy of a kubeconfig that selects a namespace."""
    config = yaml.safe_load(source.read_text())
    for context in config["contexts"]:
        context["context"]["namespace"] = namespace
    path.write_text(yaml.safe_dump(config))
    return path


def add_release_names(cluster: ThrowawayCluster) -> None:
    """Add the image names in the chart to the images of this checkout on each Kubernetes node."""
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    for node in cluster.layout.nodes:
        ctr = build_ctr_command(cluster.cache, cluster.state.versions, node)
        for each in ("operator", "trainer"):
            release_name = f"ghcr.io/finetune-operator/{each}:v{version}"
            run(*ctr, "images", "tag", "--force", get_image_name(each), release_name)


def build_command_job(name: str, *program: str) -> RawBody:
    return build_example_job(name, **command({"exec": list(program)}, image=get_image_name("operator")))


def write_command_job(newcomer: Newcomer, clone: Path) -> None:
    """Write job.yaml, a job with a command that writes a result."""
    job = build_command_job("first", "mkdir", "-p", "$(FINETUNE_OUTPUT)/result")
    (clone / "job.yaml").write_text(yaml.safe_dump(job))


def run_first_job(newcomer: Newcomer, clone: Path) -> None:
    """Run the job that the commands then examine."""
    newcomer.deployment.apply(build_command_job("first", "echo", "trained"))
    assert has_condition(newcomer.deployment.wait_until_finished("first"), "Complete")


def create_quickstart(newcomer: Newcomer, clone: Path) -> None:
    """Create the model and the rows, as the blocks of the page do that run on a laptop."""
    subprocess.run((sys.executable, "-m", tiny_text.__name__, "quickstart/data"), cwd=clone, check=True)


# what the reader of a page brings, in the cluster and in the clone
PREPARATIONS: dict[str, Callable[[Newcomer, Path], object]] = {
    "README.md": write_command_job,
    "docs/getting-started.md": create_quickstart,
    "docs/troubleshooting.md": run_first_job,
    "docs/user-guide/command-line.md": write_command_job,
    "docs/user-guide/convert.md": lambda _, clone: write_swift_command(clone),
}


def prepare_cluster(block: CommandBlock, newcomer: Newcomer) -> None:
    """Bring the cluster into the state in which a block is used."""
    if installs_operator(block):
        newcomer.remove_operator()
    if "patch ftj" in block.commands:
        newcomer.start_job(SUSPENDED_JOBS[block.page])
    if "delete crd" in block.commands:  # pods that are still starting take their whole grace period to end
        newcomer.wait_until_running(SUSPENDED_JOBS[block.page])


def installs_operator(block: CommandBlock) -> bool:
    return "helm install" in block.commands or INSTALL_MANIFEST.name in block.commands


# pages that install the operator, which all workers use, run alone
PAGES = [pytest.param(page, marks=[pytest.mark.alone] * any(map(installs_operator, BLOCKS[page]))) for page in BLOCKS]


@pytest.fixture
def clean_up(newcomer: Newcomer, deployment: OperatorInstallation, page: str) -> Iterator[None]:
    """Remove what the blocks of a page have created, and restore what they have removed."""
    yield
    if any("delete crd" in block.commands for block in BLOCKS[page]):
        newcomer.restore_operator()
    newcomer.remove_jobs()
    secret = ("secret", "finetune-sink", "--namespace", OPERATOR_NAMESPACE)  # of the page about notifications
    deployment.kubectl("delete", *secret, "--ignore-not-found")


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.usefixtures("clean_up")
def test_commands_of_a_page_run_as_printed(
    page: str, newcomer: Newcomer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clone = copy_clone(tmp_path / "finetune-operator")
    provider = newcomer.deployment.provider
    environment = build_environment(
        clone,
        tmp_path / "bin",
        provider.kubectl,
        provider.helm,
        KUBECONFIG=str(newcomer.kubeconfig),
        NAMESPACE=newcomer.deployment.namespace,
    )
    if page in PREPARATIONS:
        PREPARATIONS[page](newcomer, clone)

    for block in BLOCKS[page]:
        prepare_cluster(block, newcomer)
        completed = run_block(block, clone=clone, environment=environment)
        with capsys.disabled():
            print(completed)
