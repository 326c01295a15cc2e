"""Job files for tests of the command line."""

from pathlib import Path
from typing import Any

import yaml

from finetune_cli.job_file import JobFile, read_job_file
from testing.builders.jobs import spec

Raw = dict[str, Any]


def job_body(*, name: str = "bert", **fields: Any) -> Raw:
    """A valid job; `fields` (camelCase) are laid over its spec, None removes one."""
    fields = spec(**fields)
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": name},
        "spec": {key: value for key, value in fields.items() if value is not None},
    }


def write_yaml(folder: Path, *documents: Raw) -> Path:
    """The documents as job.yaml."""
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    return path


def job_file(folder: Path, *, name: str = "bert", **fields: Any) -> JobFile:
    """A job file as the commands read it."""
    return read_job_file(write_yaml(folder, job_body(name=name, **fields)))
