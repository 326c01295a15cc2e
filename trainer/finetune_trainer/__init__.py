"""What runs in the pod: the supervisor (PID 1), its launcher and, in every rank, the training itself."""
