"""Types of names and keys that Kubernetes, Git and the Hubs define."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints, ValidationInfo

from finetune_api.v1alpha1.base import has_begun

LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
JOB_NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"  # DNS-1035, because a Service is named after the job
SUBDOMAIN_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
HUB_ID_PATTERN = r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*/[A-Za-z0-9_-][A-Za-z0-9_.-]*$"  # owner/name
COMMIT_PATTERN = r"^[0-9a-f]{40}$"
_REVISION_CHARACTER = r"[^/\x00-\x20\x7f~^:?*\[\\]"
_REVISION_PART = rf"{_REVISION_CHARACTER.replace('/', '/.')}{_REVISION_CHARACTER}*"
_REVISION_PATTERN = rf"^{_REVISION_PART}(/{_REVISION_PART})*$"
NAME_RULES = {
    LABEL_PATTERN: "must have at most 63 characters a-z, 0-9 and '-', and start and end with a letter or digit",
    SUBDOMAIN_PATTERN: "must have at most 253 characters a-z, 0-9, '-' and '.', and each part between dots must start"
    " and end with a letter or digit",
}
_MAX_LENGTHS = {LABEL_PATTERN: 63, SUBDOMAIN_PATTERN: 253}


def has_pattern(name: str, pattern: str) -> bool:
    """Return whether the name has one of the patterns of this module, and its maximum length."""
    return len(name) <= _MAX_LENGTHS[pattern] and re.fullmatch(pattern, name) is not None


def check_name(name: str, pattern: str) -> None:
    """Raise ValueError unless the name has one of the patterns of this module."""
    if not has_pattern(name, pattern):
        raise ValueError(f"{name[:100]!r} is not a name of Kubernetes: it {NAME_RULES[pattern]}")


def is_object_name(name: str) -> bool:
    """Return whether the API server may accept the name, a DNS subdomain, for an object."""
    return has_pattern(name, SUBDOMAIN_PATTERN)


def _check_object_name(name: str, info: ValidationInfo) -> str:
    if not has_begun(info):
        check_name(name, SUBDOMAIN_PATTERN)
    return name


def _check_revision(revision: str, info: ValidationInfo) -> str:
    if not has_begun(info) and re.fullmatch(_REVISION_PATTERN, revision) is None:
        raise ValueError(f"{revision[:100]!r} is no name of a branch, tag or commit that Git permits")
    return revision


DnsLabel = Annotated[str, StringConstraints(pattern=LABEL_PATTERN, max_length=63)]
# A job that began before the pattern existed keeps its names.
ObjectName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=253),
    AfterValidator(_check_object_name),
    Field(json_schema_extra={"pattern": SUBDOMAIN_PATTERN}),
]
QualifiedName = Annotated[  # keys of labels, names of scheduling gates
    str,
    StringConstraints(
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", max_length=317
    ),
]
# As in Git: the client of a Hub also makes the path of a file from it, and writes there what the server returns.
Revision = Annotated[
    str,
    StringConstraints(min_length=1, max_length=1024),
    AfterValidator(_check_revision),
    Field(json_schema_extra={"pattern": _REVISION_PATTERN}),
]
