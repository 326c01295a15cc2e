"""Tests of leader election with two replicas, an in-memory API server and a fake clock."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from finetune_operator.kube.api_client import ApiClient
from finetune_operator.manager import leader_election as leader_module
from finetune_operator.manager.leader_election import (
    LEASE_DURATION_SECONDS,
    RENEW_DEADLINE_SECONDS,
    LeaderElection,
    LeaseConfig,
)
from finetune_operator.observation.ownership import RawBody
from testing.fakes.api_client import serve_and_connect
from testing.fakes.http_api import HttpApi, ScriptedFault
from testing.processes.waiting import wait_in_event_loop


class FakeMonotonicClock:
    """Fake of time.monotonic whose time is set by the test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _shorten_retry_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "RETRY_PERIOD_SECONDS", 0.01)


def create_replica(server: ApiClient, identity: str, clock: FakeMonotonicClock) -> LeaderElection:
    return LeaderElection(server, LeaseConfig("default", "finetune-operator", identity), clock=clock)


@asynccontextmanager
async def run_two_replicas(api: HttpApi) -> AsyncIterator[tuple[LeaderElection, LeaderElection, FakeMonotonicClock]]:
    clock = FakeMonotonicClock()
    async with serve_and_connect(api) as server:
        yield create_replica(server, "one", clock), create_replica(server, "two", clock), clock


def read_lease_spec(api: HttpApi) -> dict[str, object]:
    lease_spec: dict[str, object] = api.objects["leases", "default", "finetune-operator"]["spec"]
    return lease_spec


async def is_waiting(election: LeaderElection, *, seconds: float = 0.2) -> bool:
    """Return whether the replica is still waiting for the lease after some time."""
    try:
        async with asyncio.timeout(seconds):
            await election.acquire()
    except TimeoutError:
        return True
    return False


async def wait_for_renewals(api: HttpApi, number: int) -> None:
    expected = len(api.find_requests("PUT", "leases")) + number
    await wait_in_event_loop(lambda: len(api.find_requests("PUT", "leases")) >= expected)


async def test_the_first_replica_leads_and_the_second_waits(api: HttpApi) -> None:
    async with run_two_replicas(api) as (one, two, _):
        await one.acquire()
        assert await is_waiting(two)
        assert (one.is_leading, two.is_leading) == (True, False)
    assert read_lease_spec(api)["holderIdentity"] == "one"
    assert read_lease_spec(api)["leaseDurationSeconds"] == LEASE_DURATION_SECONDS


async def test_lease_is_taken_over_if_it_is_not_renewed_within_its_duration(api: HttpApi) -> None:
    async with run_two_replicas(api) as (one, two, clock):
        await one.acquire()
        assert await is_waiting(two)  # the replica measures the lease duration from its first read of the lease
        clock.now += LEASE_DURATION_SECONDS - 0.1
        assert await is_waiting(two)
        clock.now += 0.2
        assert not await is_waiting(two, seconds=20)
        assert (one.is_leading, two.is_leading) == (False, True)
    assert read_lease_spec(api)["leaseTransitions"] == 1


async def test_the_renew_time_in_the_lease_is_ignored(api: HttpApi) -> None:
    old_spec = {"holderIdentity": "gone", "leaseDurationSeconds": 15, "renewTime": "2001-01-01T00:00:00.000000Z"}
    api.put("leases", {"metadata": {"name": "finetune-operator"}, "spec": old_spec})
    async with run_two_replicas(api) as (one, _, clock):
        assert await is_waiting(one), "the clock of the holder may be wrong: only an unchanged lease expires"
        clock.now += LEASE_DURATION_SECONDS
        assert not await is_waiting(one, seconds=20)


async def test_released_lease_can_be_acquired_immediately() -> None:
    async with run_two_replicas(HttpApi()) as (one, two, _):
        await one.acquire()
        await one.release()
        assert not await is_waiting(two, seconds=20)
        assert (one.is_leading, two.is_leading) == (False, True)


async def test_a_lease_is_released_although_a_cancelled_renewal_took_effect(api: HttpApi) -> None:
    async with run_two_replicas(api) as (one, two, _):
        await one.acquire()
        lease = api.objects["leases", "default", "finetune-operator"]
        api.put("leases", lease)  # the renewal, whose response did not arrive
        await one.release()
        assert not one.is_leading
        assert not await is_waiting(two, seconds=20)


