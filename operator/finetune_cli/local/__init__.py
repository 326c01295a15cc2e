"""Local mode: the operator's own reconcile loop, with processes of the local host instead of pods."""
