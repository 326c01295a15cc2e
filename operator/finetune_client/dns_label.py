"""The rule of Kubernetes for the names of jobs and namespaces, which become parts of paths."""

from finetune_api.v1alpha1.name_types import LABEL_PATTERN, NAME_RULES, has_pattern
from finetune_client.errors import ClientError


def check_dns_label(name: object, *, what: str) -> None:
    """Raise ClientError unless the name is a DNS label (RFC 1123). what: the kind of the object, for the message."""
    if not isinstance(name, str) or not has_pattern(name, LABEL_PATTERN):
        raise ClientError(f"{what} {str(name)[:100]!r}: {NAME_RULES[LABEL_PATTERN]}")
