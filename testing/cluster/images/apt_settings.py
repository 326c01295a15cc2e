"""Read apt's settings of this host, which image builds use to install Debian packages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from testing.cluster.host.commands import try_run

CERTIFICATES_PATH = "/run/secrets/certificates"
SOURCES_PATH = "/run/secrets/sources.list"
_TRANSFERRED = re.compile(
    r"Acquire::(https?::(Proxy(::\S+)?|Timeout|Pipeline-Depth|Verify-Peer)"
    r'|Retries|Check-Valid-Until|Check-Date|ForceIPv[46]) ".+";'
)
_SUITE_SUFFIXES = ("", "-updates", "-security")


def read_host_apt_settings() -> str:
    """Return the output of `apt-config dump`; empty on a host without apt."""
    return try_run("sh", "-c", "apt-config dump").stdout


def read_host_mirrors() -> str:
    """Return a `deb` line for each index that apt uses on this host; empty on a host without apt."""
    line_format = "deb $(SITE) $(RELEASE) $(COMPONENT)"
    return try_run("sh", "-c", 'apt-get indextargets --format "$0" "Created-By: Packages"', line_format).stdout


def select_mirrors(lines: str, *, suite: str) -> tuple[str, ...]:
    """Return the mirrors of Debian's own packages of this suite; a host with another release has none."""
    releases = {f"{suite}{suffix}" for suffix in _SUITE_SUFFIXES}
    words = (line.split() for line in lines.splitlines())
    selected = (line for line in words if len(line) == 4 and line[2] in releases and line[3] == "main")
    return tuple(dict.fromkeys(" ".join(line) for line in selected))


def render_apt_settings(host_settings: str, *, has_mirrors: bool) -> str:
    """Return the content of the secret apt.conf: proxies and timeouts of the host, certificates, and its mirrors."""
    return "".join(f"{line}\n" for line in _list_settings(host_settings.splitlines(), has_mirrors=has_mirrors))


def _list_settings(host_lines: Iterable[str], *, has_mirrors: bool) -> Iterator[str]:
    yield from (line for line in host_lines if _TRANSFERRED.fullmatch(line))
    yield f'Acquire::https::CaInfo "{CERTIFICATES_PATH}";'
    yield 'APT::Sandbox::User "root";'  # only root can read the secrets
    if has_mirrors:
        yield f'Dir::Etc::SourceList "{SOURCES_PATH}";'
        yield 'Dir::Etc::SourceParts "-";'
