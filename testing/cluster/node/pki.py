"""Create the certificate authority, the API server's certificates and the tokens of its users."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from testing.cluster.host.commands import run
from testing.cluster.host.layout import ClusterLayout

DAYS = "3650"
AGGREGATOR = "front-proxy"  # name by which the API server forwards requests to other API servers


@dataclass(frozen=True)
class User:
    """A user of the API server, authenticated by a static token instead of a client certificate."""

    name: str
    login: str
    groups: tuple[str, ...] = ()

    @property
    def token(self) -> str:
        return f"{self.name}-token"


def list_users(layout: ClusterLayout) -> tuple[User, ...]:
    nodes = (User(node.name, f"system:node:{node.name}", ("system:nodes",)) for node in layout.nodes)
    return (
        User("admin", "admin", ("system:masters",)),
        User("controllers", "system:kube-controller-manager"),
        User("scheduler", "system:kube-scheduler"),
        User("proxy", "system:kube-proxy"),
        User("dns", "dns", ("system:masters",)),
        User("kwok", "kwok", ("system:masters",)),
        *nodes,
    )


def render_token_file(layout: ClusterLayout) -> str:
    return "".join(f'{user.token},{user.login},{user.name},"{",".join(user.groups)}"\n' for user in list_users(layout))


def render_subject_alternative_names(layout: ClusterLayout) -> str:
    names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")
    addresses = (address for plan in layout.plans for address in (plan.host_address, plan.services_network[1]))
    return ",".join((*(f"DNS:{name}" for name in names), "IP:127.0.0.1", *(f"IP:{address}" for address in addresses)))


def ensure_certificates(layout: ClusterLayout) -> None:
    """Create the keys and certificates once per cluster.

    The keys use elliptic curves, because generating an RSA key takes a second.
    """
    folder = layout.pki
    if (folder / "tokens.csv").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    create_key(folder / "ca.key")
    run(
        *("openssl", "req", "-x509", "-new", "-key", folder / "ca.key", "-out", folder / "ca.crt"),
        *("-days", DAYS, "-subj", f"/CN={layout.device_prefix}"),
    )
    sign_certificate(folder, "apiserver", subject="/CN=kube-apiserver", names=render_subject_alternative_names(layout))
    sign_certificate(folder, "apiserver-kubelet", subject="/O=system:masters/CN=kube-apiserver", names="DNS:apiserver")
    sign_certificate(folder, AGGREGATOR, subject=f"/CN={AGGREGATOR}", names=f"DNS:{AGGREGATOR}")
    create_key(folder / "service-accounts.key")
    (folder / "tokens.csv").write_text(render_token_file(layout))


def create_key(path: Path) -> None:
    run("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path)


def sign_certificate(folder: Path, name: str, *, subject: str, names: str) -> None:
    key, request, extensions = (folder / f"{name}.{suffix}" for suffix in ("key", "csr", "ext"))
    create_key(key)
    extensions.write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n")
    run("openssl", "req", "-new", "-key", key, "-subj", subject, "-out", request)
    run(
        *("openssl", "x509", "-req", "-in", request, "-out", folder / f"{name}.crt", "-days", DAYS),
        *("-CA", folder / "ca.crt", "-CAkey", folder / "ca.key", "-CAcreateserial", "-extfile", extensions),
    )
