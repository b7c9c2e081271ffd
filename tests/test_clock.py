"""DynamoDB's clock decides, whatever the machine's own clocks say."""

import contextlib
import itertools
import time

import pytest
from faults import after, dated, slow, undated

from simplelock import LockHeld, LockTable

HOURS_OFF = [-3600, 3600]


@pytest.fixture(autouse=True)
def _time_is_frozen(clock):
    """Let time pass only where a test says so."""


@pytest.fixture
def another(locks, client):
    """Make a view of the table that a process on another machine has."""
    return lambda **options: LockTable(locks.name, client=client, **options)


def assert_runs_for(ttl, lease, stored):
    """The item expires at ttl from now, rounded up; the lease is held until just before that."""
    expires_at = int(stored(lease.key)["ExpiresAt"]["N"])
    assert expires_at == lease.expires_at
    assert 0 <= expires_at - (time.time() + ttl) <= 4
    assert ttl - 1 < lease.remaining <= ttl


@pytest.mark.parametrize("wall", HOURS_OFF)
@pytest.mark.parametrize("known", [False, True])
def test_wall_clock_off_does_not_take_a_live_lock(known, wall, clock, host, locks, rival, stored):
    """Field case 25: until the very moment of its expiry a lock is its holder's."""
    lease = locks.acquire("a", ttl=60)
    with host.off(wall):
        if known:
            rival.holder("other")
        assert rival.try_acquire("a") is None
        clock.tick(lease.expires_at - time.time())
        assert rival.try_acquire("a") is None
        with pytest.raises(LockHeld):
            rival.acquire("a", ttl=1)
    assert stored()["OwnerID"]["S"] == lease.owner


@pytest.mark.parametrize("wall", HOURS_OFF)
@pytest.mark.parametrize("known", [False, True])
def test_wall_clock_off_takes_a_free_lock_for_its_ttl(known, wall, host, locks, stored, sent):
    """Field case 25: the item does not expire an hour early or late."""
    host.set(wall=wall)
    if known:
        locks.holder("other")
    sent.clear()
    lease = locks.try_acquire("a", ttl=60)
    assert sent == ["UpdateItem"] * (1 if known else 2)
    assert_runs_for(60, lease, stored)


@pytest.mark.parametrize("wall", HOURS_OFF)
@pytest.mark.parametrize("known", [False, True])
def test_wall_clock_off_takes_a_dead_holders_lock(known, wall, clock, host, locks, rival, stored):
    """Field case 25: an expired lock is free on the first try."""
    locks.acquire("a", ttl=60)
    clock.tick(65)
    host.set(wall=wall)
    if known:
        rival.holder("other")
    lease = rival.try_acquire("a", ttl=60)
    assert_runs_for(60, lease, stored)


@pytest.mark.parametrize("wall", HOURS_OFF)
def test_holder_whose_wall_clock_is_off_keeps_its_lease(wall, clock, host, locks, rival, stored):
    """Field case 25: to the others its lock is held for as long as to itself."""
    host.set(wall=wall)
    lease = locks.acquire("a", ttl=60)
    clock.tick(30)
    lease.renew()
    assert_runs_for(60, lease, stored)
    clock.tick(59)
    assert lease.held
    with host.off(0):
        assert rival.try_acquire("a") is None
    clock.tick(5)
    assert not lease.held
    with host.off(0):
        assert rival.try_acquire("a")


def test_lock_taken_before_its_expiry_was_put_right_is_held(clock, host, locks, rival, meets):
    """Between the two writes of a wrong wall clock's first lock another may come: it is theirs."""
    others = []

    def come():
        with host.off(0):
            others.append(rival.acquire("a"))

    host.set(wall=-3600)
    meets("UpdateItem", [None, after(come)])
    assert locks.try_acquire("a") is None
    assert others[0].held
    assert locks.holder("a").owner == others[0].owner


