"""Validates the manifest of a job as strictly as the API server does."""

import json
import re

from pydantic import ValidationError

from finetune_api.schema.validation_errors import (
    JOB_FIELDS,
    MAX_PROBLEMS,
    explain_invalid_fields,
    explain_unknown_field,
)
from finetune_api.v1alpha1.job import MAX_JOB_NAME, FineTuneJob
from finetune_api.v1alpha1.name_types import JOB_NAME_PATTERN, LABEL_PATTERN, NAME_RULES, has_pattern
from finetune_client.errors import ClientError
from finetune_operator.observation.ownership import RawBody

NAME_RULE = "must start with a-z, contain only a-z, 0-9 and '-', and not end with '-'"


class InvalidManifest(ClientError):
    """Raised for an invalid manifest; each problem is one line with the field, the value found and the remedy."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def parse_manifest(body: RawBody) -> FineTuneJob:
    """Return the job of a manifest whose metadata is an object.

    Raises:
        InvalidManifest: A field is unknown, missing or invalid; it contains all problems.
    """
    unknown_fields = [key for key in body if key not in JOB_FIELDS][:MAX_PROBLEMS]
    problems = _find_name_problems(body) + tuple(f"{key}: {explain_unknown_field((key,))}" for key in unknown_fields)
    job = None
    try:
        # validate JSON instead of Python objects, because pydantic's strict mode accepts lists for tuples only in JSON
        text = json.dumps(body, default=str)
        job = FineTuneJob.model_validate_json(text, strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        problems += explain_invalid_fields(error)
    if job is None or problems:
        raise InvalidManifest(*problems)
    return job


def _find_name_problems(body: RawBody) -> tuple[str, ...]:
    """Return violations of the rules for name and namespace, which the pydantic models do not check.

    The rules for metadata.name are those of the CRD. Names of other types are reported by the models.
    """
    name, namespace = (body["metadata"].get(key) for key in ("name", "namespace"))
    problems: tuple[str, ...] = ()
    if isinstance(namespace, str) and not has_pattern(namespace, LABEL_PATTERN):
        problems = (f"metadata.namespace: {namespace!r}: {NAME_RULES[LABEL_PATTERN]}",)
    if not isinstance(name, str):
        return problems
    if not re.fullmatch(JOB_NAME_PATTERN, name):
        return (*problems, f"metadata.name: {name}: {NAME_RULE}")
    if len(name) > MAX_JOB_NAME:
        return (*problems, f"metadata.name: must have at most {MAX_JOB_NAME} characters; this one has {len(name)}")
    return problems
