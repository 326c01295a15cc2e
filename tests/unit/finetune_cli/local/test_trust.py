"""Tests of what the variables of a job file may choose in local mode."""

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from finetune_api.v1alpha1.job import FineTuneJobSpec
from finetune_cli import run
from finetune_cli.app import app
from finetune_cli.errors import BadInput
from finetune_cli.local.cluster import SUPERVISOR_COMMAND, LocalCluster, LocalResources
from finetune_cli.local.state_store import StateStore
from finetune_cli.local.trust import find_destinations, hide_credential_files, withhold_credentials
from finetune_operator.controller.child_cache import ChildCache
from finetune_operator.plan.pod_manifest import build_pod
from finetune_operator.plan.run_plan import plan_run
from testing.builders.job_files import job_body, write_yaml
from testing.builders.jobs import SETTINGS, command, job


def list_words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CODE = list_words(
    """PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONUSERBASE PYTHONSAFEPATH PYTHONHTTPSVERIFY LD_PRELOAD LD_LIBRARY_PATH
    LD_AUDIT DYLD_INSERT_LIBRARIES PATH BASH_ENV ENV SHELL SSLKEYLOGFILE CC CXX CUDA_HOST_COMPILER CUDAHOSTCXX
    CUDA_HOME CUDA_PATH NVCC_PREPEND_FLAGS CFLAGS LDFLAGS CPATH LIBRARY_PATH TRITON_PTXAS_PATH
    TRITON_CACHE_MANAGER TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR TORCHINDUCTOR_REDIS_URL OMP_TOOL_LIBRARIES
    GOOGLE_APPLICATION_CREDENTIALS TORCH_EXTENSIONS_DIR NCCL_NET_PLUGIN NCCL_TUNER_PLUGIN NCCL_CONF_FILE
    CUDA_INJECTION64_PATH OPENSSL_CONF GCONV_PATH GIT_SSH_COMMAND GIT_PROXY_COMMAND HOME HF_HOME HF_MODULES_CACHE
    XDG_CONFIG_HOME TMPDIR MPLBACKEND MPLCONFIGDIR NETRC LOCAL_KERNELS HF_TOKEN_PATH AWS_SHARED_CREDENTIALS_FILE"""
)
DESTINATIONS = list_words(
    """HF_ENDPOINT HF_INFERENCE_ENDPOINT MODELSCOPE_ENDPOINT MODELSCOPE_DOMAIN WANDB_BASE_URL MLFLOW_TRACKING_URI
    SWANLAB_API_HOST CLEARML_API_HOST COMET_URL_OVERRIDE TRACKIO_SPACE_ID AWS_ENDPOINT_URL_S3 HTTP_PROXY
    https_proxy ALL_PROXY no_proxy WANDB_HTTPS_PROXY REQUESTS_CA_BUNDLE CURL_CA_BUNDLE SSL_CERT_FILE SSL_CERT_DIR
    HOSTALIASES MLFLOW_TRACKING_INSECURE_TLS"""
)
HARMLESS = list_words(
    """OMP_NUM_THREADS TOKENIZERS_PARALLELISM NCCL_DEBUG UCX_TLS NCCL_IB_DISABLE PYTORCH_CUDA_ALLOC_CONF TORCH_LOGS
    HF_HUB_OFFLINE WANDB_PROJECT WANDB_MODE MLFLOW_EXPERIMENT_NAME CUDA_LAUNCH_BLOCKING HF_HUB_DOWNLOAD_TIMEOUT
    HF_TOKEN WANDB_API_KEY"""
)
CREDENTIALS = list_words(
    """HF_TOKEN HUGGING_FACE_HUB_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN MLFLOW_TRACKING_PASSWORD
    MODELSCOPE_API_TOKEN GITHUB_PAT SSH_AUTH_SOCK GOOGLE_APPLICATION_CREDENTIALS PGPASSWORD HF_TOKEN2 NETRC"""
)
EVIL = "/evil"
SYSTEM = dict(os.environ)


