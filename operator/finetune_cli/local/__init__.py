"""Local mode, which runs the operator's reconcile passes with local processes instead of pods."""
