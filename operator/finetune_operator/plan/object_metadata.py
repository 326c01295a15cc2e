"""Builds the metadata of the objects of an attempt, including the owner reference to the job."""

from typing import Any

from finetune_operator import names
from finetune_operator.plan.run_plan import RunPlan

Manifest = dict[str, Any]


def build_metadata(run_plan: RunPlan, name: str, *, with_attempt_label: bool = False) -> Manifest:
    """Return the metadata of a child, including its labels and owner reference."""
    labels = {names.MANAGED_BY: names.MANAGER, names.JOB_NAME: run_plan.job_name, names.JOB_UID: run_plan.job_uid}
    if with_attempt_label:
        labels[names.ATTEMPT] = str(run_plan.attempt)
    owner = {
        "apiVersion": names.API_VERSION,
        "kind": names.FINETUNEJOB_KIND,
        "name": run_plan.job_name,
        "uid": run_plan.job_uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {"name": name, "namespace": run_plan.namespace, "labels": labels, "ownerReferences": [owner]}
