"""Combine the faults of all modules by name."""

from testing.faults.catalog.control_plane_faults import CONTROL_PLANE_FAULTS
from testing.faults.catalog.data_faults import DATA_FAULTS
from testing.faults.catalog.fault import InjectedFault
from testing.faults.catalog.load_faults import LOAD_FAULTS
from testing.faults.catalog.pod_faults import K8S_NODE_FAULTS, POD_FAULTS
from testing.faults.catalog.policy_faults import POLICY_FAULTS
from testing.faults.catalog.rank_faults import RANK_FAULTS, RESOURCE_FAULTS
from testing.faults.catalog.release_faults import RELEASE_FAULTS
from testing.faults.catalog.start_faults import START_FAULTS
from testing.faults.catalog.storage_faults import STORAGE_FAULTS
from testing.faults.catalog.untrusted_faults import UNTRUSTED_FAULTS

FAULTS: dict[str, InjectedFault] = {
    **RANK_FAULTS,
    **RESOURCE_FAULTS,
    **POD_FAULTS,
    **K8S_NODE_FAULTS,
    **START_FAULTS,
    **CONTROL_PLANE_FAULTS,
    **DATA_FAULTS,
    **UNTRUSTED_FAULTS,
    **RELEASE_FAULTS,
    **POLICY_FAULTS,
    **LOAD_FAULTS,
    **STORAGE_FAULTS,
}
