"""Write, prune and read checkpoints, save random states, and manage the ownership of the output folder."""
