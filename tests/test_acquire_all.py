"""acquire_all: several locks or none, in one order for everybody."""

import json
import threading
import time

import pytest
from botocore.exceptions import ClientError
from faults import after, refused
from moto.dynamodb.responses import DynamoHandler

from simplelock import LockHeld, LockLost

ABC = ["a", "b", "c"]


@pytest.fixture
def steps(locks, client):
    """What was sent, as pairs of the operation and the key."""
    steps = []

    def note(request, **_):
        body = json.loads(request.body)
        if "Key" in body:
            operation = request.headers["X-Amz-Target"].decode().split(".")[1]
            steps.append((operation, body["Key"]["LockID"]["S"]))

    client.meta.events.register_first("before-send.dynamodb", note)
    return steps


@pytest.mark.parametrize("keys", [["b", "c", "a"], ("c", "a", "b", "a", "c"), {"a", "b", "c"}, iter("cbba")])
def test_locks_are_acquired_sorted_and_released_in_reverse(keys, locks, steps):
    """Two callers cannot each hold what the other waits for; a key that comes twice is one."""
    with locks.acquire_all(keys) as leases:
        assert [lease.key for lease in leases] == ["a", "b", "c"]
        assert all(lease.held for lease in leases)
    acquired = [("UpdateItem", key) for key in "abc"]
    assert steps == acquired + [("DeleteItem", key) for key in "cba"]


def test_no_keys_are_no_locks(locks, steps):
    """An empty collection is held without a request."""
    with locks.acquire_all([]) as leases:
        assert leases == []
    assert steps == []


@pytest.mark.parametrize(
    ("keys", "error"),
    [("abc", TypeError), (["a", ""], ValueError), (["a", 5], TypeError), ([b"a"], TypeError)],
)
def test_bad_keys_are_refused_before_any_request(keys, error, locks, steps):
    """All keys are checked when it is called; one string is a name, not a collection of them."""
    with pytest.raises(error):
        locks.acquire_all(keys)
    assert steps == []


@pytest.mark.parametrize("owner", ["", "x" * 1025])
def test_bad_owner_is_refused_before_any_request(owner, locks, steps):
    """It is checked together with the keys."""
    with pytest.raises(ValueError, match="owner"):
        locks.acquire_all(["a"], owner=owner)
    assert steps == []


@pytest.mark.parametrize("options", [{}, {"wait": 0}, {"wait": 3}])
def test_all_or_none(options, driven, locks, rival, stored):
    """When one is held by another to the end, the body does not run, and none is kept; it ends in time."""
    theirs, start = rival.acquire("b", ttl=600), time.time()
    with (
        pytest.raises(LockHeld, match="'b'") as held,
        locks.acquire_all(["c", "b", "a"], **options),
    ):
        pytest.fail("the body ran")
    assert time.time() - start == pytest.approx(options.get("wait", 0), abs=0.01)
    assert (held.value.key, held.value.holder.owner) == ("b", theirs.owner)
    assert (stored("a"), stored("c")) == (None, None)
    assert theirs.release() is True


def test_error_in_between_releases_what_was_acquired(locks, meets, stored):
    """A real error is raised as it is, never as busy, and none is kept."""
    meets("UpdateItem", [None, refused("AccessDeniedException")])
    with pytest.raises(ClientError, match="AccessDenied"), locks.acquire_all(["a", "b"]):
        pytest.fail("the body ran")
    assert (stored("a"), stored("b")) == (None, None)


def test_wait_is_for_all_together(driven, locks, rival, stored):
    """The time that one was waited for is not there for the next."""
    first, start = rival.acquire("a", ttl=600), time.time()
    rival.acquire("b", ttl=600)
    driven.later(6, first.release)
    with pytest.raises(LockHeld, match="'b'"), locks.acquire_all(["a", "b"], wait=10, ttl=60):
        pytest.fail("the body ran")
    assert time.time() - start == pytest.approx(10, abs=0.01)
    assert stored("a") is None


