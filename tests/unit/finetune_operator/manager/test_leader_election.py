"""The lease among replicas that talk to one API server, each with a clock of its own."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from finetune_operator.kube.api_client import ApiServer
from finetune_operator.manager import leader_election as leader_module
from finetune_operator.manager.leader_election import LEASE_SECONDS, RENEW_DEADLINE, LeaderElection, LeaseName
from testing.fakes.api_client import connected
from testing.fakes.http_api import Fault, HttpApi


class Clock:
    """Monotonic seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "RETRY_SECONDS", 0.01)


def replica(server: ApiServer, identity: str, clock: Clock) -> LeaderElection:
    return LeaderElection(server, LeaseName("default", "finetune-operator", identity), clock=clock)


@asynccontextmanager
async def two_replicas(api: HttpApi) -> AsyncIterator[tuple[LeaderElection, LeaderElection, Clock]]:
    clock = Clock()
    async with connected(api) as server:
        yield replica(server, "one", clock), replica(server, "two", clock), clock


def spec(api: HttpApi) -> dict[str, object]:
    found: dict[str, object] = api.objects["leases", "default", "finetune-operator"]["spec"]
    return found


async def waits(election: LeaderElection) -> bool:
    """True if the lease is not to be had at the moment."""
    try:
        async with asyncio.timeout(0.2):
            await election.acquire()
    except TimeoutError:
        return True
    return False


async def test_the_first_replica_leads_and_the_second_waits() -> None:
    api = HttpApi()
    async with two_replicas(api) as (one, two, _):
        await one.acquire()
        assert await waits(two)
        assert (one.leading, two.leading) == (True, False)
    assert spec(api)["holderIdentity"] == "one"
    assert spec(api)["leaseDurationSeconds"] == LEASE_SECONDS


async def test_a_lease_that_is_not_renewed_is_taken_over_when_its_time_is_up() -> None:
    api = HttpApi()
    async with two_replicas(api) as (one, two, clock):
        await one.acquire()
        assert await waits(two)  # sees the lease: its time counts from now
        clock.now += LEASE_SECONDS - 0.1
        assert await waits(two)
        clock.now += 0.2
        assert not await waits(two)
        assert (one.leading, two.leading) == (False, True)
    assert spec(api)["leaseTransitions"] == 1


async def test_the_time_written_in_the_lease_does_not_matter() -> None:
    api = HttpApi()
    old = {"holderIdentity": "gone", "leaseDurationSeconds": 15, "renewTime": "2001-01-01T00:00:00.000000Z"}
    api.put("leases", {"metadata": {"name": "finetune-operator"}, "spec": old})
    async with two_replicas(api) as (one, _, clock):
        assert await waits(one), "its holder's clock may be wrong: only an unchanged lease counts"
        clock.now += LEASE_SECONDS
        assert not await waits(one)


async def test_a_released_lease_is_free_at_once() -> None:
    async with two_replicas(HttpApi()) as (one, two, _):
        await one.acquire()
        await one.release()
        assert not await waits(two)
        assert (one.leading, two.leading) == (False, True)


async def test_a_replica_that_never_led_releases_nothing() -> None:
    api = HttpApi()
    async with two_replicas(api) as (one, two, _):
        await one.acquire()
        assert await waits(two)
        await two.release()
    assert spec(api)["holderIdentity"] == "one"


async def test_holding_renews_without_reading() -> None:
    api = HttpApi()
    async with two_replicas(api) as (one, _, clock):
        await one.acquire()
        reads = len(api.asked("GET", "leases"))
        holding = asyncio.create_task(one.hold())
        for _ in range(20):
            clock.now += RENEW_DEADLINE / 2
            await asyncio.sleep(0.03)
        assert one.leading
        assert not holding.done()
        holding.cancel()
    assert len(api.asked("GET", "leases")) == reads
    assert len(api.asked("PUT", "leases")) >= 10


async def test_holding_ends_at_the_renew_deadline_while_nobody_else_can_lead() -> None:
    api = HttpApi()
    async with two_replicas(api) as (one, two, clock):
        await one.acquire()
        assert await waits(two)
        api.faults.append(Fault("PUT", "leases", 500, times=10**6))
        holding = asyncio.create_task(one.hold())
        await asyncio.sleep(0.1)
        assert one.leading, "a few failures are no loss"
        clock.now += RENEW_DEADLINE
        await asyncio.wait_for(holding, timeout=2)
        assert not one.leading
        assert await waits(two)


async def test_holding_ends_when_somebody_else_holds_the_lease() -> None:
    api = HttpApi()
    async with two_replicas(api) as (one, _, _clock):
        await one.acquire()
        taken = {**spec(api), "holderIdentity": "somebody"}
        api.put("leases", {"metadata": {"name": "finetune-operator"}, "spec": taken})
        await asyncio.wait_for(one.hold(), timeout=2)


async def test_a_renewal_whose_answer_was_lost_is_no_loss() -> None:
    api = HttpApi()
    async with two_replicas(api) as (one, _, _clock):
        await one.acquire()
        api.faults.append(Fault("PUT", "leases", 500, after=True))
        holding = asyncio.create_task(one.hold())
        await asyncio.sleep(0.2)
        assert one.leading
        assert not holding.done()
        holding.cancel()


@pytest.mark.parametrize("seed", range(5))
async def test_two_replicas_never_lead_at_once(seed: int) -> None:
    api, chance = HttpApi(), random.Random(seed)
    turns, frozen_until = Counter[str](), {"one": 0.0, "two": 0.0}
    async with two_replicas(api) as (one, two, clock):
        replicas = {"one": one, "two": two}
        for _ in range(300):
            clock.now += chance.choice((0.1, 0.5, 2.0, 2.0, 6.0))
            name = chance.choice(("one", "two"))
            if chance.random() < 0.1:
                frozen_until[name] = clock.now + 25.0
            if clock.now < frozen_until[name]:
                continue
            if chance.random() < 0.3:
                api.faults = [Fault(chance.choice(("GET", "PUT")), "leases", 500, after=chance.random() < 0.5)]
            turns[name] += await replicas[name]._try()
            if chance.random() < 0.02:
                await replicas[name].release()
            assert not (one.leading and two.leading)
    assert min(turns["one"], turns["two"]) > 5, "both had their turn, or this test shows nothing"
