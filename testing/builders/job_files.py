"""Builders of job files for command-line tests."""

from pathlib import Path
from typing import Any

import yaml

from finetune_cli.job_file import JobFile, read_job_file
from testing.builders.jobs import RawBody, spec


def job_body(*, name: str = "bert", **fields: Any) -> RawBody:
    """Return the body of a valid job whose spec is updated with `fields` (camelCase); None removes a field."""
    fields = spec(**fields)
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": name},
        "spec": {key: value for key, value in fields.items() if value is not None},
    }


def write_yaml(folder: Path, *documents: RawBody) -> Path:
    """Write the documents to job.yaml and return the path."""
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    return path


def job_file(folder: Path, *, name: str = "bert", **fields: Any) -> JobFile:
    """Write a job file and parse it as the CLI does."""
    return read_job_file(write_yaml(folder, job_body(name=name, **fields)))
