"""Runs the login plugin of a kubeconfig user (exec), as kubectl does for EKS, GKE, AKS and OIDC.

Source: https://kubernetes.io/docs/reference/config-api/client-authentication.v1/
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from finetune_supervisor.contract import parse_json

API_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
TIMEOUT_SECONDS = 300  # a plugin may wait for a login in a browser
EXPIRY_MARGIN = timedelta(seconds=30)
MAX_MESSAGE = 500


class LoginFailed(Exception):
    """Raised if a login plugin is missing, fails or prints no credential; the message contains its error output."""


@dataclass(frozen=True)
class LoginCredential:
    """Credential that a plugin printed: a token, a client certificate with its key in PEM, or both."""

    token: str | None = field(default=None, repr=False)
    certificate: str = field(default="", repr=False)
    key: str = field(default="", repr=False)
    expires_at: datetime | None = None

    def is_expired(self, now: datetime) -> bool:
        """Return whether the credential is expired, or will be while a request is sent."""
        return self.expires_at is not None and now >= self.expires_at - EXPIRY_MARGIN


@dataclass(frozen=True)
class ExecLogin:
    """The login plugin of a kubeconfig user."""

    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    api_version: str
    cluster: str | None = field(default=None, repr=False)  # JSON that plugins with provideClusterInfo expect
    install_hint: str = ""
    may_interact: bool = True

    @classmethod
    def parse(cls, section: dict[str, Any], folder: Path, cluster: dict[str, Any]) -> "ExecLogin":
        """Parse the exec section of a kubeconfig user; a command with a slash is relative to the kubeconfig's folder.

        Raises:
            LoginFailed: The version of the plugin's protocol is not supported.
        """
        version = str(section.get("apiVersion"))
        if version not in API_VERSIONS:
            raise LoginFailed(
                f"exec.apiVersion is {version}; supported are {' and '.join(API_VERSIONS)}; update the plugin"
            )
        command = str(section.get("command", ""))
        if os.sep in command:
            command = str(folder / command)
        variables = tuple((str(each["name"]), str(each["value"])) for each in section.get("env") or ())
        return cls(
            command=(command, *map(str, section.get("args") or ())),
            environment=variables,
            api_version=version,
            cluster=json.dumps(cluster, default=str) if section.get("provideClusterInfo") else None,
            install_hint=str(section.get("installHint") or ""),
            may_interact=section.get("interactiveMode") != "Never",
        )

    def run(self) -> LoginCredential:
        """Run the plugin and return its credential. It reads standard input only if that is a terminal.

        Raises:
            LoginFailed: The plugin is missing, failed or printed no credential.
        """
        has_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
        is_interactive = has_terminal and self.may_interact
        request: dict[str, Any] = {"interactive": is_interactive}
        if self.cluster is not None:
            request["cluster"] = json.loads(self.cluster)
        info = json.dumps({"apiVersion": self.api_version, "kind": "ExecCredential", "spec": request})
        try:
            process = subprocess.run(
                self.command,
                env={**os.environ, **dict(self.environment), "KUBERNETES_EXEC_INFO": info},
                stdin=None if is_interactive else subprocess.DEVNULL,  # it may be the input of this program
                stdout=subprocess.PIPE,
                stderr=None if is_interactive else subprocess.PIPE,  # an interactive plugin prints its prompts there
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            hint = f"; {self.install_hint.strip()}" if self.install_hint else ""
            raise LoginFailed(f"the login plugin {self.command[0]} cannot be run: {error}{hint}") from error
        if process.returncode != 0:
            output = process.stderr.decode(errors="replace").strip()[-MAX_MESSAGE:]
            raise LoginFailed(
                f"the login plugin {self.command[0]} failed with exit code {process.returncode}: {output}"
            )
        return self._parse_credential(process.stdout)

    def _parse_credential(self, output: bytes) -> LoginCredential:
        try:
            status = parse_json(output)["status"]
            expiry = status.get("expirationTimestamp")
            credential = LoginCredential(
                token=status.get("token"),
                certificate=status.get("clientCertificateData") or "",
                key=status.get("clientKeyData") or "",
                expires_at=datetime.fromisoformat(expiry).astimezone(UTC) if expiry else None,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LoginFailed(f"the login plugin {self.command[0]} printed no ExecCredential with a status") from error
        if not credential.token and not credential.certificate:
            raise LoginFailed(f"the login plugin {self.command[0]} printed neither a token nor a client certificate")
        return credential
