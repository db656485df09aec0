"""The Lua scripts and the pure model are one rule: one property test drives both, on real servers.

Time is Redis TIME in the scripts and frozen in the model: leases are long, and a lease "ends" when the test says so,
on both sides at once.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from redis import Redis

from pipeline.broker import keys
from pipeline.broker.credit import Credit, Outgoing, gauges, heartbeat, raise_fence, reap, release
from pipeline.budget import Answer, Budget
from pipeline.errors import BudgetTooSmallError
from pipeline.handoff import Attempts
from pipeline.settings import BrokerSettings

BUDGET = 24
SETTINGS = BrokerSettings(budget_bytes=BUDGET, payload_ttl_s=3600)
ATTEMPTS = Attempts(1, 1)
IDS = [f"{n:032x}" for n in range(1, 5)]
HANDOFFS = st.sampled_from(IDS)
NOW, ENDED = 1000.0, 1.0


class Lockstep(RuleBasedStateMachine):
    """Every rule does the same to both sides; the invariants compare everything that can be seen."""

    client: Redis

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.model = Budget(BUDGET, lease_ms=1e9)
        self.scripts = {handoff: Credit(self.client, handoff, ATTEMPTS, SETTINGS) for handoff in IDS}
        for handoff in IDS:
            raise_fence(self.client, handoff, ATTEMPTS, SETTINGS)

    def teardown(self) -> None:
        for credit in self.scripts.values():
            credit.link.close()

    @rule(handoff=HANDOFFS, sequence=st.integers(0, 9), size=st.sampled_from([1, 4, 6, 8, 9, BUDGET + 1]))
    def reserve(self, handoff: str, sequence: int, size: int) -> None:
        expected = self.model.reserve(handoff, str(sequence), size, NOW)
        if expected is Answer.REFUSED:
            with pytest.raises(BudgetTooSmallError):
                self.scripts[handoff].reserve(sequence, size)
        else:
            assert self.scripts[handoff].reserve(sequence, size) is (expected is Answer.GRANTED)

    @rule(handoff=HANDOFFS, first=st.integers(0, 7), count=st.integers(1, 4), size=st.sampled_from([1, 4, 6]))
    def reserve_several(self, handoff: str, first: int, count: int, size: int) -> None:
        """One call for several is as many calls for one, up to the first that must wait."""
        granted = 0
        while granted < count and self.model.reserve(handoff, str(first + granted), size, NOW) is Answer.GRANTED:
            granted += 1
        _, grant = self.scripts[handoff].exchange([], range(first, first + count), size)
        assert grant == (granted, None if granted == count else Answer.WAIT)

    @rule(sequence=st.integers(0, 9), size=st.sampled_from([4, 6, 8]))
    def everybody_reserves(self, sequence: int, size: int) -> None:
        """Fills the budget and the line, so that the rules of waiting are met in most runs."""
        for handoff in IDS:
            self.reserve(handoff, sequence, size)

    @rule()
    def whoever_was_woken_asks_again(self) -> None:
        for handoff in sorted(self.model.woken):
            self.look_at_wake(handoff)
            if wait := self.model.waits.get(handoff):
                self.reserve(handoff, 9, wait.size)

    @rule(handoff=HANDOFFS, shrink=st.integers(0, 4), choose=st.randoms(use_true_random=False))
    def send(self, handoff: str, shrink: int, choose: random.Random) -> None:
        """Headers go up in sequence; a credit below the last one sent is a lost reply asked again."""
        held = self.model.credits.get(handoff)
        if not held:
            return
        sequence = choose.choice(sorted(held))
        size = max(1, held[sequence] - shrink)
        info = self.client.xinfo_stream(self._names(handoff).stream) if self._has_stream(handoff) else None
        already = info is not None and int(info["last-generated-id"].split(b"-")[1]) >= int(sequence)
        frame = Outgoing(int(sequence), b"header", bytes(size), anywhere=True)
        assert self.scripts[handoff].exchange([frame], [], 0)[0] == (1, None)
        if not already:
            self.model.true_up(handoff, sequence, size, NOW)

    @rule(handoff=HANDOFFS, choose=st.randoms(use_true_random=False))
    def give_back(self, handoff: str, choose: random.Random) -> None:
        """Mostly what is held, at times what is not."""
        sequence = int(choose.choice([*sorted(self.model.credits.get(handoff, {})), "5"]))
        self.model.release(handoff, str(sequence), NOW)
        self.scripts[handoff].give_back([sequence])
        assert not self.client.exists(self.scripts[handoff].payload_key(sequence))

    @rule(handoff=HANDOFFS, first=st.integers(0, 7), count=st.integers(2, 4))
    def give_back_several(self, handoff: str, first: int, count: int) -> None:
        """One step for several, one of them named twice, is as many steps for one."""
        sequences = [*range(first, first + count), first]
        for sequence in sequences:
            self.model.release(handoff, str(sequence), NOW)
        self.scripts[handoff].give_back(sequences)

    @rule(
        handoff=HANDOFFS, what=st.sampled_from(["close", "newer_attempt", "waiter_dies", "lease_ends", "beat", "reap"])
    )
    def something_rare(self, handoff: str, what: str) -> None:
        getattr(self, what)(handoff)

    def close(self, handoff: str) -> None:
        self.model.close(handoff, NOW)
        release(self.client, handoff)
        assert self.client.keys(f"cf:{{{handoff}}}:*") == []
        raise_fence(self.client, handoff, self.scripts[handoff].attempts, SETTINGS)

    def newer_attempt(self, handoff: str) -> None:
        old = self.scripts[handoff].attempts
        self.model.close(handoff, NOW)
        raise_fence(self.client, handoff, Attempts(old.prefill + 1, old.decode), SETTINGS)
        self.scripts[handoff].link.close()
        self.scripts[handoff] = Credit(self.client, handoff, Attempts(old.prefill + 1, old.decode), SETTINGS)

    @rule(handoff=HANDOFFS)
    def look_at_wake(self, handoff: str) -> None:
        woken = self.client.lpop(self._names(handoff).wake) is not None
        assert woken == (handoff in self.model.woken)
        self.model.woken.discard(handoff)

    def waiter_dies(self, handoff: str) -> None:
        if (wait := self.model.waits.get(handoff)) and wait.arrival is not None:
            self.model.waits[handoff] = wait._replace(lease_ms=ENDED)
        self.client.zadd(keys.BUDGET_WAITER_LEASES, {handoff: ENDED}, xx=True)

    def lease_ends(self, handoff: str) -> None:
        if handoff in self.model.leases:
            self.model.leases[handoff] = ENDED
        self.client.zadd(keys.BUDGET_LEASES, {handoff: ENDED}, xx=True)

    def beat(self, handoff: str) -> None:
        self.model.heartbeat(handoff, NOW)
        assert heartbeat(self.client, [handoff], SETTINGS) == [handoff in self.model.leases]

    def reap(self, _: str) -> None:
        dead = self.model.reap(NOW)
        assert reap(self.client) == dead
        for handoff in dead:
            raise_fence(self.client, handoff, self.scripts[handoff].attempts, SETTINGS)

    @invariant()
    def both_say_the_same(self) -> None:
        model = self.model
        held = {handoff: model.held(handoff) for handoff in model.credits}
        names = [self._names(handoff) for handoff in IDS]
        with self.client.pipeline(transaction=False) as pipe:
            pipe.get(keys.BUDGET_TOTAL)
            pipe.hgetall(keys.BUDGET_HELD)
            pipe.zrange(keys.BUDGET_WAITERS, 0, -1)
            pipe.hkeys(keys.BUDGET_WANTS)
            pipe.zrange(keys.BUDGET_LEASES, 0, -1)
            for name in names:
                pipe.exists(name.wake)
                pipe.hgetall(name.credits)
            total, in_flight, line, wants, leases, *rest = pipe.execute()
        assert 0 <= int(total or 0) <= BUDGET
        assert int(total or 0) == model.total
        assert {handoff.decode(): int(size) for handoff, size in in_flight.items()} == held
        assert [handoff.decode() for handoff in line] == model.queue()
        assert {handoff.decode() for handoff in wants} == set(model.waits)
        assert {handoff.decode() for handoff in leases} == set(model.leases)
        assert {handoff for handoff, exists in zip(IDS, rest[::2], strict=True) if exists} == model.woken
        for handoff, stored in zip(IDS, rest[1::2], strict=True):
            found = {name.decode().rsplit(".")[-1]: int(size) for name, size in stored.items()}
            assert found == model.credits.get(handoff, {})

    def _names(self, handoff: str) -> keys.HandoffKeys:
        return self.scripts[handoff].names

    def _has_stream(self, handoff: str) -> bool:
        return bool(self.client.exists(self._names(handoff).stream))


def test_model_and_scripts_in_lockstep(redis_client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    # wake tokens expire with the waiter's lease, which runs on the server's clock: here it must not
    monkeypatch.setattr("pipeline.broker.credit.WAITER_LEASE_MS", 3_600_000)
    machine = type("LockstepHere", (Lockstep,), {"client": redis_client})
    effort = settings(max_examples=40, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(machine, settings=effort)


def test_large_budgets_stay_exact(redis_client: Redis) -> None:
    """Lua prints numbers above 10^14 in scientific notation unless told otherwise."""
    terabytes = BrokerSettings(budget_bytes=10**16)
    credit = Credit(redis_client, IDS[0], ATTEMPTS, terabytes)
    raise_fence(redis_client, IDS[0], ATTEMPTS, terabytes)
    assert credit.reserve(0, 10**15 + 1)
    assert gauges(redis_client).in_flight_bytes == 10**15 + 1
    credit.give_back([0])
    assert gauges(redis_client) == (0, 0, 0)


@pytest.mark.parametrize("way", ["release", "reap", "fence"])
def test_whoever_waits_wakes_when_a_handoff_ends(redis_client: Redis, way: str) -> None:
    holder, waiter = (Credit(redis_client, handoff, ATTEMPTS, SETTINGS) for handoff in IDS[:2])
    for handoff in IDS[:2]:
        raise_fence(redis_client, handoff, ATTEMPTS, SETTINGS)
    assert holder.reserve(0, BUDGET)
    assert not waiter.reserve(0, 1)
    assert not redis_client.exists(waiter.names.wake)
    if way == "release":
        release(redis_client, IDS[0])
    elif way == "fence":
        raise_fence(redis_client, IDS[0], Attempts(2, 1), SETTINGS)
    else:
        redis_client.zadd(keys.BUDGET_LEASES, {IDS[0]: ENDED}, xx=True)
        assert reap(redis_client) == [IDS[0]]
    assert redis_client.lrange(waiter.names.wake, 0, -1) == [b"1"]
    assert waiter.reserve(0, 1)
