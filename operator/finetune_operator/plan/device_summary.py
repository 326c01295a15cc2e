"""Describes the devices of a node, its ranks and the backend of torch for `finetune plan`."""

from finetune_api.v1alpha1.devices import find_uncountable_resource, list_requested_devices
from finetune_api.v1alpha1.job import FineTuneJobSpec


def describe_devices(spec: FineTuneJobSpec) -> str:
    """Describe the devices of a node, such as `8 x nvidia.com/gpu per node (NVIDIA GPU), 1 rank each; backend nccl`."""
    devices = tuple(list_requested_devices(spec.resources.limits))
    unknown = find_uncountable_resource(spec.resources.limits)
    claims = ", ".join(claim.name for claim in spec.pod_template.resource_claims)
    parts = [f"{each.count} x {each.resource} per node ({each.kind.name})" for each in devices]
    parts += [f"{unknown} (not in the table of devices)"] if unknown else []
    parts += [f"claims {claims} per node"] if claims else []
    backend = " or ".join(dict.fromkeys(each.kind.backend for each in devices))
    if not backend:
        backend = "that of torch for the devices" if unknown or claims else "gloo"
    ranks = "1 rank each" if spec.ranks_per_node == spec.gpus_per_node else f"ranks per node: {spec.ranks_per_node}"
    uses_torch = " if the command uses torch" if spec.command else ""
    return f"{' and '.join(parts) or 'CPUs'}, {ranks}; backend {backend}{uses_torch}"
