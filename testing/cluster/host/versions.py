"""Pinned versions of the throwaway cluster's components."""

from __future__ import annotations

from dataclasses import dataclass

OLDEST_KUBERNETES_MINOR = 32
STREAMING_SPLIT_MINOR = 36

STAGING_MODULES = (
    "api",
    "apiextensions-apiserver",
    "apimachinery",
    "apiserver",
    "cli-runtime",
    "client-go",
    "cloud-provider",
    "cluster-bootstrap",
    "code-generator",
    "component-base",
    "component-helpers",
    "controller-manager",
    "cri-api",
    "cri-client",
    "csi-translation-lib",
    "dynamic-resource-allocation",
    "endpointslice",
    "externaljwt",
    "kms",
    "kube-aggregator",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubectl",
    "kubelet",
    "metrics",
    "mount-utils",
    "pod-security-admission",
    "sample-apiserver",
    "sample-cli-plugin",
    "sample-controller",
)


@dataclass(frozen=True)
class ComponentVersions:
    """Versions of all components of the throwaway cluster."""

    kubernetes: str = "1.37.2"
    etcd: str = "3.6.8"
    coredns: str = "1.14.7"
    containerd: str = "2.2.7"
    kwok: str = "0.8.0"
    helm: str = "4.2.4"


PINNED = ComponentVersions()
REGISTRY = "0.22.1"
"""Version of the OCI registry of go-containerregistry, for the test of the packaged chart."""
ACTIONLINT = "1.7.12"
"""Version of the program that checks the workflow of releases."""
KREW = "0.4.3"
"""Version of the program that validates the manifest of the kubectl plugin."""
OTHER_KUBERNETES = ("1.34.4", "1.35.4", "1.36.3")
"""Other versions of Kubernetes, on which `make test-matrix` runs a subset of the tests."""


def parse_kubernetes_minor(version: str) -> int:
    """Return the minor version, for example 37 for "1.37.2".

    Raises:
        ValueError: the string is not a Kubernetes version, or the version is too old for this build.
    """
    parts = version.split(".")
    if len(parts) != 3 or parts[0] != "1" or not all(part.isdigit() for part in parts):
        raise ValueError(f"kubernetes version {version!r}: expected three numbers like {PINNED.kubernetes}")
    minor = int(parts[1])
    if minor < OLDEST_KUBERNETES_MINOR:
        raise ValueError(f"kubernetes version {version}: older than 1.{OLDEST_KUBERNETES_MINOR} is not supported")
    return minor


def list_staging_modules(version: str) -> tuple[str, ...]:
    """Return the modules of the Kubernetes repository's staging folder; each needs a replace directive in go.mod."""
    streaming_modules = (
        ("cri-streaming", "streaming") if parse_kubernetes_minor(version) >= STREAMING_SPLIT_MINOR else ()
    )
    return tuple(sorted((*STAGING_MODULES, *streaming_modules)))
