"""Machines with wrong clocks, crashes, lost replies and meddlers, held to a model of a lock, under driven time."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import boto3
import hypothesis
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from faults import bare, cut, deliver, dropped, failed, held_back, lost, slow, unavailable, unsent
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import engine
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from hypothesis.strategies import booleans, integers, none, sampled_from, tuples
from moto.core import DEFAULT_ACCOUNT_ID as ACCOUNT
from moto.dynamodb.models import dynamodb_backends
from moto.dynamodb.models.dynamo_type import DynamoType

from simplelock import Lease, LockError, LockHeld, LockLost, LockTable

from .engines import REGION

SEED = int(os.environ.get("RIG_SEED") or secrets.randbelow(2**32))
EXAMPLES, STEPS = 80, 100
RETRIES = Config(retries={"mode": "standard", "total_max_attempts": 3})
NAMES, MACHINES = ("a", "b"), 3
HELD_BACK = "held back"
REAL_TIME = SimpleNamespace(perf_counter=time.perf_counter, monotonic=time.monotonic)
FAULTS = [lost, dropped, failed, cut, bare, slow(3), unsent, unavailable, *[HELD_BACK] * 6]
LATE_SECONDS = 300  # then a request's signature has expired

names, machines, picks = sampled_from(NAMES), integers(0, MACHINES - 1), integers(0, 9)
ttls = sampled_from([0.5, 5, 60])
walls = sampled_from([-3600, -20, 0, 20, 3600])
faults = none() | none() | tuples(sampled_from(FAULTS), booleans())  # of the first send, or of each


class Lock:
    """The model of a lock: what the table must have of it."""

    owner: str | None = None
    data: str | None = None
    expires_at = token = 0

    @property
    def expired(self) -> bool:
        """Whether there is an item that TTL may delete."""
        return 0 < self.expires_at < time.time()

    @property
    def free(self) -> bool:
        """Whether anybody can take it."""
        return not self.owner or self.expired

    def become(self, item: dict[str, Any] | None) -> None:
        """Be what the table has, where more than one outcome is right."""
        value = {name: next(iter(typed.values())) for name, typed in (item or {}).items()}
        self.owner, self.data = value.get("OwnerID"), value.get("LockData")
        self.expires_at, self.token = int(value.get("ExpiresAt", 0)), int(value.get("FencingToken", 0))

    def item(self, name: str) -> dict[str, Any] | None:
        """The item; None where there is none."""
        strings = {"LockID": name, "OwnerID": self.owner, "LockData": self.data}
        numbers = {"ExpiresAt": self.expires_at, "FencingToken": self.token}
        item = {k: {"S": v} for k, v in strings.items() if v} | {k: {"N": str(v)} for k, v in numbers.items() if v}
        return item if self.expires_at else None


class Holding:
    """A lease in somebody's hands, and what its holder was told of it."""

    def __init__(self, lease: Lease, machine: int) -> None:
        self.lease, self.machine = lease, machine
        self.over = self.robbed = False  # given back, or known to be lost; deleted by hand
        self.tried = self.released = self.ran = False  # its release was sent, was answered; it ran when first sent
        self.renewals = 0  # with each that shortens, a later one may end a second later, to another whole second


