"""Controller with work queue, caches, progress poller and reconcile pass."""
