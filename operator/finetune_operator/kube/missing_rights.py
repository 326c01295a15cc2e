"""Collects the rights that the API server refuses to the account of the client, until it grants them."""

import logging
import re

from finetune_operator.kube.api_paths import ApiPath

logger = logging.getLogger(__name__)

MAX_REFUSED_REQUESTS = 1_000
# of the authorizer: `... is forbidden: User "u" cannot delete resource "pods" in API group "" in the namespace "n"`
_REFUSAL = re.compile(
    r'forbidden: User ".{1,500}" cannot (?P<verb>[a-z]{1,40})'
    r' (?:resource "(?P<resource>[a-z0-9./-]{1,300})" in API group "(?P<group>[a-z0-9.-]{0,253})"'
    r'|path "(?P<path>/[\w./-]*)")'
)
# of the admission plugin OwnerReferencesPermissionEnforcement, which OpenShift enables
_FINALIZER_REFUSAL = "cannot set blockOwnerDeletion"
_Request = tuple[str, str, bool]  # method, collection, whether the request names an object


class MissingRights:
    """The refused requests to each collection. Quotas and admission policies do not count as authorization."""

    def __init__(self) -> None:
        self._refused: dict[_Request, str] = {}  # right by request
        self._logged: set[tuple[str, str]] = set()  # right and collection

    def record(self, method: str, path: ApiPath, *, status: int, message: str = "") -> None:
        """Record the response to a request. method: of HTTP, or WATCH."""
        right = parse_missing_right(message) if status == 403 else ""
        if not right and (not self._refused or status in (0, 401, 429) or status >= 500):
            return
        collection, has_name = _split_name(path)
        if not right:
            self._refused.pop((method, collection, has_name), None)
        elif len(self._refused) < MAX_REFUSED_REQUESTS:
            self._refused[method, collection, has_name] = right
            if (right, collection) not in self._logged:
                self._logged.add((right, collection))
                logger.error("the operator has no permission to %s; grant it to its role", right, extra={"path": path})

    def list(self, namespace: str) -> tuple[str, ...]:
        """Return the missing rights that concern the objects of a namespace, such as `create pods`, sorted."""
        rights = (
            right
            for (_, collection, _), right in self._refused.items()
            if f"/namespaces/{namespace}/" in collection or "/namespaces/" not in collection
        )
        return tuple(sorted(set(rights)))


def parse_missing_right(message: str) -> str:
    """Return the right that a refused request needs, such as `delete podgroups.scheduling.k8s.io`, or an empty text."""
    if _FINALIZER_REFUSAL in message:
        return "update finetunejobs/finalizers.finetune.dev"
    if (match := _REFUSAL.search(message)) is None:
        return ""
    target = match["path"] or ".".join(filter(None, (match["resource"], match["group"])))
    return f"{match['verb']} {target}"


def _split_name(path: ApiPath) -> tuple[str, bool]:
    """Return the path without the name of an object, and whether it has one."""
    segments = path.split("/")
    plural = 3 if segments[1] == "api" else 4
    if segments[plural : plural + 1] == ["namespaces"]:
        plural += 2
    return "/".join((*segments[: plural + 1], *segments[plural + 2 :])), len(segments) > plural + 1