async def test_replica_that_never_led_does_not_release_the_lease(api: HttpApi) -> None:
    async with run_two_replicas(api) as (one, two, _):
        await one.acquire()
        assert await is_waiting(two)
        await two.release()
    assert read_lease_spec(api)["holderIdentity"] == "one"


async def test_a_renewal_does_not_read_the_lease(api: HttpApi) -> None:
    async with run_two_replicas(api) as (one, _, clock):
        await one.acquire()
        reads = len(api.find_requests("GET", "leases"))
        renewal = asyncio.create_task(one.renew_until_lost())
        for _ in range(20):
            clock.now += RENEW_DEADLINE_SECONDS / 2
            await wait_for_renewals(api, 2)  # the first one may have begun before
        assert one.is_leading
        assert not renewal.done()
        renewal.cancel()
    assert len(api.find_requests("GET", "leases")) == reads


async def test_leader_stops_at_the_renew_deadline_before_another_replica_leads(api: HttpApi) -> None:
    async with run_two_replicas(api) as (one, two, clock):
        await one.acquire()
        assert await is_waiting(two)
        api.faults.append(ScriptedFault("PUT", "leases", 500, times=10**6))
        renewal = asyncio.create_task(one.renew_until_lost())
        await asyncio.sleep(0.1)
        assert one.is_leading, "a few failures do not lose the lease"
        clock.now += RENEW_DEADLINE_SECONDS
        await asyncio.wait_for(renewal, timeout=20)
        assert not one.is_leading
        assert await is_waiting(two)


async def test_leader_that_was_paused_past_the_deadline_does_not_renew(api: HttpApi) -> None:
    """Workers stop once the lease has expired; a renewal after the pause would leave a leader without workers."""
    async with run_two_replicas(api) as (one, _, clock):
        await one.acquire()
        renewal = asyncio.create_task(one.renew_until_lost())
        await asyncio.sleep(0)  # the leader sleeps until its next renewal
        clock.now += RENEW_DEADLINE_SECONDS + 2
        await asyncio.wait_for(renewal, timeout=20)

        assert not one.is_leading


async def test_response_received_after_the_deadline_does_not_renew_the_lease(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_two_replicas(api) as (one, _, clock):
        await one.acquire()
        clock.now += RENEW_DEADLINE_SECONDS - 1
        write = one._write_lease

        async def pause_during_write(lease: RawBody) -> RawBody:
            response = await write(lease)
            clock.now += 2
            return response

        monkeypatch.setattr(one, "_write_lease", pause_during_write)
        await asyncio.wait_for(one.renew_until_lost(), timeout=20)

        assert not one.is_leading


async def test_the_leader_stops_when_another_replica_holds_the_lease(api: HttpApi) -> None:
    async with run_two_replicas(api) as (one, _, _clock):
        await one.acquire()
        taken = {**read_lease_spec(api), "holderIdentity": "other"}
        api.put("leases", {"metadata": {"name": "finetune-operator"}, "spec": taken})
        await asyncio.wait_for(one.renew_until_lost(), timeout=20)


async def test_a_renewal_whose_response_was_lost_does_not_lose_the_lease(api: HttpApi) -> None:
    async with run_two_replicas(api) as (one, _, _clock):
        await one.acquire()
        api.faults.append(ScriptedFault("PUT", "leases", 500, after_execution=True))
        renewal = asyncio.create_task(one.renew_until_lost())
        await asyncio.sleep(0.2)
        assert one.is_leading
        assert not renewal.done()
        renewal.cancel()


@pytest.mark.parametrize("seed", range(5))
async def test_at_most_one_of_two_replicas_leads(api: HttpApi, seed: int) -> None:
    chance = random.Random(seed)
    successes, frozen_until = Counter[str](), {"one": 0.0, "two": 0.0}
    async with run_two_replicas(api) as (one, two, clock):
        replicas = {"one": one, "two": two}
        for _ in range(300):
            clock.now += chance.choice((0.1, 0.5, 2.0, 2.0, 6.0))
            name = chance.choice(("one", "two"))
            if chance.random() < 0.1:
                frozen_until[name] = clock.now + 25.0
            if clock.now < frozen_until[name]:
                continue
            if chance.random() < 0.3:
                api.faults = [
                    ScriptedFault(chance.choice(("GET", "PUT")), "leases", 500, after_execution=chance.random() < 0.5)
                ]
            successes[name] += await replicas[name]._try_acquire_or_renew()
            if chance.random() < 0.02:
                await replicas[name].release()
            assert not (one.is_leading and two.is_leading)
    assert min(successes["one"], successes["two"]) > 5, "both replicas must have led, or this test proves nothing"
