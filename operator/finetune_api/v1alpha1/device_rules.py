"""Cross-field rules of compute devices: ranks can use them, and their number is known (decisions/219).

CEL has none of the rules that depend on names of resources: matching them exceeds the cost limit of a CEL rule.
"""

from typing import TYPE_CHECKING

from finetune_api.v1alpha1.base import CelRule, CrossFieldRule
from finetune_api.v1alpha1.devices import Support, find_uncountable_resource, list_requested_devices

if TYPE_CHECKING:
    from finetune_api.v1alpha1.job import FineTuneJobSpec

_CEL_LIMITATIONS = (
    "all: a job that began in an earlier release must remain editable, and matching resource names exceeds the cost"
    " limit of a CEL rule"
)


# Rule: something can use the devices.


def _find_unsupported_device(spec: "FineTuneJobSpec") -> str | None:
    supported = (Support.TRAINER, Support.TRAINER_IMAGE, *((Support.COMMAND,) if spec.command else ()))
    for devices in list_requested_devices(spec.resources.limits):
        field = f"resources.limits: {devices.resource}"
        if devices.kind.support is Support.NONE:
            return f"{field}: TPUs are not supported, because the operator does not set up their topology; use GPUs"
        if devices.kind.support not in supported:
            return (
                f"{field}: the operator's trainer runs on NVIDIA and AMD GPUs, and would use the CPU instead of"
                f" {devices.kind.name}; set command to run your own program, or request GPUs"
            )
    return None


# Rule: ranks of one node do not share a slice of a GPU.


def _find_shared_slice(spec: "FineTuneJobSpec") -> str | None:
    """Return the first device of which one rank per node can use one; a command may assign the devices itself."""
    if spec.ranks_per_node == 1 or (spec.command is not None and spec.nproc_per_node is not None):
        return None
    for devices in list_requested_devices(spec.resources.limits):
        if devices.kind.max_ranks_reason:
            remedy = ", or set nprocPerNode if your program assigns the devices to its ranks" if spec.command else ""
            return (
                f"resources.limits: {devices.resource} is {devices.count} for {spec.ranks_per_node} ranks per node, but"
                f" {devices.kind.max_ranks_reason}; use one per node, or request whole GPUs{remedy}"
            )
    return None


# Rule: the number of ranks per node is known.


def _check_rank_count(spec: "FineTuneJobSpec") -> str | None:
    if spec.nproc_per_node is not None:
        return None
    if resource := find_uncountable_resource(spec.resources.limits):
        return (
            f"resources.limits: the number of ranks for {resource} is unknown, because the operator's table of devices"
            " does not contain it; set nprocPerNode, for example to 1 if it is not a compute device"
        )
    if spec.pod_template.resource_claims and not spec.gpus_per_node:
        return _CLAIMS_RULE.message
    return None


_CLAIMS_RULE = CelRule(
    "!has(self.podTemplate) || !has(self.podTemplate.resourceClaims) || self.podTemplate.resourceClaims.size() == 0"
    " || has(self.nprocPerNode) || (has(self.resources) && has(self.resources.limits)"
    " && self.resources.limits.exists(k, !(k in ['cpu', 'memory', 'ephemeral-storage'])))",
    "podTemplate.resourceClaims: the number of ranks for the claimed devices is unknown, because the operator does not"
    " read the claims; set nprocPerNode to the number of devices of a pod, or to 1 if the claims contain none",
    field_path=".podTemplate",
)


DEVICE_RULES: "tuple[CrossFieldRule[FineTuneJobSpec], ...]" = (
    CrossFieldRule(
        "the program can use the devices",
        _find_unsupported_device,
        cel_limitations=_CEL_LIMITATIONS,
    ),
    CrossFieldRule(
        "ranks of a node share no slice of a GPU",
        _find_shared_slice,
        cel_limitations=_CEL_LIMITATIONS,
    ),
    CrossFieldRule(
        "ranks per node are known",
        _check_rank_count,
        (_CLAIMS_RULE,),
        cel_limitations="extended resources that are not known devices: a job that began in an earlier release must"
        " remain editable, and matching resource names exceeds the cost limit of a CEL rule",
    ),
)
