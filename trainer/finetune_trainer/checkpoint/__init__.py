"""Write, prune and read checkpoints, and manage the ownership of the output folder."""
