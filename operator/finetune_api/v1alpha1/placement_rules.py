"""Cross-field rules of scheduling gates, the host network and resource claims, each in Python and in CEL."""

from typing import TYPE_CHECKING

from finetune_api.v1alpha1.base import CelRule, CrossFieldRule
from finetune_api.v1alpha1.placement_types import find_duplicate
from finetune_api.v1alpha1.scheduling import KUEUE_PREFIX

if TYPE_CHECKING:
    from finetune_api.v1alpha1.job import FineTuneJobSpec

_MAX_PORT = 65535


# Rule: the operator sets Kueue's gates of a job with a queue.


def _find_queue_gate(spec: "FineTuneJobSpec") -> str | None:
    if spec.scheduling is None:
        return None
    gates = [gate.name for gate in spec.pod_template.scheduling_gates if gate.name.startswith(KUEUE_PREFIX)]
    return (
        f"podTemplate.schedulingGates: {gates[0]} is set by Kueue because of scheduling; remove it" if gates else None
    )


_QUEUE_GATE_RULE = CelRule(
    "!has(self.scheduling) || !has(self.podTemplate) || !has(self.podTemplate.schedulingGates)"
    f" || !self.podTemplate.schedulingGates.exists(g, g.name.startsWith('{KUEUE_PREFIX}'))",
    f"podTemplate.schedulingGates: gates with the prefix {KUEUE_PREFIX} are set by Kueue because of scheduling; remove"
    " them",
    field_path=".podTemplate",
)


# Rule: gloo finds the address of the ranks on the network of the Kubernetes nodes.

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def _lacks_interface(spec: "FineTuneJobSpec") -> bool:
    """Return whether gloo would listen on the address of the host name, which many hosts resolve to 127.0.0.1."""
    uses_gloo_between_hosts = spec.pod_template.host_network and spec.command is None and spec.num_nodes > 1
    has_interface = spec.network.interface or any(variable.name == _GLOO_INTERFACE for variable in spec.env)
    return uses_gloo_between_hosts and not has_interface


_INTERFACE_RULE = CelRule(
    "!has(self.podTemplate) || !has(self.podTemplate.hostNetwork) || !self.podTemplate.hostNetwork"
    " || has(self.command) || !has(self.numNodes) || self.numNodes == 1"
    " || (has(self.network) && has(self.network.interface))"
    f" || (has(self.env) && self.env.exists(e, e.name == '{_GLOO_INTERFACE}'))",
    "podTemplate.hostNetwork: set network.interface to the network interface of the Kubernetes nodes, because gloo"
    " otherwise uses the address of their host name, which is often 127.0.0.1",
    field_path=".podTemplate",
)


# Rule: every claim of the container is a claim of the pod.


def _find_unknown_claim(spec: "FineTuneJobSpec") -> str | None:
    pod_claims = {claim.name for claim in spec.pod_template.resource_claims}
    unknown = next((claim.name for claim in spec.resources.claims if claim.name not in pod_claims), None)
    return None if unknown is None else f"resources.claims: {unknown} is not in podTemplate.resourceClaims; add it"


_HAS_CLAIM = (
    "(has(self.podTemplate) && has(self.podTemplate.resourceClaims)"
    " && self.podTemplate.resourceClaims.exists(p, p.name == c.name))"
)
_CLAIM_RULE = CelRule(
    f"!has(self.resources) || !has(self.resources.claims) || self.resources.claims.all(c, {_HAS_CLAIM})",
    "resources.claims: a claim is not in podTemplate.resourceClaims; add it",
    "'resources.claims: %s is not in podTemplate.resourceClaims; add it'"
    f".format([self.resources.claims.filter(c, !{_HAS_CLAIM})[0].name])",
    field_path=".resources",
)


def _find_repeated_claim(spec: "FineTuneJobSpec") -> str | None:
    duplicate = find_duplicate(claim.name for claim in spec.resources.claims)
    return None if duplicate is None else f"resources.claims: {duplicate} is given twice; remove one of them"


PLACEMENT_RULES: "tuple[CrossFieldRule[FineTuneJobSpec], ...]" = (
    CrossFieldRule("gates of the queue are set by Kueue", _find_queue_gate, (_QUEUE_GATE_RULE,)),
    CrossFieldRule.from_cel_rule(
        "the status port exists",
        lambda spec: spec.status_port > _MAX_PORT,
        CelRule(
            "!has(self.podTemplate) || !has(self.podTemplate.hostNetwork) || !self.podTemplate.hostNetwork"
            f" || !has(self.network) || !has(self.network.masterPort) || self.network.masterPort < {_MAX_PORT}",
            "network.masterPort: with podTemplate.hostNetwork, the status port is the one after it; set at most"
            f" {_MAX_PORT - 1}",
            field_path=".network",
        ),
    ),
    CrossFieldRule.from_cel_rule("the host network has an interface for gloo", _lacks_interface, _INTERFACE_RULE),
    CrossFieldRule("claims of the container exist", _find_unknown_claim, (_CLAIM_RULE,)),
    CrossFieldRule(
        "claims of the container are distinct",
        _find_repeated_claim,
        cel_limitations="all, because the name is the key of the list, which the API server compares",
    ),
)
