"""Builds the URL paths of the Kubernetes API. mypy finds a request whose path was built elsewhere."""

import re
from typing import NewType

from finetune_api.v1alpha1.scheduling import API_VERSIONS
from finetune_operator import names

ApiPath = NewType("ApiPath", str)

VERSION_PATH, GROUPS_PATH = ApiPath("/version"), ApiPath("/apis")
COLLECTIONS = {  # API version and plural by kind; API version and kind together if several projects have the kind
    "Pod": ("v1", "pods"),
    "Service": ("v1", "services"),
    "ConfigMap": ("v1", "configmaps"),
    "PersistentVolumeClaim": ("v1", "persistentvolumeclaims"),
    "Node": ("v1", "nodes"),
    "Deployment": ("apps/v1", "deployments"),
    "Lease": ("coordination.k8s.io/v1", "leases"),
    "Event": ("events.k8s.io/v1", "events"),
    "SelfSubjectAccessReview": ("authorization.k8s.io/v1", "selfsubjectaccessreviews"),
    names.WORKLOAD_KIND: ("kueue.x-k8s.io/v1beta2", "workloads"),
    names.FINETUNEJOB_KIND: (names.API_VERSION, names.FINETUNEJOB[2]),
    **{
        f"{version}/{names.POD_GROUP_KIND}": (version, "podgroups")
        for versions in API_VERSIONS.values()
        for version in versions
    },
}
# What Kubernetes permits (IsValidPathSegmentName of apimachinery), without characters that a URL library changes.
_SEGMENT = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._~!$&'()*+,;=:@-]+\Z")


class InvalidName(ValueError):
    """Raised for a name that cannot be part of a path, before a request is made."""


def build_path(api_version: str, *segments: str) -> ApiPath:
    """Return a path below the root of an API version, such as `v1` or `apps/v1`. Raises: InvalidName"""
    return extend_path(ApiPath(f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"), *segments)


def extend_path(path: ApiPath, *segments: str) -> ApiPath:
    """Return the path of an object in a collection, or of a subresource of an object.

    Raises:
        InvalidName: A segment would lead to another path, or a URL library would change it.
    """
    for segment in segments:
        if not _SEGMENT.match(segment):
            raise InvalidName(f"{segment[:100]!r} is not the name of an object")
    return ApiPath("/".join((path, *segments)))


def collection_path(kind: str, namespace: str | None) -> ApiPath:
    """Return the path of all objects of a kind, in one namespace or in all namespaces. Raises: InvalidName"""
    api_version, plural = COLLECTIONS[kind]
    return build_path(api_version, *(() if namespace is None else ("namespaces", namespace)), plural)


def object_path(kind: str, namespace: str | None, name: str, *subresource: str) -> ApiPath:
    """Return the path of one object, or of a subresource of it. Raises: InvalidName"""
    return extend_path(collection_path(kind, namespace), name, *subresource)