def build_spec(*names: str, **fields: Any) -> FineTuneJobSpec:
    return job(env=[{"name": name, "value": EVIL} for name in names], **fields).spec


@pytest.mark.parametrize("name", CODE)
def test_variables_that_choose_code_or_files_are_refused(name: str) -> None:
    with pytest.raises(BadInput, match=rf"spec\.env: {name}: chooses code or files of this machine; .* --trust"):
        find_destinations(build_spec(name), {})

    assert find_destinations(build_spec(name), {name: EVIL}) == (), "the same value as the user's own"


@pytest.mark.parametrize("name", DESTINATIONS)
def test_variables_that_choose_a_server_are_found(name: str) -> None:
    assert find_destinations(build_spec(name), {name: "https://mine.example"}) == (name,)
    assert find_destinations(build_spec(name), {name: EVIL}) == (), "the same value as the user's own"


def test_other_variables_and_those_from_secrets_are_allowed() -> None:
    secret_ref = {"valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}

    assert find_destinations(build_spec(*HARMLESS), {}) == ()
    assert find_destinations(job(env=[{"name": "PYTHONPATH", **secret_ref}]).spec, {"PYTHONPATH": "/mine"}) == ()


def test_credentials_and_what_the_job_takes_from_secrets_are_withheld() -> None:
    secret_ref = {"valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    spec = job(env=[{"name": "LOGIN", **secret_ref}]).spec
    kept = {"PATH": "/bin", "TOKENIZERS_PARALLELISM": "false", "KEYBOARD": "us", "HF_HUB_OFFLINE": "1"}

    assert withhold_credentials(spec, {**kept, **dict.fromkeys((*CREDENTIALS, "LOGIN"), "s3cr3t")}) == kept


def test_no_token_of_the_user_is_sent_to_a_hub_that_the_job_chooses(tmp_path: Path) -> None:
    """The library of the Hub looks for tokens in variables and in two files; netrc is read by its HTTP client."""
    own_home, home = tmp_path / "mine", tmp_path / "home"
    (own_home / ".cache/huggingface").mkdir(parents=True)
    (own_home / ".cache/huggingface/token").write_text("hf_mine")
    (own_home / ".netrc").write_text("machine evil.example login me password s3cr3t\n")
    paths = {name: value for name, value in SYSTEM.items() if name in ("PATH", "PYTHONPATH")}
    own = {**paths, "HOME": str(own_home), "XDG_CACHE_HOME": str(own_home / ".cache"), "HF_TOKEN": "hf_mine"}
    program = (
        "import json, requests; from huggingface_hub.utils import build_hf_headers as build;"
        "print(json.dumps([build().get('authorization'), requests.utils.get_netrc_auth('https://evil.example')]))"
    )

    def run_program(environment: dict[str, str]) -> Any:
        process = subprocess.run((sys.executable, "-c", program), env=environment, capture_output=True, check=True)
        return json.loads(process.stdout)

    limited = {**withhold_credentials(build_spec("HF_ENDPOINT"), own), **hide_credential_files(own, home)}

    assert run_program(own) == ["Bearer hf_mine", ["me", "s3cr3t"]]
    assert run_program(limited) == [None, None]
    assert limited["HF_HOME"] == str(own_home / ".cache/huggingface"), "downloaded models are found"


async def test_nodes_get_the_limited_environment_and_an_empty_home(tmp_path: Path) -> None:
    job_with_output = job(numNodes=1, env=[{"name": "HF_HUB_DISABLE_IMPLICIT_TOKEN", "value": "0"}])
    run_plan = plan_run(job_with_output, attempt=0, settings=SETTINGS)
    manifest = build_pod(run_plan, run_plan.nodes[0])
    resources = LocalResources(tmp_path, (), ((),), environment={"OWN": "1"}, hides_credential_files=True)
    with closing(StateStore(tmp_path / "bert.local")) as store:
        children = ChildCache(on_change=lambda _: None, current_attempt=lambda _: None, is_current_pod=lambda *_: False)
        cluster = LocalCluster(resources, store, children, on_event=lambda *_: None)
        environment = cluster._build_process_spec(manifest).environment
        await cluster.close()

    home = Path(environment["HOME"])
    assert home.parent == store.folder / "attempt-0/node-0"
    assert (
        environment.items() >= {"OWN": "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1", "HF_TOKEN_PATH": "/dev/null"}.items()
    )


@pytest.mark.parametrize(
    ("fields", "trusts_file", "expected"),
    [
        ({}, False, ((), "mine", "1")),
        ({"env": [{"name": "HF_ENDPOINT", "value": "https://mirror.example"}]}, False, (("HF_ENDPOINT",), None, "1")),
        ({"env": [{"name": "HF_ENDPOINT", "value": "https://mirror.example"}]}, True, ((), "mine", "1")),
        ({"env": [{"name": "LD_PRELOAD", "value": EVIL}]}, True, ((), "mine", "1")),
        (command({"script": "train.py"}, env=[{"name": "PYTHONPATH", "value": "."}]), False, ((), "mine", None)),
    ],
    ids=["no variables", "mirror", "trusted mirror", "trusted code", "command"],
)
def test_only_jobs_without_command_and_trust_are_limited(
    fields: dict[str, Any], trusts_file: bool, expected: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "mine")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)

    environment, destinations = run._limit_environment(job(**fields).spec, trusts_file=trusts_file)

    assert (destinations, environment.get("HF_TOKEN"), environment.get("PYTHONSAFEPATH")) == expected


def test_a_run_that_would_load_foreign_code_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "check_packages", lambda _: None)
    (tmp_path / "rows.jsonl").touch()
    body = job_body(
        model={"name": "org/m"}, dataset={"train": [{"name": "rows.jsonl"}]}, env=[{"name": "PATH", "value": "."}]
    )

    result = CliRunner().invoke(app, ["run", str(write_yaml(tmp_path, body))])

    assert isinstance(result.exception, BadInput)
    assert not (tmp_path / "output").exists()


