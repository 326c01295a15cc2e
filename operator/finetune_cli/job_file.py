"""Reads a job file as strictly as the API server would, and reports all problems at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from finetune_api.v1alpha1.job import KIND, FineTuneJob
from finetune_api.yaml_documents import MAX_CHARACTERS, InvalidYaml, load_yaml
from finetune_cli.errors import BadInput
from finetune_client.manifest import InvalidManifest, parse_manifest
from finetune_operator.names import API_VERSION
from finetune_operator.observation.ownership import RawBody

DEFAULT_NAMESPACE = "default"

FileArgument = Annotated[Path, typer.Argument(metavar="JOB.YAML", help="The job file.", show_default=False)]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace of the job.", show_default=False)
]


@dataclass(frozen=True)
class JobFile:
    """Valid job and its file; `body` is the parsed YAML with the resolved namespace.

    explicit_namespace: the namespace of the command line or the file; None if neither contains one.
    """

    path: Path
    body: RawBody
    job: FineTuneJob
    explicit_namespace: str | None = None


def read_job_file(path: Path, *, namespace: str | None = None) -> JobFile:
    """Read the single FineTuneJob of a file, ignoring other objects. Raises BadInput with all problems."""
    document = _find_job(path, _load_documents(path))
    body = _add_namespace(path, document, namespace)
    try:
        job = parse_manifest(body)
    except InvalidManifest as error:
        raise BadInput(*(f"{path}: {problem}" for problem in error.problems)) from error
    return JobFile(path, body, job, namespace or document["metadata"].get("namespace"))


def _load_documents(path: Path) -> list[Any]:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise BadInput(f"{path}: {reason}") from error
    try:
        return load_yaml(text)
    except InvalidYaml as error:
        raise BadInput(f"{path}: {error}") from error


def _find_job(path: Path, documents: list[Any]) -> RawBody:
    bodies = [document for document in documents if document is not None]
    for body in bodies:
        if not isinstance(body, dict):
            raise BadInput(f"{path}: expected a {KIND}, found {type(body).__name__}")
    jobs = [body for body in bodies if body.get("kind") == KIND]
    if len(jobs) != 1:
        kinds = ", ".join(str(body.get("kind", "no kind"))[:60] for body in bodies[:10]) or "nothing"
        raise BadInput(f"{path}: kind: expected one {KIND}, found {kinds}")
    if jobs[0].get("apiVersion") != API_VERSION:
        raise BadInput(
            f"{path}: apiVersion: expected {API_VERSION}, found {str(jobs[0].get('apiVersion', 'nothing'))[:60]}"
        )
    job: RawBody = jobs[0]
    return job


def _add_namespace(path: Path, body: RawBody, namespace: str | None) -> RawBody:
    metadata = body.get("metadata")
    if not isinstance(metadata, dict):
        raise BadInput(f"{path}: metadata.name: is required")
    file_namespace = metadata.get("namespace")
    if namespace and file_namespace and namespace != file_namespace:
        raise BadInput(f"{path}: metadata.namespace: is {file_namespace}, but --namespace is {namespace}")
    return {**body, "metadata": {**metadata, "namespace": namespace or file_namespace or DEFAULT_NAMESPACE}}
