"""Compares resource versions and detects that the API server went back to an earlier state."""


class StateRolledBack(Exception):
    """The API server returned an older state than before, for example after etcd was restored from a backup.

    Watches that continue at a version of the lost state deliver nothing, so the process has to start again.
    """

    def __init__(self, path: str, *, known_version: str, current_version: str) -> None:
        super().__init__(
            f"{path}: the API server went back from resourceVersion {known_version} to {current_version}, probably"
            " because etcd was restored from a backup; the operator starts again and reads everything anew"
        )


def is_later_version(version: str, other_version: str) -> bool:
    """Return whether `version` is later than `other_version`; False if either is not a number.

    Kubernetes documents since 1.35 that resource versions can be compared as numbers.
    """
    return version.isdecimal() and other_version.isdecimal() and int(version) > int(other_version)


def check_version_order(path: str, *, known_version: str, current_version: str) -> None:
    """Check that a consistent response is not older than what was received before the request was sent.

    Raises: StateRolledBack
    """
    if is_later_version(known_version, current_version):
        raise StateRolledBack(path, known_version=known_version, current_version=current_version)