@pytest.mark.parametrize("seconds", [2, 10])
def test_slow_first_reply_is_put_right(seconds, locks, another, meets, stored):
    """What a reply took is not known to be the way there, so the expiry may be short."""
    meets("UpdateItem", [slow(seconds)])
    lease = another().acquire("a", ttl=60)
    assert time.time() + lease.remaining < lease.expires_at
    assert_runs_for(60, lease, stored)


def test_replies_that_are_all_slow_cost_one_more_request(locks, meets, sent):
    """An expiry is put right once: what then is short of the ttl is not held, and not asked for again and again."""
    meets("UpdateItem", itertools.repeat(slow(10)))
    sent.clear()
    assert 49 < locks.acquire("a", ttl=60).remaining <= 50
    assert sent == ["UpdateItem"] * 2


def test_no_thread_goes_by_the_wall_clock_while_another_learns_the_time(host, locks, rival, monkeypatch):
    """Until what a first reply has shown is there as a whole, nothing is known."""
    rival.acquire("live", ttl=60)
    host.set(wall=3600)
    tries = []

    class Reading(float):
        """Of the monotonic clock; in the midst of its first use, it is the other thread's turn."""

        def __radd__(self, other):
            if not tries:
                tries.append("begun")
                tries.append(locks.try_acquire("live"))
            return other + float(self)

    monkeypatch.setattr(host, "monotonic", lambda: Reading(time.monotonic()))
    assert locks.holder("live")
    assert tries == ["begun", None]


def test_slow_reply_does_not_unlearn_what_quick_ones_have_shown(locks, rival, meets, sent):
    """It would leave ten seconds of doubt, and a dead holder's lock would cost a second request."""
    locks.holder("other")
    rival.acquire("a", ttl=3)
    meets("GetItem", [slow(10)])
    locks.holder("other")
    sent.clear()
    assert locks.try_acquire("a")
    assert sent == ["UpdateItem"]


@pytest.mark.parametrize("set_by", [-7200, -30, 30, 7200])
def test_deadline_stands_when_the_wall_clock_is_set(set_by, clock, host, locks, rival, stored):
    """Set back, the monotonic clock ends the lease; set forward, it may end too early, not late."""
    lease = locks.acquire("a", ttl=60)
    host.set(wall=set_by)
    assert lease.held == (set_by < 60)
    clock.tick(62)
    assert not lease.held
    lease.renew()
    assert_runs_for(60, lease, stored)
    assert locks.try_acquire("a") is None
    assert_runs_for(45, locks.acquire("b", ttl=45), stored)


def test_lease_is_over_when_the_machine_was_suspended_during_its_request(host, locks, rival, meets, stored):
    """A reply that waited for the machine to wake up shows a time long gone."""
    meets("UpdateItem", [slow(7200, pause=host.suspend)])
    lease = locks.acquire("a", ttl=60)
    assert not lease.held
    assert rival.try_acquire("a")
    assert locks.try_acquire("a") is None
    assert_runs_for(60, locks.acquire("b", ttl=60), stored)


@pytest.mark.parametrize("seconds", [3, 100, 7200])
def test_suspended_machine_knows_the_time_again(seconds, clock, host, locks, rival, another, stored):
    """After a suspension a live lock is not stolen, a dead one taken, and an expiry is right."""
    locks.holder("other")
    another().acquire("dead", ttl=1)
    host.suspend(seconds)
    assert rival.try_acquire("live", ttl=10)
    assert locks.try_acquire("live") is None
    assert_runs_for(60, locks.acquire("free", ttl=60), stored)
    clock.tick(5)
    assert_runs_for(60, locks.try_acquire("dead", ttl=60), stored)
    assert locks.try_acquire("live") is None
    clock.tick(8)
    assert locks.try_acquire("live")


def test_first_lock_after_a_suspension_has_its_ttl(host, locks, rival, stored):
    """The first request after it needs no other one to have shown the time."""
    locks.holder("other")
    host.suspend(7200)
    lease = locks.try_acquire("a", ttl=60)
    assert_runs_for(60, lease, stored)
    assert rival.try_acquire("a") is None


