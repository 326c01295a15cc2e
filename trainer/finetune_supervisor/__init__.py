"""PID 1 of a training pod: starts the ranks, watches them and leaves the last words. Standard library only."""
