"""Every fault by its name."""

from chaos.control_plane_faults import CONTROL_PLANE_FAULTS
from chaos.data_faults import DATA_FAULTS
from chaos.fault import Fault
from chaos.pod_faults import MACHINE_FAULTS, POD_FAULTS
from chaos.rank_faults import RANK_FAULTS, RESOURCE_FAULTS
from chaos.start_faults import START_FAULTS

FAULTS: dict[str, Fault] = {
    **RANK_FAULTS,
    **RESOURCE_FAULTS,
    **POD_FAULTS,
    **MACHINE_FAULTS,
    **START_FAULTS,
    **CONTROL_PLANE_FAULTS,
    **DATA_FAULTS,
}
