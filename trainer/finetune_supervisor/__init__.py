"""PID 1 of a training pod, which starts and monitors the ranks. Uses only the standard library."""
