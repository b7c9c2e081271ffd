"""A lease: what it says of itself, what leaving its `with` does, and the errors' contents."""

import contextlib
import pickle
import time

import pytest
from botocore.exceptions import ClientError
from faults import after, refused, slow

from simplelock import Holder, LockError, LockHeld, LockLost, LockTable, LockTableError

A = {"TableName": "Locks", "Key": {"LockID": {"S": "a"}}}


def test_with_gives_the_lease_and_releases_it_on_the_way_out(locks, sent):
    """`with` acquires nothing by itself; leaving it releases."""
    lease = locks.acquire("a")
    sent.clear()
    with lease as entered:
        assert entered is lease
        assert lease.held
        assert sent == []
    assert sent == ["DeleteItem"]
    assert not lease.held
    assert locks.holder("a") is None


def test_with_does_not_release_twice(locks, sent):
    """A lease that the body released is not released again, nor reported lost."""
    with locks.acquire("a") as lease:
        assert lease.release() is True
        sent.clear()
    assert sent == []
    assert lease.release() is False


@pytest.mark.parametrize("by", ["taken", "gone"])
def test_leaving_with_a_lost_lock_raises(locks, client, stored, steal, by):
    """When the body succeeded but the lock was not ours any more, that is said."""
    with pytest.raises(LockLost) as lost, locks.acquire("a") as lease:
        theirs = steal() if by == "taken" else client.delete_item(**A) and None
    assert (lost.value.key, lost.value.owner) == ("a", lease.owner)
    assert stored() == theirs


@pytest.mark.parametrize("trouble", ["taken", "AccessDeniedException"])
@pytest.mark.parametrize("error", [KeyError("body"), KeyboardInterrupt("body")])
def test_body_error_is_never_replaced(locks, meets, steal, error, trouble):
    """The body's own error leaves the `with`, whatever comes of the release."""
    with pytest.raises(type(error), match="body"), locks.acquire("a"):  # noqa: PT012
        if trouble == "taken":
            steal()
        else:
            meets("DeleteItem", [refused(trouble)])
        raise error


def test_body_error_releases_the_lock(locks):
    """A body that fails does not keep the lock."""
    with pytest.raises(KeyError), locks.acquire("a"):
        raise KeyError
    assert locks.holder("a") is None


def test_release_error_leaves_with_and_release_can_be_repeated(locks, meets, stored):
    """When only the release failed, its error is raised; the lease can be released again."""
    lease = locks.acquire("a")
    meets("DeleteItem", [refused("AccessDeniedException")])
    with pytest.raises(ClientError, match="AccessDenied"), lease:
        pass
    assert not lease.held
    assert stored()
    assert lease.release() is True
    assert stored() is None


def test_remaining_counts_down_to_zero(clock, locks):
    """`remaining` goes from ttl to 0.0 and not below; `held` and `check` follow it."""
    lease = locks.acquire("a", ttl=10)
    assert 9.9 < lease.remaining <= 10
    clock.tick(9)
    assert 0.9 < lease.remaining <= 1
    lease.check()
    clock.tick(1)
    assert lease.remaining == 0.0
    clock.tick(100)
    assert (lease.remaining, lease.held) == (0.0, False)
    with pytest.raises(LockLost, match="ran out"):
        lease.check()


def test_asking_a_lease_sends_nothing(clock, locks, sent):
    """`held`, `remaining`, `check` and `repr` ask the clock only."""
    lease = locks.acquire("a")
    sent.clear()
    lease.check()
    assert (lease.held, lease.remaining > 59, "'a'" in repr(lease), sent) == (True, True, True, [])


def test_time_that_the_request_took_is_not_remaining(clock, locks, meets):
    """The lease counts from before its request was sent, not from the reply."""
    meets("UpdateItem", [slow(0.9)])
    assert 59 < locks.acquire("a", ttl=60).remaining <= 59.1


@pytest.mark.parametrize("ttl", [0.5, 2.25])
def test_lease_ends_before_another_can_take_the_lock(ttl, clock, locks, rival):
    """There is no moment at which the holder says `held` and a contender gets the lock."""
    for key in "abc":  # at three fractions of a second
        clock.tick(0.3)
        lease = locks.acquire(key, ttl=ttl)
        while rival.try_acquire(key) is None:
            clock.tick(0.2)
        assert not lease.held


def test_process_that_was_paused_sees_its_loss_at_once(clock, locks, rival, stored):
    """Field case 28: stopped past its lease, while another acquired: lost, the other untouched."""
    lease = locks.acquire("a", ttl=10)
    clock.tick(15)
    other = rival.acquire("a")
    theirs = stored()
    assert (lease.held, lease.remaining) == (False, 0.0)
    with pytest.raises(LockLost, match=other.owner):
        lease.renew()
    assert lease.release() is False
    assert stored() == theirs


