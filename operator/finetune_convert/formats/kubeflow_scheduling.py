"""Converts the labels and annotations of a Kubeflow job, and its queue, priority and topology."""

from typing import Any

from finetune_api.v1alpha1.scheduling import KUEUE_PREFIX
from finetune_convert.conversion import EntryEffect, Tree
from finetune_convert.job_draft import JobDraft

_QUEUE, _PRIORITY = "scheduling.queueName", "scheduling.priorityClassName"
_TOPOLOGY = "scheduling.schedulingConstraints.topology"
_SCHEDULING_KEYS = {  # labels and annotations by the field that replaces them
    "kueue.x-k8s.io/queue-name": _QUEUE,
    "scheduling.volcano.sh/queue-name": _QUEUE,
    "kai.scheduler/queue": _QUEUE,
    "kueue.x-k8s.io/priority-class": _PRIORITY,
}
_TOPOLOGY_MODES = {
    "kueue.x-k8s.io/podset-required-topology": "Required",
    "kueue.x-k8s.io/podset-preferred-topology": "Preferred",
}
_POLICY_FIELDS = {"queue": _QUEUE, "priorityClass": _PRIORITY}


def get_object(node: Any, key: str) -> Tree:
    """Return an object in a manifest, or {} if it is missing or no object."""
    value = node.get(key) if isinstance(node, dict) else None
    return value if isinstance(value, dict) else {}


def convert_metadata(draft: JobDraft, metadata: Tree, path: str) -> None:
    """Take over the labels and annotations of a job or of its pods; those of a queue become spec.scheduling."""
    for kind in ("labels", "annotations"):
        kept: dict[str, str] = {}
        for name, value in get_object(metadata, kind).items():
            if name in _SCHEDULING_KEYS:
                _set_field(draft, name, _SCHEDULING_KEYS[name], str(value))
            elif name in _TOPOLOGY_MODES:
                mode = _TOPOLOGY_MODES[name]
                _set_field(draft, name, _TOPOLOGY, [{"key": str(value), "mode": mode}], f"is {value}, {mode}")
            elif name.startswith(KUEUE_PREFIX):
                draft.note(name, EntryEffect.UNUSED, "the operator sets what Kueue needs")
            elif "kubeflow" not in name:
                kept[name] = str(value)
        if kept:
            field = f"podTemplate.{kind}"
            draft.set(field, {**get_object(draft.spec.get("podTemplate"), kind), **kept})
            draft.note(f"{path}.{kind}", EntryEffect.MAPPED, "are those of the pods", field=field)


def convert_scheduling_policy(draft: JobDraft, policy: Tree) -> None:
    """Convert the policy of a gang: all pods of a job with spec.scheduling start together."""
    draft.set("scheduling", draft.spec.get("scheduling", {}))
    message = "all pods start together, as chosen from what the cluster has"
    draft.note("runPolicy.schedulingPolicy", EntryEffect.MAPPED, message, field="scheduling")
    for key, value in policy.items():
        option = f"runPolicy.schedulingPolicy.{key}"
        if key in _POLICY_FIELDS and value:
            _set_field(draft, option, _POLICY_FIELDS[key], str(value))
        elif key == "scheduleTimeoutSeconds":
            draft.note(
                option, EntryEffect.CHANGED, "the job waits without limit; set pendingDeadlineSeconds to limit it"
            )
        else:
            draft.note(option, EntryEffect.UNUSED, "a group always consists of all pods of the job")


def _set_field(draft: JobDraft, option: str, field: str, value: object, message: str | None = None) -> None:
    """Set a field, unless an earlier option has set it to another value."""
    known = draft.get(field)
    if known not in (None, value):
        draft.note(option, EntryEffect.CHANGED, f"it is already set to {known}", field=field)
        return
    draft.set(field, value)
    draft.note(option, EntryEffect.MAPPED, message or f"is {value}", field=field)
