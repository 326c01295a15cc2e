"""Types of names and keys that Kubernetes defines."""

from typing import Annotated

from pydantic import StringConstraints

DnsLabel = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
ObjectName = Annotated[str, StringConstraints(min_length=1, max_length=253)]
QualifiedName = Annotated[  # keys of labels, names of scheduling gates
    str,
    StringConstraints(
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", max_length=317
    ),
]