@pytest.mark.parametrize("still", ["monotonic", "wall"])
def test_pause_in_which_a_clock_stood_still_ends_the_lease(clock, host, locks, rival, stored, still):
    """Field case 28: `held` asks both clocks, since a suspension stops one, and one can be set."""
    lease = locks.acquire("a", ttl=10)
    if still == "monotonic":
        host.suspend(15)
    else:
        clock.tick(15)
        host.set(wall=-15)
    assert rival.acquire("a")
    theirs = stored()
    assert (lease.held, lease.remaining) == (False, 0.0)
    with pytest.raises(LockLost, match="ran out"):
        lease.check()
    with pytest.raises(LockLost, match="taken"):
        lease.renew()
    assert stored() == theirs


def test_renewal_after_a_suspension_runs_from_then(clock, host, locks, stored):
    """Field case 28: where nobody took the lock, a renewal gives it the whole ttl again."""
    lease = locks.acquire("a", ttl=10)
    host.suspend(100)
    lease.renew()
    assert 9.9 < lease.remaining <= 10
    assert 10 <= lease.expires_at - time.time() <= 14
    assert stored()["ExpiresAt"] == {"N": str(lease.expires_at)}


def test_held_is_false_from_the_moment_of_release(locks, meets):
    """Once a release was sent it may land at any time, so the lease is not held, come what may."""
    lease, seen = locks.acquire("a"), []
    meets("DeleteItem", [after(lambda: seen.append((lease.held, lease.remaining)))])
    lease.release()
    assert seen == [(False, 0.0)]
    with pytest.raises(LockLost, match="released"):
        lease.renew()


def test_lease_is_inert_in_a_forked_child(locks, sent, in_child):
    """The child of a holder does not hold: nothing is held, renewed, released or sent there."""

    def use():
        sent.clear()
        with lease:
            held = lease.held, lease.remaining
        for verb in (lease.check, lease.renew):
            with pytest.raises(LockLost, match="parent"):
                verb()
        return *held, lease.release(), sent

    lease = locks.acquire("a")
    assert in_child(use) == [False, 0.0, False, []]
    assert lease.held
    assert lease.release() is True


def test_forked_child_makes_a_default_client_of_its_own(in_child):
    """On the parent's connections a child could read the parent's replies."""
    locks = LockTable("Locks")
    made = locks.client
    with contextlib.closing(made):
        seen = in_child(lambda: (locks.client is made, locks.client is locks.client))
        assert seen == [False, True]
        assert locks.client is made


def test_forked_child_uses_a_given_client_as_it_is(locks, client, in_child):
    """A client that was passed is the caller's business."""
    assert in_child(lambda: locks.client is client)


HOLDER = Holder("a", "web-1:77/0f", 1_800_000_000, 41.6, 5, "nightly run")


@pytest.mark.parametrize(
    "error",
    [
        LockError("said"),
        LockHeld("a"),
        LockHeld("a", HOLDER),
        LockLost("a", "web-1:77/0f", "said"),
        LockTableError("said"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickling(error):
    """Errors travel between processes whole."""
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
    assert isinstance(copy, LockError)


def test_held_error_says_who_and_for_how_long(clock, locks, rival):
    """`LockHeld` has key and holder, and says who, their note, and the seconds left."""
    lease = locks.acquire("a", owner="web-1", data="nightly run", ttl=600)
    with pytest.raises(LockHeld) as held:
        rival.acquire("a")
    assert (held.value.key, held.value.holder.owner) == ("a", lease.owner)
    for part in ("'a'", lease.owner, "nightly run", f"{held.value.holder.expires_in:.0f} s"):
        assert part in str(held.value)


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (LockHeld("a"), ["'a'"]),
        (LockHeld("a", Holder("a", "web/1", 1_800_000_000, 9.7)), ["'a'", "web/1", "10 s"]),
        (LockLost("a", "web/1", "it ran out"), ["'a'", "web/1", "it ran out"]),
    ],
)
def test_messages_name_the_lock_and_what_is_known(error, parts):
    """No message has a None or an empty bracket in the place of what is not known."""
    assert [part for part in parts if part not in str(error)] == []
    assert not any(part in str(error) for part in ("None", "()"))


def test_repr_says_which_lock_whose_and_how_long(clock, locks):
    """The repr of a lease is for logs."""
    lease = locks.acquire("a", owner="web-1", ttl=10)
    assert all(part in repr(lease) for part in ("'a'", lease.owner, "10.0 s"))
    clock.tick(11)
    assert "0.0 s" in repr(lease)
