"""Build programs of the cluster and of the checks from Go modules, into one folder per component and version."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from testing.cluster.host.cache import Cache
from testing.cluster.host.commands import HarnessError, run, stage, try_run
from testing.cluster.host.versions import (
    ACTIONLINT,
    KREW,
    PINNED,
    REGISTRY,
    ComponentVersions,
    list_staging_modules,
    parse_kubernetes_minor,
)

SOURCES = Path(__file__).parent / "go"
GO_LANGUAGE = "1.26.0"
KUBERNETES_PROGRAMS = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubelet",
    "kubectl",
)
KWOK_STAGES = (
    "kustomize/stage/node/fast/node-initialize.yaml",
    "kustomize/stage/node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
    "kustomize/stage/pod/fast/pod-ready.yaml",
    "kustomize/stage/pod/fast/pod-complete.yaml",
    "kustomize/stage/pod/fast/pod-delete.yaml",
)
KUBERNETES_TAGS = "selinux,notest,grpcnotrace"


@dataclass(frozen=True)
class GoInstallComponent:
    """A component that `go install` builds directly from upstream."""

    component: str
    version: str
    packages: tuple[str, ...]
    tags: str = ""
    linker_flags: str = "-s -w"
    yaml_files: tuple[str, ...] = ()
    """YAML files of the module, concatenated into `documents.yaml`."""

    @property
    def module(self) -> str:
        return self.packages[0].partition("/cmd/")[0]

    @property
    def programs(self) -> tuple[str, ...]:
        """Names of the files that the build creates."""
        return (
            *(package.rsplit("/", 1)[-1] for package in self.packages),
            *(("documents.yaml",) if self.yaml_files else ()),
        )


@dataclass(frozen=True)
class LocalMainComponent:
    """A component with its main package in go/<component>.

    Used if `go install` cannot build upstream's main package, or if that package links too many plugins.
    """

    component: str
    version: str
    module: str
    is_pinned: bool
    tags: str = ""
    linker_flags: str = "-s -w"
    symlinks: tuple[str, ...] = ()

    @property
    def programs(self) -> tuple[str, ...]:
        return (self.component, *self.symlinks)


Component = GoInstallComponent | LocalMainComponent


def list_components(versions: ComponentVersions) -> dict[str, Component]:
    containerd = "github.com/containerd/containerd/v2"
    all_components: tuple[Component, ...] = (
        LocalMainComponent(
            component="kubernetes",
            version=versions.kubernetes,
            module="k8s.io/kubernetes",
            is_pinned=versions.kubernetes == PINNED.kubernetes,
            tags=KUBERNETES_TAGS,
            linker_flags=build_kubernetes_linker_flags(versions.kubernetes),
            symlinks=KUBERNETES_PROGRAMS,
        ),
        LocalMainComponent(
            component="etcd",
            version=versions.etcd,
            module="go.etcd.io/etcd/server/v3",
            is_pinned=versions.etcd == PINNED.etcd,
        ),
        LocalMainComponent(
            component="coredns",
            version=versions.coredns,
            module="github.com/coredns/coredns",
            is_pinned=versions.coredns == PINNED.coredns,
        ),
        LocalMainComponent(component="pause", version="1", module="", is_pinned=True),
        GoInstallComponent(
            component="containerd",
            version=versions.containerd,
            packages=tuple(f"{containerd}/cmd/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")),
            tags="no_btrfs,no_devmapper,no_zfs",
            linker_flags=f"-s -w -X {containerd}/version.Version={versions.containerd}",
        ),
        GoInstallComponent(
            component="kwok",
            version=versions.kwok,
            packages=("sigs.k8s.io/kwok/cmd/kwok",),
            linker_flags=f"-s -w -X sigs.k8s.io/kwok/pkg/consts.Version={versions.kwok}",
            yaml_files=KWOK_STAGES,
        ),
        GoInstallComponent(
            component="helm",
            version=versions.helm,
            packages=("helm.sh/helm/v4/cmd/helm",),
            linker_flags=f"-s -w -X helm.sh/helm/v4/internal/version.version=v{versions.helm}",
        ),
        GoInstallComponent(
            component="registry",
            version=REGISTRY,
            packages=("github.com/google/go-containerregistry/cmd/registry",),
        ),
        GoInstallComponent(
            component="actionlint",
            version=ACTIONLINT,
            packages=("github.com/rhysd/actionlint/cmd/actionlint",),
        ),
        GoInstallComponent(
            component="validate-krew-manifest",
            version=KREW,
            packages=("sigs.k8s.io/krew/cmd/validate-krew-manifest",),
        ),
    )
    return {component.component: component for component in all_components}


def build_kubernetes_linker_flags(version: str) -> str:
    """Return linker flags that set the version in component-base and client-go, because kubectl and Helm check both."""
    values = {
        "gitVersion": f"v{version}",
        "gitMajor": "1",
        "gitMinor": str(parse_kubernetes_minor(version)),
        "gitCommit": "unknown",
        "gitTreeState": "clean",
        "buildDate": "2026-01-01T00:00:00Z",
    }
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return " ".join(
        ("-s -w", *(f"-X {package}.{key}={value}" for package in packages for key, value in values.items()))
    )


def render_go_mod(component: LocalMainComponent) -> str:
    """Render a minimal go.mod, which `go mod tidy` completes.

    The go.mod of Kubernetes refers to its staging modules by folder, so each staging module needs a replace directive.
    """
    lines = [f"module example.invalid/{component.component}", "", f"go {GO_LANGUAGE}"]
    if component.module:
        lines += ["", f"require {component.module} v{component.version}"]
    if component.component == "kubernetes":
        staging = "v0." + component.version.split(".", 1)[1]
        replace_lines = [
            f"\tk8s.io/{name} => k8s.io/{name} {staging}" for name in list_staging_modules(component.version)
        ]
        lines += ["", "replace (", *replace_lines, ")"]
    return "\n".join(lines) + "\n"


def build_all(cache: Cache, versions: ComponentVersions, *, component_names: tuple[str, ...] = ()) -> None:
    """Build the components that are missing from the cache, one at a time, because each build uses all cores."""
    components = [
        c for c in list_components(versions).values() if not component_names or c.component in component_names
    ]
    if all(is_built(cache, component) for component in components):
        return  # without waiting for another process that builds other versions
    with cache.hold_lock("build"):
        for component in components:
            build(cache, component)


def is_built(cache: Cache, component: Component) -> bool:
    """Return whether the cache contains all programs of the component."""
    target = cache.get_binary_folder(component.component, component.version)
    return all((target / program).exists() for program in component.programs)


def build(cache: Cache, component: Component) -> None:
    if is_built(cache, component):
        return
    target = cache.get_binary_folder(component.component, component.version)
    require_go()
    target.parent.mkdir(parents=True, exist_ok=True)
    with stage(f"build {component.component} {component.version}"), tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "bin"
        output.mkdir()
        if isinstance(component, GoInstallComponent):
            run_go_install(cache, component, output)
        else:
            compile_local_main(cache, component, Path(scratch) / "source", output)
        shutil.rmtree(target, ignore_errors=True)
        # the scratch folder may be on another file system; the rename makes all programs appear at once
        partial = target.with_name(f"{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.move(output, partial)
        partial.rename(target)


def run_go_install(cache: Cache, component: GoInstallComponent, target: Path) -> None:
    run(
        *("go", "install", "-trimpath", "-tags", component.tags, "-ldflags", component.linker_flags),
        *(f"{package}@v{component.version}" for package in component.packages),
        cwd=target,
        environment={**cache.go_environment, "GOBIN": str(target)},
    )
    if component.yaml_files:
        source = cache.root / "go" / "mod" / f"{component.module}@v{component.version}"
        documents = ((source / file).read_text() for file in component.yaml_files)
        (target / "documents.yaml").write_text("---\n".join(documents))


def compile_local_main(cache: Cache, component: LocalMainComponent, source: Path, target: Path) -> None:
    shutil.copytree(SOURCES / component.component, source)
    if not component.is_pinned:
        (source / "go.mod").write_text(render_go_mod(component))
        (source / "go.sum").unlink(missing_ok=True)
        run("go", "mod", "tidy", cwd=source, environment=cache.go_environment)
    run(
        *("go", "build", "-trimpath", "-tags", component.tags, "-ldflags", component.linker_flags),
        *("-o", target / component.component, "."),
        cwd=source,
        environment=cache.go_environment,
    )
    for name in component.symlinks:
        (target / name).symlink_to(component.component)


def pin_versions(cache: Cache) -> None:
    """Regenerate go.mod and go.sum of the pinned versions, which is required after changing versions.py."""
    for component in list_components(PINNED).values():
        if isinstance(component, LocalMainComponent):
            folder = SOURCES / component.component
            (folder / "go.mod").write_text(render_go_mod(component))
            run("go", "mod", "tidy", cwd=folder, environment=cache.go_environment)


def require_go() -> None:
    version = try_run("go", "env", "GOVERSION").stdout.strip().removeprefix("go")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    minimum = tuple(int(part) for part in GO_LANGUAGE.split(".")[:2])
    if numbers < minimum:
        raise HarnessError(f"go {version or 'unknown'} is too old: building the cluster needs {GO_LANGUAGE} or newer")
