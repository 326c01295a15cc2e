"""Pure functions from raw Kubernetes objects to an Observation."""