class Machines(RuleBasedStateMachine):
    """Some machines that share one table."""

    def __init__(self, clock: Any, host: Any, fencing: bool, seen: Counter[str]) -> None:
        super().__init__()
        self.clock, self.host, self.fencing, self.seen = clock, host, fencing, seen
        self.clock.move_to("2026-01-01 00:00:00")
        self.client = boto3.client("dynamodb", REGION, config=RETRIES)
        self.client.meta.events.register("before-send.dynamodb", self.meet)
        self.tables = [self.make_table() for _ in range(MACHINES)]
        self.walls = [0] * MACHINES
        self.locks = {name: Lock() for name in NAMES}
        self.tokens = dict.fromkeys(NAMES, 0)  # the highest ever given
        self.holdings: list[Holding] = []
        self.graves: list[tuple[str, str]] = []  # keys and owners of leases that nobody has any more
        self.late: list[Any] = []  # requests that were held back
        self.faulty = False  # whether there is one in the verb at hand
        self.coming: Iterator[Any] = iter(())
        for name in NAMES:
            self.delete_item(name)

    def teardown(self) -> None:
        self.client.close()

    # What it stands on.

    def meet(self, request: Any, **_: Any) -> Any:
        fault, reads = next(self.coming, None), b"GetItem" in request.headers["X-Amz-Target"]
        if reads and fault is bare:
            return None  # what it leaves out is left out of refusals
        if not reads and fault is HELD_BACK:
            return held_back(self.late)(request)
        return fault and (unsent if fault is HELD_BACK else fault)(request)

    def make_table(self) -> LockTable:
        return LockTable("Locks", client=self.client, fencing=self.fencing)

    def read_item(self, name: str) -> Any:
        """The item, past all requests, of which there would be too many."""
        table = dynamodb_backends[ACCOUNT][REGION].tables["Locks"]
        item = table.get_item(DynamoType({"S": name}))
        return item and item.to_json()["Attributes"]

    def delete_item(self, name: str) -> None:
        self.client.delete_item(TableName="Locks", Key={"LockID": {"S": name}})

    def call(self, machine: int, fault: Any, name: str, verb: Callable[[], Any]) -> Any:
        """What the verb returned, or its error: one of ours, or what became of a fault."""
        self.host.set(wall=self.walls[machine])
        self.faulty = fault is not None
        if fault:
            self.coming = itertools.repeat(fault[0]) if fault[1] else iter([fault[0]])
        try:
            result = verb()
        except (LockHeld, LockLost) as error:
            result = error
        except (ClientError, BotoCoreError, LockError) as error:
            assert fault, "there was no reason to fail"
            result = error
        finally:
            self.coming = iter(())
        known = isinstance(result, Lease | LockHeld | LockLost | None)
        word = result if isinstance(result, bool) else type(result).__name__ if known else "failed"
        self.seen[f"{name} {word}"] += 1
        return result

    def changed(self, name: str, *, to: Callable[[Lock], bool], allowed: bool) -> None:
        """A verb that failed was applied or was not; if it was, the lock must have become like this."""
        lock, item, after = self.locks[name], self.read_item(name), Lock()
        if item != lock.item(name):
            after.become(item)
            assert allowed
            assert to(after)
            self.locks[name] = after
            self.tokens[name] = max(self.tokens[name], after.token)

    def starts(self, lease: Lease, ttl: float, surplus: int = 0) -> None:
        """The lease runs from now on for its ttl, and so does the item, or a little longer."""
        self.locks[lease.key].expires_at = lease.expires_at
        if not self.faulty:
            assert ttl - 1 <= lease.expires_at - time.time() <= ttl + 5 + surplus

    # What machines do.

    @rule(machine=machines, fault=faults, name=names, ttl=ttls, data=none() | sampled_from(["note"]), raises=booleans())
    def acquire(self, machine: int, fault: Any, name: str, ttl: float, data: str | None, raises: bool) -> None:
        lock, table, options = self.locks[name], self.tables[machine], {"ttl": ttl, "data": data}
        sure = not lock.owner or lock.expires_at < math.floor(time.time())
        verb = table.acquire if raises else table.try_acquire
        result = self.call(machine, fault, "acquire", functools.partial(verb, name, **options))
        free = lock.free
        if isinstance(result, Lease):
            assert free
            lock.owner, lock.data, lock.token = result.owner, data, result.fencing_token or 0
            assert lock.token > self.tokens[name] or not self.fencing
            self.tokens[name] = lock.token
            self.starts(result, ttl)
            self.holdings.append(Holding(result, machine))
        elif result is None or isinstance(result, LockHeld):
            assert not sure
            assert isinstance(result, LockHeld) is raises
            assert not raises or result.holder.owner == lock.owner
        else:
            self.changed(name, to=lambda after: after.owner is None, allowed=free)

    @precondition(lambda self: self.holdings)
    @rule(pick=picks, fault=faults, ttl=ttls)
    def renew(self, pick: int, fault: Any, ttl: float) -> None:
        holding = self.holdings[pick % len(self.holdings)]
        lease, lock = holding.lease, self.locks[holding.lease.key]
        ours = lock.owner == lease.owner and not holding.over
        result = self.call(holding.machine, fault, "renew", lambda: lease.renew(ttl))
        holding.renewals += 1
        if result is None:
            assert ours
            self.starts(lease, ttl, holding.renewals)
        elif isinstance(result, LockLost):
            assert not ours
            holding.over = True
        else:
            self.changed(lease.key, to=lambda after: after.owner == lease.owner, allowed=ours)

    @precondition(lambda self: self.holdings)
    @rule(pick=picks, fault=faults)
    def release(self, pick: int, fault: Any) -> None:
        holding = self.holdings[pick % len(self.holdings)]
        lease, name = holding.lease, holding.lease.key
        again, ours = holding.tried, self.locks[name].owner == lease.owner
        if not again:
            self.host.set(wall=self.walls[holding.machine])
            holding.tried, holding.ran = True, lease.held
        result = self.call(holding.machine, fault, "release", lease.release)
        holding.over = True
        if result is True:
            assert not holding.released
            assert ours or (holding.ran and (again or self.faulty))
        elif result is False:
            assert holding.released or not (holding.ran and again)
            assert holding.released or not ours or (self.faulty and not holding.ran)  # lost, and not sure to be ours
        if holding.released:
            ours = False
            self.holdings.remove(holding)  # there is no more to learn from it
        holding.released |= isinstance(result, bool)
        self.changed(name, to=lambda after: after.owner is None, allowed=ours)
        assert result is not True or self.locks[name].owner != lease.owner

    @precondition(lambda self: self.holdings or self.graves)
    @rule(machine=machines, fault=faults, pick=picks, ttl=ttls)
    def resume(self, machine: int, fault: Any, pick: int, ttl: float) -> None:
        found = [(h.lease.key, h.lease.owner) for h in self.holdings if not h.over] + self.graves
        if not found:
            return
        name, owner = found[pick % len(found)]
        lock = self.locks[name]
        self.bury(owner)  # two may not go on with one lease
        result = self.call(machine, fault, "resume", lambda: self.tables[machine].resume(name, owner, ttl=ttl))
        if isinstance(result, Lease):
            assert (lock.owner, lock.token, lock.data) == (owner, result.fencing_token or 0, result.data)
            self.starts(result, ttl)
            self.graves.remove((name, owner))
            self.holdings.append(Holding(result, machine))
        elif isinstance(result, LockLost):
            assert lock.owner != owner
        else:
            self.changed(name, to=lambda after: after.owner == owner, allowed=lock.owner == owner)

    @rule(machine=machines)
    def crash(self, machine: int) -> None:
        for holding in [holding for holding in self.holdings if holding.machine == machine]:
            self.bury(holding.lease.owner)
        self.tables[machine] = self.make_table()

    def bury(self, owner: str) -> None:
        dead = [holding for holding in self.holdings if holding.lease.owner == owner]
        self.holdings = [holding for holding in self.holdings if holding not in dead]
        self.graves += [(holding.lease.key, owner) for holding in dead if not holding.over]

    # What happens to them.

    @rule(seconds=sampled_from([0.01, 0.4, 1, 3, 6, 30, 61, 4000]))
    def tick(self, seconds: float) -> None:
        self.clock.tick(seconds)
        if seconds > LATE_SECONDS:
            self.late.clear()

    @rule(machine=machines, wall=walls)
    def set_clock(self, machine: int, wall: int) -> None:
        self.walls[machine] = wall

    @precondition(lambda self: any(lock.expired for lock in self.locks.values()))
    @rule()
    def sweep(self) -> None:
        for name in [name for name, lock in self.locks.items() if lock.expired]:
            self.delete_item(name)
            self.locks[name] = Lock()
            self.seen["swept"] += 1
        # TTL takes longer than a request can be late; else a late acquisition could bring an older fencing token.
        self.late = [request for request in self.late if b":now" not in request.body]

    @precondition(lambda self: any(lock.owner for lock in self.locks.values()))
    @rule(name=names)
    def delete_by_hand(self, name: str) -> None:
        for holding in self.holdings:
            holding.robbed |= holding.lease.owner == self.locks[name].owner
        self.delete_item(name)
        self.locks[name], self.tokens[name] = Lock(), 0

    @precondition(lambda self: self.late)
    @rule(pick=picks)
    def land(self, pick: int) -> None:
        request = self.late.pop(pick % len(self.late))
        body = json.loads(request.body)
        name, values = body["Key"]["LockID"]["S"], body["ExpressionAttributeValues"]
        lock, owner = self.locks[name], values[":owner"]["S"]
        before = lock.item(name)
        deliver(request)
        if ":now" in values:
            free = lock.free
            self.changed(name, to=lambda after: after.owner == owner, allowed=free)
        else:
            least = 0 if ":seen" in values else lock.expires_at  # a renewal that names what it replaces shortens
            self.changed(
                name,
                to=lambda after: after.owner is None or (after.owner == owner and after.expires_at >= least),
                allowed=lock.owner == owner,
            )
        self.seen["landed"] += self.locks[name].item(name) != before

    # What is always so.

    @invariant()
    def table_agrees(self) -> None:
        for name, lock in self.locks.items():
            assert self.read_item(name) == lock.item(name)

    @invariant()
    def who_is_sure_to_hold_a_lock_does(self) -> None:
        for holding in self.holdings:
            self.host.set(wall=self.walls[holding.machine])
            lease, lock, remaining = holding.lease, self.locks[holding.lease.key], holding.lease.remaining
            assert not (remaining and holding.over)
            if remaining and not holding.robbed:
                assert lock.owner == lease.owner
                assert lock.expires_at > time.time() + remaining - 0.001


