"""Renewing and resuming: one write that only moves on what is ours."""

import itertools
import time

import pytest
from botocore.exceptions import ReadTimeoutError
from faults import after, deliver, failed, held_back, lost

from simplelock import LockLost, LockTable


def test_renewal_runs_from_now(clock, locks, stored):
    """Field case 10: a lease of 10 that is renewed after 3 runs until 13, not 20."""
    start = time.time()
    lease = locks.acquire("a", ttl=10)
    clock.tick(3)
    lease.renew()
    assert lease.remaining == pytest.approx(10, abs=0.1)
    assert 13 < lease.expires_at - start < 17
    assert stored()["ExpiresAt"]["N"] == str(lease.expires_at)


def test_renewal_sends_one_request(locks, sent):
    """A renewal that is granted is the whole answer."""
    lease = locks.acquire("a")
    sent.clear()
    lease.renew()
    assert sent == ["UpdateItem"]


def test_renewal_changes_nothing_but_the_expiry(clock, locks, stored):
    """Owner and note stay as they are."""
    lease = locks.acquire("a", data="note")
    before = stored()
    clock.tick(5)
    lease.renew()
    assert stored() == {**before, "ExpiresAt": {"N": str(lease.expires_at)}}
    assert lease.expires_at > int(before["ExpiresAt"]["N"])


def test_ttl_of_a_renewal_counts_for_later_ones(clock, locks):
    """A lease keeps the ttl that it was last renewed for."""
    lease = locks.acquire("a", ttl=10)
    lease.renew(ttl=100)
    assert lease.remaining == pytest.approx(100, abs=0.1)
    clock.tick(50)
    lease.renew()
    assert lease.remaining == pytest.approx(100, abs=0.1)


def test_expired_lease_can_be_renewed_while_nobody_took_it(clock, locks, rival):
    """The owner condition proves that the lock was nobody else's in between."""
    lease = locks.acquire("a", ttl=10)
    clock.tick(1000)
    assert not lease.held
    lease.renew()
    assert lease.held
    assert rival.try_acquire("a") is None


@pytest.mark.parametrize("ttl", [5, 60])
def test_lease_that_was_taken_is_lost(ttl, clock, locks, rival, stored):
    """Refused, the item is another's, be it for less or for more than ours: lost to that holder, whose item stays."""
    lease = locks.acquire("a", ttl=10)
    clock.tick(20)
    other = rival.acquire("a", ttl=ttl)
    before = stored()
    with pytest.raises(LockLost) as caught:
        lease.renew()
    assert (caught.value.key, caught.value.owner) == ("a", lease.owner)
    assert other.owner in caught.value.reason
    assert "'a'" in str(caught.value)
    assert stored() == before
    assert not lease.held


def test_lease_that_was_lost_stays_lost(clock, locks, rival, sent):
    """Once it was another's, a lease is over, even if the lock is free again."""
    lease = locks.acquire("a", ttl=10)
    clock.tick(20)
    other = rival.acquire("a")
    with pytest.raises(LockLost):
        lease.renew()
    other.release()
    sent.clear()
    for verb in (lease.renew, lease.check):
        with pytest.raises(LockLost):
            verb()
    assert sent == []


def test_lease_whose_item_was_deleted_is_lost(locks, client, stored):
    """Field case 22: refused, no item: lost, and nothing is created again."""
    lease = locks.acquire("a")
    client.delete_item(TableName="Locks", Key={"LockID": {"S": "a"}})
    with pytest.raises(LockLost, match="gone"):
        lease.renew()
    assert stored() is None
    assert not lease.held


def test_released_lease_cannot_be_renewed(locks, sent):
    """A renewal after the release could only bring the lock back."""
    lease = locks.acquire("a")
    lease.release()
    sent.clear()
    with pytest.raises(LockLost, match="released"):
        lease.renew()
    assert sent == []


