"""Kubernetes API client, informers and credentials."""