@pytest.mark.parametrize("fencing", [False, True])
def test_machines_obey_the_model(
    fencing: bool, client: Any, clock: Any, host: Any, make_table: Any, monkeypatch: Any
) -> None:
    """One holder at most, who knows it; the table is as the model; nothing of another's is changed; tokens grow."""
    print(f"RIG_SEED={SEED}")
    make_table()
    monkeypatch.setattr(engine, "time", REAL_TIME)  # for its limits
    monkeypatch.setattr(engine, "MAX_SHRINKING_SECONDS", 60)
    seen: Counter[str] = Counter()

    @hypothesis.seed(SEED)
    def machines() -> Machines:
        return Machines(clock, host, fencing, seen)

    limits = {"max_examples": EXAMPLES, "stateful_step_count": STEPS, "deadline": None, "database": None}
    phases = [Phase.generate, Phase.shrink]  # explaining takes minutes
    run_state_machine_as_test(machines, settings=settings(**limits, phases=phases, suppress_health_check=HealthCheck))
    print(seen)
    told = {
        "acquire": ["Lease", "LockHeld", "NoneType", "failed"],
        "renew": ["NoneType", "LockLost"],
        "release": ["True", "False"],
        "resume": ["Lease", "LockLost"],
    }
    outcomes = {f"{verb} {outcome}" for verb, outcomes in told.items() for outcome in outcomes}
    assert outcomes <= seen.keys(), "too few examples"
