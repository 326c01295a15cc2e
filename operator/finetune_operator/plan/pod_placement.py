"""Builds the fields of a pod for gates, the network of the Kubernetes node, claims and the topology spread."""

from finetune_operator import names
from finetune_operator.plan.object_metadata import Manifest
from finetune_operator.plan.run_plan import RunPlan

# prefers different Kubernetes nodes
SOFT_SPREAD = {"topologyKey": "kubernetes.io/hostname", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}


def build_pod_placement(run_plan: RunPlan) -> Manifest:
    """Return the fields of the pod that are set only for jobs that ask for them.

    With hostNetwork, hostname and subdomain still give the pod its DNS record: that of the address of its Kubernetes
    node. The pod resolves names of the cluster only with ClusterFirstWithHostNet.
    """
    template = run_plan.spec.pod_template
    gates = [gate.model_dump(by_alias=True) for gate in template.scheduling_gates]
    claims = [claim.model_dump(by_alias=True, exclude_none=True) for claim in template.resource_claims]
    return {
        **({"schedulingGates": gates} if gates else {}),
        **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if template.host_network else {}),
        **({"resourceClaims": claims} if claims else {}),
    }


def build_ports(run_plan: RunPlan) -> list[Manifest]:
    """Return the ports of the trainer container.

    With hostNetwork, the API server copies them to hostPort, and the scheduler places no two pods with the same port
    on a Kubernetes node. Every pod therefore declares the rendezvous port, too, although only node 0 listens on it:
    Kueue puts pods with other ports into another set of pods.
    """
    status_port = {"name": names.STATUS_PORT_NAME, "containerPort": run_plan.spec.status_port}
    if not run_plan.spec.pod_template.host_network:
        return [status_port]
    return [status_port, {"name": "master", "containerPort": run_plan.spec.network.master_port}]


def build_topology_spread(run_plan: RunPlan) -> list[Manifest]:
    """Return the spread constraints of the user, or a soft one over Kubernetes nodes.

    A constraint without a selector counts the pods that belong together.
    """
    constraints = run_plan.spec.pod_template.topology_spread_constraints
    selector = {"labelSelector": {"matchLabels": select_pods_to_spread(run_plan)}}
    return [
        {**selector, **constraint.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)}
        for constraint in constraints
    ] or [{**SOFT_SPREAD, **selector}]


def select_pods_to_spread(run_plan: RunPlan) -> dict[str, str]:
    """Return the labels of the pods of an attempt.

    They are the same in all attempts of a job with a queue, because Kueue replaces a pod of a group only by an equal
    one. The scheduler does not count the pods of earlier attempts, which are being deleted.
    """
    labels = {names.JOB_UID: run_plan.job_uid}
    return labels if run_plan.spec.scheduling is not None else {**labels, names.ATTEMPT: str(run_plan.attempt)}
