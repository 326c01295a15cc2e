"""Reads a job file as strictly as the API server would, and says every problem at once."""

import json
import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError

from finetune_api.schema.validation_errors import JOB_FIELDS, explain_each, explain_unknown
from finetune_api.v1alpha1.job import GROUP, KIND, MAX_JOB_NAME, VERSION, FineTuneJob
from finetune_cli.errors import BadInput

Raw = dict[str, Any]

API_VERSION = f"{GROUP}/{VERSION}"
DEFAULT_NAMESPACE = "default"

FileArgument = Annotated[Path, typer.Argument(metavar="JOB.YAML", help="The job file.", show_default=False)]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace of the job.", show_default=False)
]


@dataclass(frozen=True)
class JobFile:
    """A valid job and the file it comes from. `body` is as written, with its namespace filled in."""

    path: Path
    body: Raw
    job: FineTuneJob


class Loader(yaml.SafeLoader):
    """YAML as kubectl reads it: 1e-4 is a number, and a key that is given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_job_file(path: Path, *, namespace: str | None = None) -> JobFile:
    """The one FineTuneJob of a file; other objects beside it are left alone. Raises BadInput."""
    body = _with_namespace(path, _find_job(path, _load(path)), namespace)
    problems = _name_problems(body) + tuple(
        f"{key}: {explain_unknown((key,))}" for key in body if key not in JOB_FIELDS
    )
    job = None
    try:
        # through JSON, because only there strict means what the API server means: "2" is no number, a list is a tuple
        text = json.dumps(body, default=str)
        job = FineTuneJob.model_validate_json(text, strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        problems += explain_each(error)
    if job is None or problems:
        raise BadInput(*(f"{path}: {problem}" for problem in problems))
    return JobFile(path, body, job)


def _load(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise BadInput(f"{path}: {reason}") from error
    try:
        return list(yaml.load_all(text, Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise BadInput(f"{path}: {where}{error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise BadInput(f"{path}: {' '.join(str(error).split())}") from error


def _find_job(path: Path, documents: list[Any]) -> Raw:
    bodies = [document for document in documents if document is not None]
    for body in bodies:
        if not isinstance(body, dict):
            raise BadInput(f"{path}: expected a {KIND}, found {type(body).__name__}")
    jobs = [body for body in bodies if body.get("kind") == KIND]
    if len(jobs) != 1:
        found = ", ".join(str(body.get("kind", "no kind")) for body in bodies) or "nothing"
        raise BadInput(f"{path}: kind: expected one {KIND}, found {found}")
    if jobs[0].get("apiVersion") != API_VERSION:
        raise BadInput(f"{path}: apiVersion: expected {API_VERSION}, found {jobs[0].get('apiVersion', 'nothing')}")
    job: Raw = jobs[0]
    return job


def _with_namespace(path: Path, body: Raw, namespace: str | None) -> Raw:
    metadata = body.get("metadata")
    if not isinstance(metadata, dict):
        raise BadInput(f"{path}: metadata.name: is required")
    written = metadata.get("namespace")
    if namespace and written and namespace != written:
        raise BadInput(f"{path}: metadata.namespace: is {written}, but --namespace says {namespace}")
    return {**body, "metadata": {**metadata, "namespace": namespace or written or DEFAULT_NAMESPACE}}


def _name_problems(body: Raw) -> tuple[str, ...]:
    """What the CRD's rules on metadata.name say where no API server looks first."""
    name = body["metadata"].get("name")
    if not isinstance(name, str):
        return ()  # the model says that it is required
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        return (f"metadata.name: {name}: must start with a-z and hold only a-z, 0-9 and '-', with no '-' at its end",)
    if len(name) > MAX_JOB_NAME:
        return (f"metadata.name: must have at most {MAX_JOB_NAME} characters; this one has {len(name)}",)
    return ()
