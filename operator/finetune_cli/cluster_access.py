"""Reads jobs and pod logs from a cluster with the user's kubeconfig.

The official client is imported lazily, because its import takes a second.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from finetune_api.v1alpha1.job import GROUP, PLURAL, VERSION
from finetune_cli.errors import BadInput
from finetune_operator.observation.ownership import RawBody

if TYPE_CHECKING:
    from kubernetes.client import CoreV1Api, CustomObjectsApi

NamespaceOption = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="Namespace (default: the context's).", show_default=False),
]
ContextOption = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.", show_default=False)]
KubeconfigOption = Annotated[
    str | None, typer.Option("--kubeconfig", help="The kubeconfig (default: as for kubectl).", show_default=False)
]


class ClusterAccess:
    """Reads the jobs and the pod logs of one namespace."""

    def __init__(self, namespace: str | None, *, context: str | None, kubeconfig: str | None) -> None:
        from kubernetes import client, config

        try:
            api = config.new_client_from_config(config_file=kubeconfig, context=context)
            contexts, active = config.list_kube_config_contexts(config_file=kubeconfig)
        except config.ConfigException as error:
            raise BadInput(f"no access to a cluster: {error}") from error
        selected = next((candidate for candidate in contexts if candidate["name"] == context), active)
        self.namespace: str = namespace or selected["context"].get("namespace") or "default"
        self._jobs: CustomObjectsApi = client.CustomObjectsApi(api)
        self._core: CoreV1Api = client.CoreV1Api(api)

    def get_job(self, name: str) -> RawBody:
        """Return the job with this name. Raises BadInput if it does not exist."""
        with _translate_errors(f"{PLURAL}.{GROUP} {self.namespace}/{name}"):
            return cast(RawBody, self._jobs.get_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, name))

    def list_jobs(self) -> list[RawBody]:
        """Return all jobs of the namespace."""
        with _translate_errors(f"{PLURAL}.{GROUP} of namespace {self.namespace}"):
            return cast(
                list[RawBody], self._jobs.list_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL)["items"]
            )

    def stream_log(self, pod: str, *, follow: bool) -> Iterator[bytes]:
        """Yield chunks of a pod's log as they arrive."""
        with _translate_errors(f"pod {self.namespace}/{pod}"):
            response = self._core.read_namespaced_pod_log(pod, self.namespace, follow=follow, _preload_content=False)
            yield from response.stream()


@contextmanager
def _translate_errors(object_name: str) -> Iterator[None]:
    """Convert client errors to BadInput that contains the message of the API server."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        raise BadInput(f"{object_name}: {_get_error_message(error)}") from error
    except HTTPError as error:
        raise BadInput(f"{object_name}: the API server does not answer: {error}") from error


def _get_error_message(error: Any) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.status} {error.reason}"
