"""Building every program of the cluster from Go modules, into a folder per component and version."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from testing.cluster.host.cache import Cache
from testing.cluster.host.commands import ClusterError, attempt, run, stage
from testing.cluster.host.versions import PINNED, Versions, kubernetes_minor, staging_modules

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
class Installed:
    """A program that `go install` builds as it is."""

    component: str
    version: str
    packages: tuple[str, ...]
    tags: str = ""
    linker_flags: str = "-s -w"
    documents: tuple[str, ...] = ()
    """YAML files of the module that are needed too; they are joined as `documents.yaml`."""

    @property
    def module(self) -> str:
        return self.packages[0].partition("/cmd/")[0]

    @property
    def programs(self) -> tuple[str, ...]:
        """Files that say that it is built."""
        return (
            *(package.rsplit("/", 1)[-1] for package in self.packages),
            *(("documents.yaml",) if self.documents else ()),
        )


@dataclass(frozen=True)
class OwnMain:
    """A program whose main package is in go/<component>: upstream's cannot be installed, or holds too much."""

    component: str
    version: str
    module: str
    pinned: bool
    tags: str = ""
    linker_flags: str = "-s -w"
    calls: tuple[str, ...] = ()

    @property
    def programs(self) -> tuple[str, ...]:
        return (self.component, *self.calls)


Component = Installed | OwnMain


def components(versions: Versions) -> dict[str, Component]:
    containerd = "github.com/containerd/containerd/v2"
    built: tuple[Component, ...] = (
        OwnMain(
            component="kubernetes",
            version=versions.kubernetes,
            module="k8s.io/kubernetes",
            pinned=versions.kubernetes == PINNED.kubernetes,
            tags=KUBERNETES_TAGS,
            linker_flags=kubernetes_linker_flags(versions.kubernetes),
            calls=KUBERNETES_PROGRAMS,
        ),
        OwnMain(
            component="etcd",
            version=versions.etcd,
            module="go.etcd.io/etcd/server/v3",
            pinned=versions.etcd == PINNED.etcd,
        ),
        OwnMain(
            component="coredns",
            version=versions.coredns,
            module="github.com/coredns/coredns",
            pinned=versions.coredns == PINNED.coredns,
        ),
        OwnMain(component="pause", version="1", module="", pinned=True),
        Installed(
            component="containerd",
            version=versions.containerd,
            packages=tuple(f"{containerd}/cmd/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")),
            tags="no_btrfs,no_devmapper,no_zfs",
            linker_flags=f"-s -w -X {containerd}/version.Version={versions.containerd}",
        ),
        Installed(
            component="kwok",
            version=versions.kwok,
            packages=("sigs.k8s.io/kwok/cmd/kwok",),
            linker_flags=f"-s -w -X sigs.k8s.io/kwok/pkg/consts.Version={versions.kwok}",
            documents=KWOK_STAGES,
        ),
        Installed(
            component="helm",
            version=versions.helm,
            packages=("helm.sh/helm/v4/cmd/helm",),
            linker_flags=f"-s -w -X helm.sh/helm/v4/internal/version.version=v{versions.helm}",
        ),
    )
    return {component.component: component for component in built}


def kubernetes_linker_flags(version: str) -> str:
    """Stamps go into component-base and client-go both, or kubectl's and Helm's version checks fail."""
    stamps = {
        "gitVersion": f"v{version}",
        "gitMajor": "1",
        "gitMinor": str(kubernetes_minor(version)),
        "gitCommit": "unknown",
        "gitTreeState": "clean",
        "buildDate": "2026-01-01T00:00:00Z",
    }
    places = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return " ".join(("-s -w", *(f"-X {place}.{key}={value}" for place in places for key, value in stamps.items())))


def render_go_mod(component: OwnMain) -> str:
    """What `go mod tidy` completes; Kubernetes' own go.mod names staging modules by folder, so each needs a replace."""
    lines = [f"module example.invalid/{component.component}", "", f"go {GO_LANGUAGE}"]
    if component.module:
        lines += ["", f"require {component.module} v{component.version}"]
    if component.component == "kubernetes":
        staging = "v0." + component.version.split(".", 1)[1]
        replaced = [f"\tk8s.io/{name} => k8s.io/{name} {staging}" for name in staging_modules(component.version)]
        lines += ["", "replace (", *replaced, ")"]
    return "\n".join(lines) + "\n"


def build_all(cache: Cache, versions: Versions, *, only: tuple[str, ...] = ()) -> None:
    """Build what the cache lacks, one after the other: each build uses every core already."""
    with cache.locked("build"):
        for component in components(versions).values():
            if not only or component.component in only:
                build(cache, component)


def build(cache: Cache, component: Component) -> None:
    target = cache.binaries(component.component, component.version)
    if all((target / program).exists() for program in component.programs):
        return
    require_go()
    target.parent.mkdir(parents=True, exist_ok=True)
    with stage(f"build {component.component} {component.version}"), tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "bin"
        made.mkdir()
        if isinstance(component, Installed):
            install(cache, component, made)
        else:
            compile_own_main(cache, component, Path(scratch) / "source", made)
        shutil.rmtree(target, ignore_errors=True)
        shutil.move(made, target)


def install(cache: Cache, component: Installed, target: Path) -> None:
    run(
        *("go", "install", "-trimpath", "-tags", component.tags, "-ldflags", component.linker_flags),
        *(f"{package}@v{component.version}" for package in component.packages),
        cwd=target,
        environment={**cache.go_environment, "GOBIN": str(target)},
    )
    if component.documents:
        source = cache.root / "go" / "mod" / f"{component.module}@v{component.version}"
        texts = ((source / document).read_text() for document in component.documents)
        (target / "documents.yaml").write_text("---\n".join(texts))


def compile_own_main(cache: Cache, component: OwnMain, source: Path, target: Path) -> None:
    shutil.copytree(SOURCES / component.component, source)
    if not component.pinned:
        (source / "go.mod").write_text(render_go_mod(component))
        (source / "go.sum").unlink(missing_ok=True)
        run("go", "mod", "tidy", cwd=source, environment=cache.go_environment)
    run(
        *("go", "build", "-trimpath", "-tags", component.tags, "-ldflags", component.linker_flags),
        *("-o", target / component.component, "."),
        cwd=source,
        environment=cache.go_environment,
    )
    for name in component.calls:
        (target / name).symlink_to(component.component)


def pin(cache: Cache) -> None:
    """Write go.mod and go.sum of the pinned versions anew; run it after a change of versions.py."""
    for component in components(PINNED).values():
        if isinstance(component, OwnMain):
            folder = SOURCES / component.component
            (folder / "go.mod").write_text(render_go_mod(component))
            run("go", "mod", "tidy", cwd=folder, environment=cache.go_environment)


def require_go() -> None:
    version = attempt("go", "env", "GOVERSION").stdout.strip().removeprefix("go")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    wanted = tuple(int(part) for part in GO_LANGUAGE.split(".")[:2])
    if numbers < wanted:
        raise ClusterError(f"go {version or 'unknown'} is too old: building the cluster needs {GO_LANGUAGE} or newer")
