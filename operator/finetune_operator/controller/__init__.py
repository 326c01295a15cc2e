"""The controller: work queue, caches, progress poller and the reconcile pass of each job."""