def test_token_after_a_suspension_is_higher(clock, host, locks, another, client):
    """A count that starts again starts from DynamoDB's time, not from before the suspension."""
    sleeper, others = another(fencing=True), another(fencing=True)
    sleeper.acquire("a").release()
    host.suspend(2 * 3600)
    lease = others.acquire("a")
    lease.release()
    host.suspend(2 * 3600)
    client.delete_item(TableName="Locks", Key={"LockID": {"S": "a"}})  # as TTL does to a tombstone
    assert sleeper.acquire("a").fencing_token > lease.fencing_token


@pytest.mark.parametrize("drift", [-100e-6, 100e-6])
def test_clocks_that_drifted_apart_do_not_take_a_live_lock(drift, clock, host, locks, rival, another, stored):
    """After a day of idle time the bounds of DynamoDB's time are wider, not wrong."""
    locks.holder("other")
    host.idle(86400, drift=drift)
    lease = another().acquire("a", ttl=1)
    assert locks.try_acquire("a") is None
    assert stored()["OwnerID"]["S"] == lease.owner
    assert_runs_for(60, locks.acquire("free", ttl=60), stored)


@pytest.mark.parametrize("drift", [-100e-6, 100e-6])
def test_first_lock_after_clocks_drifted_apart_has_its_ttl(drift, host, locks, stored):
    """After a day of idle time an expiry is as right as ever."""
    locks.holder("other")
    host.idle(86400, drift=drift)
    assert_runs_for(60, locks.try_acquire("free", ttl=60), stored)


@pytest.mark.parametrize("drift", [-100e-6, 100e-6])
def test_lease_with_drifting_clocks_is_over_before_another_has_the_lock(drift, clock, host, locks, another):
    """However long a lease, what its clocks may go wrong meanwhile is taken off."""
    lease = locks.acquire("a", ttl=86400)
    host.idle(86400 - 10, drift=drift)
    others = another()
    while not others.try_acquire("a"):
        clock.tick(0.5)
    assert not lease.held


NO_DATES = ["", "soon", "Thu, 01 Foo", "Thu, 01 Jan 20260 00:00:00 GMT", f"Thu, 01 Jan {10**20} 00:00:00 GMT"]


@pytest.mark.parametrize("dateless", [undated, *map(dated, NO_DATES)])
def test_without_a_date_the_wall_clock_stands_in(dateless, clock, locks, another, meets, stored):
    """A proxy may strip it: with right wall clocks everything goes on as before."""
    for operation in ("UpdateItem", "DeleteItem"):
        meets(operation, itertools.repeat(dateless))
    lease, others = another().acquire("a", ttl=10), another()
    assert 0 <= lease.expires_at - (time.time() + 10) <= 4
    assert 9 < lease.remaining <= 10
    assert others.try_acquire("a") is None
    clock.tick(9)
    lease.renew()
    assert 9 < lease.remaining <= 10
    assert 0 <= lease.expires_at - (time.time() + 10) < 1
    clock.tick(lease.expires_at - time.time())
    assert others.try_acquire("a") is None
    assert not lease.held
    clock.tick(1)
    assert others.try_acquire("a").release() is True
    assert stored() is None


@pytest.mark.parametrize("gap", ["nothing", "suspension", "drift"])
def test_dates_that_stop_coming_do_not_free_a_live_lock(gap, host, clock, locks, rival, meets):
    """What earlier dates showed is no better than the wall clock once the machine has slept."""
    locks.holder("other")
    {
        "nothing": lambda: clock.tick(5),
        "suspension": lambda: host.suspend(7200),
        "drift": lambda: host.idle(86400, drift=-100e-6),
    }[gap]()
    meets("UpdateItem", itertools.repeat(undated))
    with contextlib.suppress(LockHeld):
        lease = locks.acquire("a", ttl=5)
        clock.tick(4)
        meets("UpdateItem", [])
        other = rival.try_acquire("a")
        assert not (other and lease.held)
