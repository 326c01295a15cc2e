"""A cluster as the user's kubeconfig has it; the official client is imported late, because it takes a second."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from finetune_api.v1alpha1.job import GROUP, PLURAL, VERSION
from finetune_cli.errors import BadInput

if TYPE_CHECKING:
    from kubernetes.client import CoreV1Api, CustomObjectsApi

Raw = dict[str, Any]

NamespaceOption = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="Namespace (default: the context's).", show_default=False),
]
ContextOption = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.", show_default=False)]
KubeconfigOption = Annotated[
    str | None, typer.Option("--kubeconfig", help="The kubeconfig (default: as kubectl finds it).", show_default=False)
]


class ClusterAccess:
    """Jobs and pods of one namespace."""

    def __init__(self, namespace: str | None, *, context: str | None, kubeconfig: str | None) -> None:
        from kubernetes import client, config

        try:
            api = config.new_client_from_config(config_file=kubeconfig, context=context)
            contexts, active = config.list_kube_config_contexts(config_file=kubeconfig)
        except config.ConfigException as error:
            raise BadInput(f"no access to a cluster: {error}") from error
        chosen = next((each for each in contexts if each["name"] == context), active)
        self.namespace: str = namespace or chosen["context"].get("namespace") or "default"
        self._jobs: CustomObjectsApi = client.CustomObjectsApi(api)
        self._core: CoreV1Api = client.CoreV1Api(api)

    def get_job(self, name: str) -> Raw:
        """One job. Raises BadInput if there is none."""
        with _explained(f"{PLURAL}.{GROUP} {self.namespace}/{name}"):
            return cast(Raw, self._jobs.get_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, name))

    def list_jobs(self) -> list[Raw]:
        """All jobs of the namespace."""
        with _explained(f"{PLURAL}.{GROUP} of namespace {self.namespace}"):
            return cast(
                list[Raw], self._jobs.list_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL)["items"]
            )

    def log_lines(self, pod: str, *, follow: bool) -> Iterator[bytes]:
        """What a pod prints, as it comes."""
        with _explained(f"pod {self.namespace}/{pod}"):
            answer = self._core.read_namespaced_pod_log(pod, self.namespace, follow=follow, _preload_content=False)
            yield from answer.stream()


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """The API server's own words, which name the object."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        raise BadInput(f"{what}: {_said(error)}") from error
    except HTTPError as error:
        raise BadInput(f"{what}: the API server does not answer: {error}") from error


def _said(error: Any) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.status} {error.reason}"
