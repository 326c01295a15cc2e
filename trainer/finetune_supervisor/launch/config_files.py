"""Verifies the files of the mounted ConfigMap against the digests in the environment of the pod (decisions/310)."""

from __future__ import annotations

import hashlib
from collections.abc import MutableMapping
from pathlib import Path

from finetune_supervisor import contract
from finetune_supervisor.contract import RunFolder


class ConfigMapReplaced(Exception):
    """The ConfigMap has other content than the operator created."""


def use_verified_config(env: MutableMapping[str, str]) -> None:
    """Copy the files whose digests the environment contains to the run folder, and set FINETUNE_CONFIG to the copy.

    Each file is read once, so that what is verified is what the trainer reads. Other files are not copied. An
    environment of another release without digests is left unchanged. Raises ConfigMapReplaced.
    """
    digests = [entry.partition("=") for entry in env.get(contract.CONFIG_SHA256, "").split(",") if entry]
    if not digests:
        return
    config, folder = Path(env[contract.CONFIG]), RunFolder(Path(env[contract.RUN_DIR])).config
    folder.mkdir(parents=True, exist_ok=True)
    for name, _, expected in digests:
        content, found = _read_with_digest(config.with_name(name))
        if found != expected:
            config_map = env.get(contract.CONFIG_MAP, "")
            raise ConfigMapReplaced(f"ConfigMap {config_map}, key {name}: expected SHA-256 {expected}, found {found}")
        (folder / name).write_bytes(content)
    env[contract.CONFIG] = str(folder / config.name)


def _read_with_digest(path: Path) -> tuple[bytes, str]:
    try:
        content = path.read_bytes()
    except OSError as error:
        return b"", str(error)
    return content, hashlib.sha256(content).hexdigest()