class Started(Exception):
    """Raised instead of starting the nodes of a local run."""


def test_a_run_reports_that_tokens_are_withheld(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[LocalResources] = []

    async def start(_body: object, resources: LocalResources, *_: object, **__: object) -> None:
        started.append(resources)
        raise Started

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "mine")
    monkeypatch.setattr(run, "check_packages", lambda _: None)
    monkeypatch.setattr(run, "_run_job", start)
    (tmp_path / "rows.jsonl").touch()
    mirror = [{"name": "HF_ENDPOINT", "value": "https://mirror.example"}]
    body = job_body(model={"name": "org/m"}, dataset={"train": [{"name": "rows.jsonl"}]}, env=mirror, nprocPerNode=1)
    path = write_yaml(tmp_path, body)

    limited, trusted = (CliRunner().invoke(app, ["run", str(path), *options]) for options in ((), ("--trust",)))

    assert isinstance(limited.exception, Started), limited.output
    assert "chooses other servers (HF_ENDPOINT), so your tokens" in " ".join(limited.output.split())
    assert "chooses other servers" not in trusted.output
    assert [each.hides_credential_files for each in started] == [True, False]
    assert [each.environment.get("HF_TOKEN") for each in started] == [None, "mine"]


def test_no_module_of_the_working_directory_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder may be a repository of others, with files named like modules of the standard library."""
    (tmp_path / "dataclasses.py").write_text("open('imported', 'w').close()")
    for module in ("finetune_trainer/memory", "finetune_supervisor/__main__"):
        path = tmp_path / "installed" / f"{module}.py"
        path.parent.mkdir(parents=True)
        path.write_text("import dataclasses, sys; sys.exit('stub')")
        (path.parent / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"))
    monkeypatch.setattr("finetune_cli.estimate.check_packages", lambda _: None)

    CliRunner().invoke(app, ["estimate", str(write_yaml(tmp_path, job_body(model={"name": "org/m"})))])
    process = subprocess.run(SUPERVISOR_COMMAND, capture_output=True, text=True, check=False)

    assert process.stderr.strip() == "stub"
    assert not (tmp_path / "imported").exists()
