"""PID 1 of a training pod: starts and watches the ranks, writes the termination message. Standard library only."""
