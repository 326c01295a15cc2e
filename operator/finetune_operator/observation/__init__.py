"""Pure functions that parse raw Kubernetes objects into an Observation."""
