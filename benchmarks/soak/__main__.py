"""`make soak`: hundreds of jobs with faults, on nodes that come and go, under an operator that is killed every minute.

At the end every job must have ended as its script says, and after they are deleted nothing of them may be left.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from contextlib import suppress

from benchmarks.load import JOBS, Raw
from benchmarks.rig import FAKE_NODES, NAMESPACE, fake_cluster
from benchmarks.soak.actors import Keeper, Player, Scene, Thief
from benchmarks.soak.scripts import Plan, plan_jobs
from finetune_operator import names
from finetune_operator.kube.api_client import ApiServer
from finetune_operator.kube.cluster import collection_path
from testing.cluster.throwaway import ThrowawayCluster

PATIENCE_SECONDS = 300.0  # with jobs that have not ended when the faults do, and with garbage collection
LOOK_SECONDS = 5.0
NODE_EVERY_SECONDS = 20.0  # one is taken away
KINDS = ("Pod", "Service", "ConfigMap")


def main() -> int:
    """Exit code 1 if a job ended otherwise or something is left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="of faults (default 30)")
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--kill-every", type=float, default=60.0, help="seconds of an operator's life (default 60)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    options = parser.parse_args()
    wrong = asyncio.run(soak(options))
    for line in wrong[:20]:
        print(f"WRONG: {line}")
    print(f"{len(wrong)} things are wrong")
    return 1 if wrong else 0


async def soak(options: argparse.Namespace) -> list[str]:
    """What went wrong; the figures are printed."""
    async with fake_cluster("soak", keep=options.keep) as (cluster, api):
        return await _soak(cluster, api, options)


async def _soak(cluster: ThrowawayCluster, api: ApiServer, options: argparse.Namespace) -> list[str]:
    seconds = 60.0 * options.minutes
    luck = random.Random(options.seed)
    plans = plan_jobs(options.jobs, seconds=seconds, seed=options.seed)
    scene, keeper = Scene(api), Keeper(cluster.kubeconfig)
    began = time.monotonic()
    player, thief = Player(scene, luck, deadline=began + seconds), Thief(api, luck)
    watches = scene.watches()
    background = [asyncio.create_task(watch.run()) for watch in watches]
    for watch in watches:
        await watch.synced.wait()
    faults_go_on = lambda: time.monotonic() - began < seconds  # noqa: E731
    keeping = asyncio.create_task(keeper.keep(every=options.kill_every, killing=faults_go_on))
    taking = asyncio.create_task(thief.take(count=FAKE_NODES, every=NODE_EVERY_SECONDS))
    playing = asyncio.gather(*(player.play(plan) for plan in plans))
    try:
        await _until_over([keeping, taking], seconds)
        taking.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(playing, PATIENCE_SECONDS)
        wrong = [*_check_ends(scene, plans), *await _check_rest(api, scene)]
        print(_render_jobs(scene, player, plans))
        wrong += await _check_nothing_left(api, scene)
    finally:
        playing.cancel()
        for task in (keeping, taking, *background):
            task.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    print(_render_operator(keeper, nodes_taken=thief.taken, jobs=len(plans)))
    return wrong


async def _until_over(tasks: list[asyncio.Task[None]], seconds: float) -> None:
    """Until the time is over; what goes on for ever has no reason to end before."""
    ended, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()


def _check_ends(scene: Scene, plans: tuple[Plan, ...]) -> list[str]:
    wrong = []
    for plan in plans:
        wanted, seen = (plan.script.phase, plan.script.reason), scene.end(plan.name)
        if seen != wanted:
            phase = scene.jobs.get(plan.name, {}).get("status", {}).get("phase")
            wrong.append(f"{plan.name} ({plan.script}): {seen or phase}, expected {wanted}")
    return wrong


async def _check_rest(api: ApiServer, scene: Scene) -> list[str]:
    """Of ended jobs no pod runs; of jobs that are gone nothing is left."""
    await asyncio.sleep(30.0)
    present = {job["metadata"]["uid"] for name, job in scene.jobs.items() if name not in scene.deleted}
    wrong = []
    for kind, body in await _children(api):
        name, labels = body["metadata"]["name"], body["metadata"].get("labels", {})
        if labels[names.JOB_UID] not in present:
            wrong.append(f"{kind} {name} outlived its job")
        elif (
            kind == "Pod"
            and body["status"].get("phase") in ("Pending", "Running")
            and scene.end(labels[names.JOB_NAME])
        ):
            wrong.append(f"{kind} {name} is {body['status']['phase']} although its job ended")
    return wrong


async def _check_nothing_left(api: ApiServer, scene: Scene) -> list[str]:
    """Delete all jobs: what they owned goes with them."""
    for name in scene.jobs.keys() - scene.deleted:
        await api.call("DELETE", f"{JOBS}/{name}", body={"kind": "DeleteOptions", "apiVersion": "v1"})
    left: list[tuple[str, Raw]] = []
    for _ in range(int(PATIENCE_SECONDS / LOOK_SECONDS)):
        left = await _children(api)
        if not left:
            break
        await asyncio.sleep(LOOK_SECONDS)
    return [f"{kind} {body['metadata']['name']} is left after its job was deleted" for kind, body in left]


async def _children(api: ApiServer) -> list[tuple[str, Raw]]:
    """Everything that belongs to a job."""
    return [
        (kind, body)
        for kind in KINDS
        async for page in api.pages(collection_path(kind, NAMESPACE), selector=names.JOB_UID)
        for body in page["items"]
    ]


def _render_jobs(scene: Scene, player: Player, plans: tuple[Plan, ...]) -> str:
    """How the jobs ended, and what was done to them."""
    ends = Counter(" ".join(scene.end(plan.name) or ("no end",)).strip() for plan in plans)
    return _table(
        [
            *((f"ended: {end}", count) for end, count in ends.most_common()),
            *((f"done: {act}", count) for act, count in player.acts.most_common()),
            ("restarts of jobs", scene.restarts()),
        ]
    )


def _render_operator(keeper: Keeper, *, nodes_taken: int, jobs: int) -> str:
    """What became of the operators."""
    last = max((seconds for seconds, _ in keeper.samples), default=0.0)
    first_third = [mib for seconds, mib in keeper.samples if seconds < last / 3]
    last_third = [mib for seconds, mib in keeper.samples if seconds > 2 * last / 3]
    return _table(
        [
            ("Kubernetes nodes taken away", nodes_taken),
            ("operators killed", keeper.kills),
            ("an operator's start until ready, s, median", f"{statistics.median(keeper.starts):.2f}"),
            ("memory, first third, MiB, median and most", _spread(first_third)),
            ("memory, last third, MiB, median and most", _spread(last_third)),
            ("API requests per job, by those that were killed", f"{keeper.requests.total() / jobs:.1f}"),
        ]
    )


def _table(rows: list[tuple[str, object]]) -> str:
    return "\n".join(f"{title.ljust(50)}  {value}" for title, value in rows)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f}, {max(values):.1f}" if values else "none"


if __name__ == "__main__":
    sys.exit(main())
