"""Replies that come late, cut short or not at all, after the request was applied."""

import itertools
import time

import pytest
from botocore.exceptions import ReadTimeoutError
from faults import after, bare, cut, deliver, dropped, failed, held_back, lost, slow, unavailable

from simplelock import LockHeld, LockLost

LOST = [lost, dropped, failed]


@pytest.fixture(autouse=True)
def _retries_take_no_time(clock):
    """Let the SDK's pauses between two sends pass at once."""


@pytest.mark.parametrize("fault", LOST)
def test_acquisition_whose_reply_is_lost_is_granted(fault, locks, meets, sent):
    """Field case 12: refused when sent again, and the item is ours: we acquired it."""
    sent.clear()
    meets("UpdateItem", [fault])
    lease = locks.try_acquire("a", data="note")
    assert sent == ["UpdateItem", "UpdateItem"]
    assert lease.held
    holder = locks.holder("a")
    assert (holder.owner, holder.data) == (lease.owner, "note")
    assert holder.expires_at == lease.expires_at


def test_takeover_whose_reply_is_lost_is_granted(clock, locks, rival, meets):
    """Field case 12: the same where the former holder's item was overwritten."""
    locks.acquire("a", ttl=5)
    rival.holder("a")
    clock.tick(10)
    meets("UpdateItem", [lost])
    lease = rival.try_acquire("a")
    assert lease.held
    assert lease.release() is True


def test_acquisition_whose_refusal_is_lost_is_refused(locks, rival, meets):
    """Refused when sent again, and the item is another's: nobody acquired anything."""
    lease = locks.acquire("a")
    meets("UpdateItem", [lost])
    with pytest.raises(LockHeld) as caught:
        rival.acquire("a")
    assert caught.value.holder.owner == lease.owner


def test_acquisition_recognises_itself_by_a_read(locks, meets, sent):
    """Refused when sent again, no item in the reply: the read shows that it is ours."""
    sent.clear()
    meets("UpdateItem", [failed, bare])
    lease = locks.try_acquire("a")
    assert sent == ["UpdateItem", "UpdateItem", "GetItem"]
    assert lease.held
    assert lease.expires_at == locks.holder("a").expires_at


def test_deadline_of_a_repeated_acquisition_counts_from_its_first_send(locks, meets):
    """What was applied by the first send runs from then, however long the second takes."""
    meets("UpdateItem", [slow(3, then=failed), slow(4)])
    lease = locks.acquire("a", ttl=60)
    assert lease.remaining <= 60
    assert time.time() + lease.remaining < lease.expires_at


def test_acquisition_whose_reply_is_cut_short_is_granted(locks, meets, sent, stored):
    """Field case 39: a 200 is the whole answer, whatever is missing from it."""
    sent.clear()
    meets("UpdateItem", [cut])
    lease = locks.try_acquire("a")
    assert sent == ["UpdateItem"]
    assert lease.held
    assert stored()["OwnerID"]["S"] == lease.owner
    assert stored()["ExpiresAt"]["N"] == str(lease.expires_at)


@pytest.mark.parametrize("faults", [[lost], [dropped], [failed], [cut], [failed, cut]])
def test_renewal_whose_reply_is_lost_is_done(faults, clock, locks, meets, stored):
    """A renewal can be sent twice: it sets the expiry that it has set already."""
    lease = locks.acquire("a", ttl=60)
    clock.tick(30)
    meets("UpdateItem", faults)
    lease.renew()
    assert 55 < lease.remaining <= 60
    assert stored()["ExpiresAt"]["N"] == str(lease.expires_at)


def test_resumed_lease_whose_reply_is_cut_short_has_its_note(locks, rival, meets):
    """Field case 39: what the reply lacks comes by a read."""
    first = locks.acquire("a", data="note")
    meets("UpdateItem", [cut])
    assert rival.resume("a", first.owner).data == "note"


@pytest.mark.parametrize("ours", [True, False])
def test_refused_renewal_without_the_item_is_followed_by_a_read(ours, clock, locks, rival, meets):
    """Refused, no item in the reply: the read says whether it is still ours."""
    lease = locks.acquire("a", ttl=1000)
    if not ours:
        lease = locks.resume("a", lease.owner, ttl=5)
        clock.tick(10)
        rival.acquire("a")
    meets("UpdateItem", [bare])
    if ours:
        lease.renew(ttl=10)  # refused at first, since the lock runs longer
        assert 9 < lease.remaining <= 10
    else:
        with pytest.raises(LockLost, match="taken"):
            lease.renew()