def test_renewal_for_less_shortens_the_lease_and_its_item(clock, locks, rival, stored):
    """Refused, the item is ours: shortened by a second write that names the expiry it replaces."""
    lease = locks.acquire("a", ttl=1000)
    lease.renew(ttl=5)
    assert lease.remaining <= 5
    assert int(stored()["ExpiresAt"]["N"]) == lease.expires_at <= time.time() + 9
    clock.tick(10)
    assert rival.try_acquire("a")


def test_deadline_is_lowered_before_the_item_is_shortened(locks, meets):
    """Whatever comes of the write, nobody else can take the lock while we count on it."""
    lease = locks.acquire("a", ttl=1000)
    seen = []
    meets("UpdateItem", [None, after(lambda: seen.append(lease.remaining))])
    lease.renew(ttl=5)
    assert len(seen) == 1
    assert seen[0] <= 5


@pytest.mark.parametrize("fault", [lost, failed])
def test_shortening_whose_reply_is_lost_is_done(fault, clock, locks, meets, stored):
    """Sent again, it does not find the expiry that it names, but finds its own instead."""
    lease = locks.acquire("a", ttl=1000)
    meets("UpdateItem", [None, fault])
    lease.renew(ttl=5)
    assert 3 < lease.remaining <= 5
    assert int(stored()["ExpiresAt"]["N"]) == lease.expires_at <= time.time() + 9


def test_lease_that_another_process_renewed_for_longer_is_ours(locks, rival, stored):
    """Refused, the item is ours: it is held, for as long as was asked and no longer."""
    lease = locks.acquire("a", ttl=10)
    rival.resume("a", lease.owner, ttl=1000)
    lease.renew()
    assert 9 < lease.remaining <= 10
    assert stored()["ExpiresAt"]["N"] == str(lease.expires_at)


def test_lease_can_be_resumed_elsewhere(clock, locks, rival, sent, stored):
    """By its key and its owner another process goes on with it, for one request."""
    first = locks.acquire("a", owner="worker", data="note")
    clock.tick(30)
    sent.clear()
    lease = rival.resume("a", first.owner)
    assert sent == ["UpdateItem"]
    assert (lease.key, lease.owner, lease.data) == ("a", first.owner, "note")
    assert 59 < lease.remaining <= 60
    assert stored()["ExpiresAt"]["N"] == str(lease.expires_at)
    assert lease.release() is True
    assert stored() is None


def test_resumed_lease_has_the_ttl_that_it_is_given(locks, client):
    """By default that is the ttl of the table through which it is resumed."""
    first = locks.acquire("a", ttl=10)
    assert 99 < locks.resume("a", first.owner, ttl=100).remaining <= 100
    assert 29 < LockTable("Locks", client=client, ttl=30).resume("a", first.owner).remaining <= 30


def test_only_the_whole_owner_resumes(locks, rival, stored):
    """Refused, the item is another's: a label without its nonce is another."""
    first = locks.acquire("a", owner="worker")
    before = stored()
    with pytest.raises(LockLost, match=first.owner):
        rival.resume("a", "worker")
    assert stored() == before


def test_lock_that_nobody_holds_cannot_be_resumed(locks, rival, stored):
    """Refused, no item: lost, and nothing is created."""
    owner = locks.acquire("a").owner
    rival.release("a", owner)
    with pytest.raises(LockLost):
        locks.resume("a", owner)
    assert stored() is None


def test_late_shortening_does_not_undercut_a_newer_renewal(clock, locks, rival, meets, stored):
    """Field case 40: it names the expiry that it replaces, and a renewal within the same second writes another."""
    late = []
    clock.tick(0.3)
    lease = locks.acquire("a", ttl=60)
    meets("UpdateItem", itertools.chain([None], itertools.repeat(held_back(late))))
    with pytest.raises(ReadTimeoutError):
        lease.renew(ttl=5)
    meets("UpdateItem", [])
    lease.renew(ttl=60)
    before = stored()
    for request in late:
        deliver(request)
    assert stored() == before
    clock.tick(10)
    assert lease.held
    assert rival.try_acquire("a") is None
