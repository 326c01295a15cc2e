"""Simulated kubelet caches, which keep an immutable ConfigMap while a pod of the node mounts it."""

from dataclasses import dataclass, field

from testing.simulator.world.apiserver import ObjectKey, RawBody, SimulatedApiServer


@dataclass
class CachedConfigMap:
    """An immutable ConfigMap in the cache of a kubelet, with the uids of the pods that mount it."""

    body: RawBody
    pod_uids: set[str] = field(default_factory=set)


class ConfigMapCache:
    """ConfigMap caches of all kubelets.

    A kubelet stops watching a ConfigMap once it is immutable, and drops it with the last pod that mounts it
    (decisions/118). Therefore a ConfigMap that was deleted and created again under the same name is not read again.
    """

    def __init__(self, server: SimulatedApiServer) -> None:
        self._server = server
        self._cached: dict[tuple[str, ObjectKey], CachedConfigMap] = {}  # keyed by node name and ConfigMap

    def mount(self, node_name: str, key: ObjectKey, pod_uid: str) -> RawBody | None:
        """Return the ConfigMap that the kubelet of the node mounts into the pod, or None if it does not exist."""
        existing_uids = {pod["metadata"]["uid"] for _, pod in self._server.list_objects("Pod")}
        cached = self._cached.get((node_name, key))
        if cached is None or not cached.pod_uids & existing_uids:
            body = self._server.get(key)
            if body is None or not body.get("immutable"):
                return body
            cached = self._cached[node_name, key] = CachedConfigMap(body)
        cached.pod_uids.add(pod_uid)
        return cached.body
