"""What runs in the pod: the supervisor (PID 1) and, under torchrun, the training itself."""
