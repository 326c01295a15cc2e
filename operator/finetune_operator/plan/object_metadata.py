"""Builds the metadata of the objects of an attempt: names, labels and the owner reference to the job."""

from typing import Any

from finetune_operator import names
from finetune_operator.plan.run_plan import RunPlan

Manifest = dict[str, Any]


def build_metadata(run: RunPlan, name: str, *, with_attempt_label: bool = False) -> Manifest:
    """Return the metadata of a child: name, namespace, labels and owner reference."""
    labels = {names.MANAGED_BY: names.MANAGER, names.JOB_NAME: run.job_name, names.JOB_UID: run.job_uid}
    if with_attempt_label:
        labels[names.ATTEMPT] = str(run.attempt)
    owner = {
        "apiVersion": names.API_VERSION,
        "kind": names.FINETUNEJOB_KIND,
        "name": run.job_name,
        "uid": run.job_uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {"name": name, "namespace": run.namespace, "labels": labels, "ownerReferences": [owner]}
