"""The pure plan of one attempt and the Kubernetes manifests built from it."""
