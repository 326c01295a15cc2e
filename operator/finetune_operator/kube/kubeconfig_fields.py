"""The keys of a cluster and a user in a kubeconfig, and what this client does with each.

A key that is ignored may widen the rights of the user, as `as` does, or change where requests go. The table therefore
contains every key, and a key outside of it is refused.
Source: Cluster and AuthInfo in tools/clientcmd/api/v1/types.go of client-go.
"""

import urllib.parse
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any


class Use(Enum):
    """What this client does with the value of a key."""

    SUPPORTED = auto()  # it is part of the connection or of the login
    SENT = auto()  # it becomes a header of every request
    HARMLESS = auto()  # it changes neither the server nor the identity
    NO_LOGIN = auto()  # refused: a login that is not supported
    NO_ROUTE = auto()  # refused: a way to the server that is not supported


CLUSTER_KEYS: Mapping[str, Use] = {
    "server": Use.SUPPORTED,
    "certificate-authority": Use.SUPPORTED,
    "certificate-authority-data": Use.SUPPORTED,
    "insecure-skip-tls-verify": Use.SUPPORTED,
    "disable-compression": Use.HARMLESS,
    "extensions": Use.HARMLESS,
    "proxy-url": Use.NO_ROUTE,
    "tls-server-name": Use.NO_ROUTE,
}
USER_KEYS: Mapping[str, Use] = {
    "client-certificate": Use.SUPPORTED,
    "client-certificate-data": Use.SUPPORTED,
    "client-key": Use.SUPPORTED,
    "client-key-data": Use.SUPPORTED,
    "token": Use.SUPPORTED,
    "tokenFile": Use.SUPPORTED,
    "exec": Use.SUPPORTED,
    "as": Use.SENT,
    "as-uid": Use.SENT,
    "as-groups": Use.SENT,
    "as-user-extra": Use.SENT,
    "extensions": Use.HARMLESS,
    "auth-provider": Use.NO_LOGIN,
    "username": Use.NO_LOGIN,
    "password": Use.NO_LOGIN,
}
REFUSALS = {
    None: "has the unknown key {key}; remove it, or update this program if kubectl knows the key",
    Use.NO_LOGIN: (
        "logs in by {key}, which is not supported; use a token (kubectl create token) or a client certificate"
    ),
    Use.NO_ROUTE: "has {key}, which is not supported; run kubectl proxy, and use a kubeconfig with its address",
}


class UnusableKey(ValueError):
    """Raised for a key that this client must not ignore, or whose value is invalid; the message names it."""


def select_keys(entry: Mapping[str, Any], keys: Mapping[str, Use]) -> dict[str, Any]:
    """Return the keys of a cluster or user that have a value; empty and null values count as absent.

    Raises:
        UnusableKey: The entry has a key that is refused, or that the table does not contain.
    """
    present = {str(key): value for key, value in entry.items() if value not in (None, "", [], {})}
    for key in present:
        if refusal := REFUSALS.get(keys.get(key)):
            raise UnusableKey(refusal.format(key=key))
    return present


def build_impersonation_headers(user: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the headers by which the API server treats requests as those of another user, as kubectl sends them.

    user: the selected keys of a user.

    Raises:
        UnusableKey: A value has another type, or a group, uid or extra is given without `as`.
    """
    extras = user.get("as-user-extra", {})
    if not isinstance(extras, dict):
        raise UnusableKey("has an invalid as-user-extra; expected a map of lists of strings")
    values = {
        "Impersonate-User": [user["as"]] if "as" in user else [],
        "Impersonate-Uid": [user["as-uid"]] if "as-uid" in user else [],
        "Impersonate-Group": user.get("as-groups", []),
        **{f"Impersonate-Extra-{_escape_header_name(key)}": texts for key, texts in extras.items()},
    }
    for header, texts in values.items():
        if not isinstance(texts, list) or not all(isinstance(text, str) and text.isprintable() for text in texts):
            raise UnusableKey(f"has an invalid value for {header}; expected strings without control characters")
    headers = tuple((header, text) for header, texts in values.items() for text in texts)
    if headers and "as" not in user:
        raise UnusableKey("has as-uid, as-groups or as-user-extra without as; add the name of the user to impersonate")
    return headers


def _escape_header_name(key: object) -> str:
    """Escape what cannot be part of a header's name, as client-go does."""
    return urllib.parse.quote(str(key), safe="!#$&'*+.^`|")
