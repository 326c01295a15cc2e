"""Pure plan of one attempt, and the Kubernetes manifests that are built from it."""
