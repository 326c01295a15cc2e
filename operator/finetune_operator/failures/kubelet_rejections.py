"""Rule for pods that the kubelet rejected at admission, before any container ran."""

from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import Evidence
from finetune_operator.failures.verdict import Verdict, describe_node, extract_last_line

# reasons of older kubelets; the messages of newer kubelets always start with "Pod was rejected"
ADMISSION_ERRORS = frozenset(
    {
        "NodeAffinity",
        "NodeShutdown",
        "TopologyAffinityError",
        "UnexpectedAdmissionError",
        "VolumeAttachmentLimitExceeded",
    }
)


def rejected_by_kubelet(evidence: Evidence) -> Verdict | None:
    """Match a pod that the kubelet rejected; a new pod can start on another Kubernetes node."""
    is_rejected = evidence.exit_code is None and evidence.message.startswith("Pod was rejected")
    is_rejected = is_rejected or is_node_under_pressure(evidence)
    if not is_rejected and not evidence.reason.startswith("OutOf") and evidence.reason not in ADMISSION_ERRORS:
        return None
    detail = f": {extract_last_line(evidence.message)}" if evidence.message else ""
    return Verdict(
        Reason.NODE_REFUSED_POD, f"{describe_node(evidence)}: the kubelet rejected the pod: {evidence.reason}{detail}"
    )


def is_node_under_pressure(evidence: Evidence) -> bool:
    """Return whether the kubelet rejected the pod because of node pressure, which it reports as an eviction."""
    return evidence.reason == "Evicted" and "The node had condition" in evidence.message
