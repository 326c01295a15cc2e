"""One cluster with the operator for all pytest workers of a run; each worker has a namespace and claims of its own."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from testing.cluster.current import CurrentContextProvider
from testing.cluster.provider import ClusterProvider
from testing.processes.operator_stack import NAMESPACE, OperatorInstallation


@contextmanager
def share_installation(
    provider: ClusterProvider,
    *,
    worker: str,
    run: str,
    extend: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[OperatorInstallation]:
    """Yield the installation with the namespace of one worker.

    The first worker of a run sets up cluster, operator and extension. It removes them after the other workers have
    finished, unless KEEP_CLUSTER is 1 or the cluster existed before.

    worker, run: values of the fixtures `worker_id` and `testrun_uid` of pytest-xdist. extend: installs more programs.
    """
    namespace = NAMESPACE if worker == "master" else f"{NAMESPACE}-{worker}"
    installation = OperatorInstallation(provider, namespace=namespace)
    cache, extension = provider.cache, ExitStack()
    marker = cache.root / "installation.run"
    cache.root.mkdir(parents=True, exist_ok=True)
    with (cache.root / "installation.users").open("w") as users:
        with cache.hold_lock("installation"):
            is_first = not marker.exists() or marker.read_text() != run
            if is_first:
                installation.prepare_operator()
                extension.enter_context(extend())
                marker.write_text(run)
            fcntl.flock(users, fcntl.LOCK_SH)
            installation.prepare_namespace()
            installation.prepare_storage()
        yield installation
        if is_first:
            fcntl.flock(users, fcntl.LOCK_EX)  # wait until the other workers have closed the file
            with cache.hold_lock("installation"):  # a worker that comes later sets up everything again
                marker.unlink()
                extension.close()
                if not isinstance(provider, CurrentContextProvider) and os.environ.get("KEEP_CLUSTER") != "1":
                    provider.down()
