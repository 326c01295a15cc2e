"""PID 1 of a training pod: starts torchrun, watches its ranks and leaves the last words. Standard library only."""
