"""Persistent volume claims that every node can mount, backed by a folder on this host."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TRAINER_USER = 1000
STORAGE_CLASS = "shared"
SIZE = "100Gi"

Object = Mapping[str, Any]


def render_shared_claim(namespace: str, claim: str, *, host_path: str) -> tuple[Object, ...]:
    """Return the StorageClass, PersistentVolume and claim; `claimRef` reserves the volume for this claim."""
    return (
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": STORAGE_CLASS},
            "provisioner": "kubernetes.io/no-provisioner",
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{namespace}-{claim}"},
            "spec": {
                "capacity": {"storage": SIZE},
                "accessModes": ["ReadWriteMany"],
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": STORAGE_CLASS,
                "claimRef": {"namespace": namespace, "name": claim},
                "hostPath": {"path": host_path, "type": "Directory"},
            },
        },
        render_claim(namespace, claim, storage_class=STORAGE_CLASS),
    )


def render_claim(namespace: str, claim: str, *, storage_class: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": claim, "namespace": namespace},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": storage_class,
            "resources": {"requests": {"storage": SIZE}},
        },
    }


def create_shared_folder(root: Path, namespace: str, claim: str) -> Path:
    """Create the claim's folder, owned by the user of trainer pods or, without root, writable for all users."""
    folder = root / namespace / claim
    if not folder.exists():
        folder.mkdir(parents=True)
        if os.geteuid() == 0:
            os.chown(folder, TRAINER_USER, TRAINER_USER)
        else:
            folder.chmod(0o777)
    return folder
