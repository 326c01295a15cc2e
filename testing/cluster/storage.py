"""Claims that every node can mount and that this machine can look into. Pure but for `make_shared_folder`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TRAINER_USER = 1000
STORAGE_CLASS = "shared"
SIZE = "100Gi"

Object = Mapping[str, Any]


def shared_claim_objects(namespace: str, claim: str, *, host_path: str) -> tuple[Object, ...]:
    """Storage class, volume and claim; the volume is kept for this one claim, so that its folder is known."""
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
        claim_object(namespace, claim, storage_class=STORAGE_CLASS),
    )


def claim_object(namespace: str, claim: str, *, storage_class: str) -> Object:
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


def make_shared_folder(root: Path, namespace: str, claim: str) -> Path:
    """Owned by the user that trainer pods run as, where we may give it away."""
    folder = root / namespace / claim
    if not folder.exists():
        folder.mkdir(parents=True)
        if os.geteuid() == 0:
            os.chown(folder, TRAINER_USER, TRAINER_USER)
        else:
            folder.chmod(0o777)
    return folder