def test_every_lock_is_tried_when_the_time_is_over(driven, locks, rival):
    """The last second spent on the first lock still leaves a try for the others."""
    first = rival.acquire("a", ttl=600)
    driven.later(4.9999, first.release)
    with locks.acquire_all(["a", "b"], wait=5) as leases:
        assert len(leases) == 2


def test_ttl_and_owner_are_those_of_every_lease(locks):
    """What is asked for counts for each lock."""
    with locks.acquire_all(["a", "b"], ttl=5, owner="web-1") as leases:
        assert all(0 < lease.remaining <= 5 for lease in leases)
        assert all(lease.owner.startswith("web-1/") for lease in leases)
        assert leases[0].owner != leases[1].owner


def test_lock_that_ran_out_meanwhile_is_lost(clock, locks, meets, stored):
    """The body does not run with a lease that is over before all are acquired."""
    meets("UpdateItem", [None, after(lambda: clock.tick(61))])
    with pytest.raises(LockLost, match="'a'"), locks.acquire_all(["a", "b"]):
        pytest.fail("the body ran")
    assert (stored("a"), stored("b")) == (None, None)


def test_body_error_releases_all_and_is_not_replaced(locks, steal, stored):
    """Neither a lost lock nor another's release hides it."""
    with pytest.raises(KeyError, match="body"), locks.acquire_all(ABC):  # noqa: PT012
        theirs = steal("b")
        raise KeyError("body")
    assert (stored("a"), stored("b"), stored("c")) == (None, theirs, None)


def test_failing_release_of_one_does_not_keep_the_others(locks, meets, stored):
    """Each lock is released whatever comes of the others; the error is raised."""
    meets("DeleteItem", [None, refused("AccessDeniedException")])
    with pytest.raises(ClientError, match="AccessDenied"), locks.acquire_all(ABC):
        pass
    assert (stored("a"), stored("c")) == (None, None)
    assert stored("b")


def test_lock_lost_in_the_body_is_told_and_the_others_released(locks, steal, stored):
    """As for a single lease, leaving with a lock that was not ours any more raises."""
    with pytest.raises(LockLost, match="'b'"), locks.acquire_all(ABC):
        theirs = steal("b")
    assert (stored("a"), stored("b"), stored("c")) == (None, theirs, None)


def test_first_locks_are_kept_while_the_next_are_awaited(locks, rival, alone):
    """The first lease does not run out while the last is waited for longer than its ttl."""
    last, threads = rival.acquire("c", ttl=60), threading.active_count()
    timer = threading.Timer(1.2, last.release)
    timer.start()
    with locks.acquire_all(ABC, wait=10, ttl=0.9) as leases:
        assert all(lease.held for lease in leases)
        timer.join()
        assert threading.active_count() == threads  # the body's heartbeats are the body's affair


def test_first_lock_that_is_taken_meanwhile_is_lost(locks, rival, steal, stored, alone):
    """A lease that another took while the next was awaited: no body, no lock, theirs untouched."""
    last, thefts = rival.acquire("b", ttl=60), []

    def interfere():
        thefts.append(steal("a"))
        time.sleep(0.3)
        last.release()

    timer = threading.Timer(0.1, interfere)
    timer.start()
    with (
        pytest.raises(LockLost, match=r"'a'.*thief"),
        locks.acquire_all(["a", "b"], wait=9, ttl=0.6),
    ):
        pytest.fail("the body ran")
    timer.join()
    assert stored("a") == thefts[0]
    assert stored("b") is None


@pytest.fixture
def alone(monkeypatch):
    """Let moto serve one request at a time: it is not atomic under threads."""
    mutex, call_action = threading.Lock(), DynamoHandler.call_action

    def call_alone(handler):
        with mutex:
            return call_action(handler)

    monkeypatch.setattr(DynamoHandler, "call_action", call_alone)
