"""The simulator answers as Kubernetes does; tests/e2e/test_simulator_contract.py asks a real one the same."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from finetune_operator import names
from testing.fakes.virtual_time import run_in_virtual_time
from testing.simulator.conformance.checks import STORIES, Facts, Site
from testing.simulator.conformance.expected_results import ANSWERS
from testing.simulator.history import Scenario, play
from testing.simulator.scenarios import KINDS
from testing.simulator.world.apiserver import Raw
from testing.simulator.world.choices import RepeatedChoices, SeededChoices, shrink
from testing.simulator.world.kubernetes_nodes import Machine
from testing.simulator.world.network import Link
from testing.simulator.world.trainer import Workload
from testing.simulator.world.world import World

BRIEF = "brief"
Story = Callable[[Site], Awaitable[Facts]]


def pod(name: str, *, node_rank: str = "0", **spec: object) -> Raw:
    labels = {names.JOB_UID: "none", names.ATTEMPT: "0", names.NODE_RANK: node_rank}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


async def end_brief_pods(world: World) -> None:
    """What a command that fails at once would do."""
    while True:
        for _, body in world.all_pods():
            process, _ = world.machines.processes.get(body["metadata"]["uid"], (None, None))
            if process and process.alive and body["spec"].get("schedulerName") == BRIEF:
                world.trainer.kill(process, code=1)
        await asyncio.sleep(0.05)


async def tell(story: Story) -> Facts:
    world = World(SeededChoices(0), Workload(num_nodes=2))
    ends = asyncio.create_task(end_brief_pods(world))
    link = Link(world.server, world.choices, actor="contract", on_crash=lambda: None)
    site = Site(
        api=link,
        namespace="contract",
        endless=pod,
        brief=lambda name: pod(name, schedulerName=BRIEF),
        nowhere=lambda name: pod(name, nodeSelector={"example.com/none": "there"}),
    )
    try:
        return await story(site)
    finally:
        ends.cancel()


@pytest.mark.parametrize("story", STORIES, ids=[story.__name__ for story in STORIES])
def test_the_simulator_answers_as_kubernetes_does(story: Story) -> None:
    assert run_in_virtual_time(tell(story)) == ANSWERS[story.__name__]


async def lose_a_machine(what: Callable[[World, Machine], None]) -> list[tuple[bool, bool, bool, str]]:
    """Of a pod and its process, before, long after, and once the machine is back: there, leaving, alive; disruption."""
    world = World(SeededChoices(0), Workload(num_nodes=2, patience_seconds=3600.0))
    body = pod("lost")
    body["metadata"]["namespace"] = "default"
    world.server.create(body, actor="user")
    await asyncio.sleep(10.0)
    [(process, machine)] = world.machines.processes.values()

    def look() -> tuple[bool, bool, bool, str]:
        there = [body for _, body in world.all_pods()]
        reasons = [
            c["reason"] for body in there for c in body["status"]["conditions"] if c["type"] == "DisruptionTarget"
        ]
        leaving = any("deletionTimestamp" in body["metadata"] for body in there)
        return bool(there), leaving, process.alive, "".join(reasons)

    seen = [look()]
    what(world, machine)
    await asyncio.sleep(600.0)
    seen.append(look())
    world.nodes.find(machine)
    await asyncio.sleep(60.0)
    return [*seen, look()]


def cut_power_of_the_kubelet(world: World, machine: Machine) -> None:
    world.nodes.lose(machine)


def delete_the_node(world: World, machine: Machine) -> None:
    world.nodes.lose(machine)
    world.nodes.delete_node(machine)


def taint_it_as_out_of_service(world: World, machine: Machine) -> None:
    world.nodes.lose(machine)
    world.nodes.take_out_of_service(machine)


@pytest.mark.parametrize(
    ("what", "long_after"),
    [
        (cut_power_of_the_kubelet, (True, True, True, "DeletionByTaintManager")),
        (delete_the_node, (False, False, True, "")),
        (taint_it_as_out_of_service, (False, False, True, "")),
    ],
)
def test_what_runs_on_a_lost_machine_runs_on_until_its_kubelet_is_back(
    what: Callable[[World, Machine], None], long_after: tuple[bool, bool, bool, str]
) -> None:
    before, lost, found = run_in_virtual_time(lose_a_machine(what))

    assert before == (True, False, True, "")
    assert lost == long_after
    assert found == (False, False, False, "")


def test_every_answer_belongs_to_a_story() -> None:
    assert set(ANSWERS) == {story.__name__ for story in STORIES}


def test_a_history_without_trouble_completes_in_one_attempt_and_few_writes() -> None:
    story = play(Scenario(), SeededChoices(0))

    assert (story.violations, story.phase, story.restarts) == ([], "Complete", 0)
    assert story.commits < 45


def test_what_is_found_is_made_shorter_and_calmer() -> None:
    tried = []

    def fails(made: list[int]) -> bool:
        tried.append(made)
        return 7 in made and made[:1] != [7]

    assert shrink([3, 1, 4, 7, 5, 9, 2, 6], fails, tries=100) == [0, 7]
    assert len(tried) < 100


def test_choices_can_be_repeated() -> None:
    choices = SeededChoices(7)
    first = play(KINDS["anything"](choices), choices)
    again = RepeatedChoices(choices.made)

    assert play(KINDS["anything"](again), again).trace == first.trace


def test_equal_choices_give_equal_histories() -> None:
    first, second = (play(Scenario(), SeededChoices(7)).trace for _ in range(2))

    assert first == second
