"""Local mode: everything from Observation to Decision is the operator's; pods are processes of this machine."""
