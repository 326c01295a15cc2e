"""Pure functions that plan an attempt and build its Kubernetes manifests."""
