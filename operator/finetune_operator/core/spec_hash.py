"""Hashes the spec fields that can be changed while a job is suspended.

Such a change may be made while the operator does not run, so that it never observes the suspension. The hash in the
attempt's record shows that the pods of the attempt were built from another spec.
"""

import hashlib
from functools import cache

from pydantic import BaseModel

from finetune_api.schema.cel_rules import MUTABLE_WHILE_SUSPENDED
from finetune_api.v1alpha1.job import FineTuneJobSpec
from finetune_api.v1alpha1.recorded_defaults import find_model_class
from finetune_api.v1alpha1.status import AttemptRecord

_FIELDS = {name for name, field in FineTuneJobSpec.model_fields.items() if field.alias in MUTABLE_WHILE_SUSPENDED}


def compute_spec_hash(spec: FineTuneJobSpec) -> str:
    """Return `fields-values`: hashes of the known field names and of the values that the user set."""
    values = spec.model_dump_json(by_alias=True, include=_FIELDS, exclude_unset=True)
    return f"{_hash_field_names()}-{hashlib.sha256(values.encode()).hexdigest()[:16]}"


def has_outdated_spec(record: AttemptRecord, spec: FineTuneJobSpec) -> bool:
    """Return whether the spec was changed since the attempt began.

    Hashes of releases that know other fields cannot be compared; the attempt then counts as current.
    """
    recorded, current = record.spec_hash, compute_spec_hash(spec)
    return recorded != current and recorded.partition("-")[0] == current.partition("-")[0]


@cache
def _hash_field_names() -> str:
    names = "\n".join(f"{name} {_list_field_names(FineTuneJobSpec, name)}" for name in sorted(_FIELDS))
    return hashlib.sha256(names.encode()).hexdigest()[:8]


def _list_field_names(model_class: type[BaseModel], name: str) -> list[str]:
    nested_class = find_model_class(model_class.model_fields[name].annotation)
    if nested_class is None:
        return []
    return [f"{child} {_list_field_names(nested_class, child)}" for child in sorted(nested_class.model_fields)]
