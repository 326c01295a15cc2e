"""The rule of Kubernetes for the names of jobs and namespaces, which become parts of paths."""

from finetune_api.v1alpha1.name_types import LABEL_PATTERN, has_pattern
from finetune_client.errors import ClientError

DNS_LABEL_RULE = "expected at most 63 of a-z, 0-9 and '-', with a letter or digit at both ends"


def is_dns_label(name: object) -> bool:
    """Return whether a value is a DNS label (RFC 1123)."""
    return isinstance(name, str) and has_pattern(name, LABEL_PATTERN)


def check_dns_label(name: object, *, what: str) -> None:
    """Raise ClientError unless the name is a DNS label. what: the kind of the object, for the message."""
    if not is_dns_label(name):
        raise ClientError(f"{what} {str(name)[:100]!r}: no valid name; {DNS_LABEL_RULE}")