@pytest.mark.parametrize("fault", LOST)
def test_release_whose_reply_is_lost_is_true(fault, locks, meets, stored):
    """Field case 13: refused when sent again, no item, and ours until then: the first did it."""
    lease = locks.acquire("a")
    meets("DeleteItem", [fault])
    assert lease.release() is True
    assert stored() is None


def test_release_whose_reply_is_cut_short_is_true(locks, meets, stored):
    """Field case 39: a 200 is the whole answer to a release too."""
    lease = locks.acquire("a")
    meets("DeleteItem", [cut])
    assert lease.release() is True
    assert stored() is None


def test_repeated_release_of_a_lease_that_had_run_out_is_false(clock, locks, meets):
    """Refused when sent again, no item, but the lease was over: anybody may have deleted it."""
    lease = locks.acquire("a", ttl=5)
    clock.tick(10)
    meets("DeleteItem", [failed])
    assert lease.release() is False


def test_repeated_release_is_true_whoever_came_in_between(locks, rival, meets, stored):
    """The lock was ours when the first send left, so that was granted; the next item stays."""
    lease = locks.acquire("a")
    others = []
    meets("DeleteItem", [failed, after(lambda: others.append(rival.acquire("a")))])
    assert lease.release() is True
    assert stored()["OwnerID"]["S"] == others[0].owner


@pytest.mark.parametrize("fault", LOST)
def test_lock_released_by_key_and_owner_despite_a_lost_reply(fault, locks, rival, meets, stored):
    """Field case 13: refused when sent again, no item: the first send did it."""
    lease = locks.acquire("a")
    meets("DeleteItem", [fault])
    assert rival.release("a", lease.owner) is True
    assert stored() is None


@pytest.mark.parametrize("second", [None, bare])
def test_anothers_lock_is_not_released_by_key_and_owner(second, locks, rival, meets, stored):
    """Refused when sent again, with the item or without it in the reply: not ours, so False."""
    lease = locks.acquire("a")
    meets("DeleteItem", [unavailable, second])
    assert rival.release("a", "somebody/else") is False
    assert stored()["OwnerID"]["S"] == lease.owner


@pytest.mark.parametrize("fault", LOST)
def test_release_after_a_failed_one_that_was_applied_is_true(fault, locks, rival, meets, stored):
    """Field case 13: called again, it finds that the first call did it, whoever came since."""
    lease = locks.acquire("a")
    meets("DeleteItem", itertools.repeat(fault))
    with pytest.raises(Exception, match=r"500|timed? ?out|closed"):
        lease.release()
    meets("DeleteItem", [])
    other = rival.acquire("a")
    assert lease.release() is True
    assert stored()["OwnerID"]["S"] == other.owner


def test_late_renewal_does_not_undercut_a_newer_one(clock, locks, meets, stored):
    """Field case 40: delivered after its sender gave up, it leaves the newer expiry alone."""
    late = []
    lease = locks.acquire("a", ttl=60)
    clock.tick(1)
    meets("UpdateItem", itertools.repeat(held_back(late)))
    with pytest.raises(ReadTimeoutError):
        lease.renew()
    meets("UpdateItem", [])
    clock.tick(20)
    lease.renew()
    before = stored()
    for request in late:
        assert deliver(request).status_code == 400
    assert late
    assert stored() == before


def test_late_release_is_counted_on_from_its_first_send(clock, locks, rival, meets, stored):
    """Field case 40: it may land at any time, so the lease is over, and landing does no more."""
    late = []
    lease = locks.acquire("a", ttl=60)
    meets("DeleteItem", itertools.repeat(held_back(late)))
    with pytest.raises(ReadTimeoutError):
        lease.release()
    assert not lease.held
    with pytest.raises(LockLost):
        lease.renew()
    assert deliver(late[0]).status_code == 200
    assert stored() is None
    other = rival.acquire("a")
    for request in late[1:]:
        assert deliver(request).status_code == 400
    assert stored()["OwnerID"]["S"] == other.owner
    assert not lease.held


def test_late_acquisition_ends_by_itself(clock, locks, rival, meets):
    """Field case 40: at worst it leaves an item that nobody holds, until its own expiry."""
    late = []
    meets("UpdateItem", itertools.repeat(held_back(late)))
    with pytest.raises(ReadTimeoutError):
        locks.acquire("a", ttl=10)
    meets("UpdateItem", [])
    clock.tick(3)
    assert deliver(late[0]).status_code == 200
    assert rival.try_acquire("a") is None
    clock.tick(10)
    assert rival.try_acquire("a")
