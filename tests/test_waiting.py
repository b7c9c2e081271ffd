"""Waiting: a try, then looks, then a try; on time, cheap, and never longer than was asked."""

import collections
import contextlib
import email.utils
import itertools
import math
import random
import socket
import statistics
import time

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import (
    ConnectTimeoutError,
    EndpointConnectionError,
    ReadTimeoutError,
)
from faults import after, bare, cut, deliver, held_back, refused, slow, unsent

from simplelock import LockHeld, LockTable, LockTableError

LATE = 1.05  # a `Date` is cut to the second, and a look takes its time
A = {"TableName": "Locks", "Key": {"LockID": {"S": "a"}}}


@pytest.fixture
def far(client, clock):
    """Let requests and replies take 2 ms each."""
    for event in ("before-send.dynamodb", "after-call.dynamodb"):
        client.meta.events.register_first(event, lambda **_: clock.tick(0.002) and None)


@pytest.fixture
def unchanging(client):
    """Let DynamoDB answer the first request of each kind, and take that for the later ones."""
    replies = {}

    def replay(request, event_name, **_):
        reply = replies.get(event_name) or replies.setdefault(event_name, deliver(request))
        reply.headers["Date"] = email.utils.formatdate(time.time(), usegmt=True)
        request.url = "http://answered.invalid/"  # moto would answer once more
        return reply

    return lambda: client.meta.events.register("before-send.dynamodb", replay)


@pytest.fixture
def silent():
    """The URL of a server that accepts connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield "http://127.0.0.1:{1}".format(*server.getsockname())


@pytest.fixture
def closed():
    """The URL of a port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return "http://127.0.0.1:{1}".format(*server.getsockname())


@pytest.mark.parametrize("options", [{}, {"wait": 0}, {"wait": 0.0}])
def test_wait_zero_is_exactly_one_try(driven, locks, rival, sent, options):
    """The default is not to wait, and 0 is not taken for a default."""
    locks.acquire("a")
    sent.clear()
    with pytest.raises(LockHeld):
        rival.acquire("a", **options)
    assert (sent, driven.pauses) == (["UpdateItem"], [])


@pytest.mark.parametrize("wait", [0, 3])
def test_body_does_not_run_unlocked(driven, locks, rival, wait):
    """Field case 5: when the time is over, `LockHeld` is raised and the body never runs."""
    lease = locks.acquire("a", data="nightly")
    with pytest.raises(LockHeld) as held, rival.acquire("a", wait=wait):
        pytest.fail("the body ran")
    assert (held.value.key, held.value.holder) == ("a", rival.holder("a"))
    assert (held.value.holder.owner, held.value.holder.data) == (lease.owner, "nightly")


def test_waiter_wakes_at_a_dead_holders_expiry(driven, clock, far, locks, rival):
    """Its lock is acquired when it has expired: not before, a second later at most, mostly soon."""
    late = []
    for key in "abcdefghijklmnop":  # with half of them the median wavers too much
        clock.tick(0.37)
        dead = locks.acquire(key, ttl=2)
        driven.later(1, dead.renew)  # so that it is a look that shows the expiry
        assert rival.acquire(key, wait=60).held
        late.append(time.time() - dead.expires_at)
    assert min(late) > 0
    assert max(late) <= LATE
    assert statistics.median(late) < 0.1  # it would be 0.3 if pauses did not heed the expiry


def test_waiter_does_not_wake_a_moment_too_early(driven, locks, rival):
    """However quick the network: at the very moment of expiry a try would be refused, and the next pause be long."""
    late = []
    for key in "abcdefgh":
        dead = locks.acquire(key, ttl=2)
        assert rival.acquire(key, wait=60).held
        late.append(time.time() - dead.expires_at)
    assert min(late) > 0
    assert statistics.median(late) < 0.05


def test_look_in_the_second_of_the_expiry_is_followed_by_a_try(driven, clock, rival, steal, monkeypatch):
    """A reply dated with the expiry shows that it is reached: no long pause comes before it has passed."""
    monkeypatch.setattr("simplelock._RANDOM.uniform", lambda _, most: most)
    clock.tick(0.5)
    expires_at = int(steal(seconds=2.5)["ExpiresAt"]["N"])
    rival.acquire("a", wait=60)
    assert 0 < time.time() - expires_at < 0.1


def test_waiter_sees_a_release_within_a_second(driven, locks, rival):
    """A waiter looks once a second at least."""
    holder, start = locks.acquire("a", ttl=600), time.time()
    driven.later(6.5, holder.release)
    rival.acquire("a", wait=60)
    assert 6.5 <= time.time() - start <= 7.6


def test_waiter_goes_by_a_renewed_expiry(driven, far, locks, rival, sent):
    """A waiter does not count on an expiry that was moved on, nor look more often for it."""
    holder, start = locks.acquire("a", ttl=5), time.time()
    for renewal in range(1, 4):
        driven.later(4 * renewal, holder.renew)
    sent.clear()
    rival.acquire("a", wait=60)
    assert holder.expires_at < time.time() <= holder.expires_at + LATE
    assert holder.expires_at - start > 16
    assert sent.count("GetItem") < 70


def test_endless_wait_ends_with_the_lock(driven, locks, rival):
    """`math.inf` waits for as long as it takes."""
    holder, start = locks.acquire("a", ttl=3600), time.time()
    driven.later(40, holder.release)
    assert rival.acquire("a", wait=math.inf).held
    assert 40 <= time.time() - start <= 41.1


@pytest.mark.parametrize("wait", [0.01, 0.3, 7.3])
def test_last_try_is_made_at_the_deadline(driven, locks, rival, sent, wait):
    """The last request is a try, and it is made when the time is over: not before, not after."""
    locks.acquire("a", ttl=600)
    sent.clear()
    start = time.time()
    with pytest.raises(LockHeld):
        rival.acquire("a", wait=wait)
    assert time.time() - start == pytest.approx(wait, abs=1e-4)
    assert (sent[0], sent[-1], sent.count("UpdateItem")) == ("UpdateItem", "UpdateItem", 2)


def test_last_try_takes_what_came_free_since_the_last_look(driven, locks, rival):
    """A lock that is released just before the deadline is still acquired."""
    holder = locks.acquire("a", ttl=600)
    driven.later(4.9999, holder.release)
    assert rival.acquire("a", wait=5).held


def test_between_tries_a_waiter_only_looks(driven, locks, rival, client, sent):
    """While another holds the lock, a waiter reads, eventually consistently: a tenth of a write."""
    looks = []
    client.meta.events.register("before-parameter-build.dynamodb.GetItem", lambda params, **_: looks.append(params))
    locks.acquire("a", ttl=600)
    sent.clear()
    with pytest.raises(LockHeld):
        rival.acquire("a", wait=10)
    assert sent == ["UpdateItem", *["GetItem"] * len(looks), "UpdateItem"]
    assert not any(look["ConsistentRead"] for look in looks)


def test_pauses_grow_to_a_second_with_full_jitter(driven, locks, rival):
    """Each pause is drawn from 0 to a limit, which doubles from 0.05 s to 1 s."""
    locks.acquire("a", ttl=3600)
    with pytest.raises(LockHeld):
        rival.acquire("a", wait=60)
    limits = [0.05, 0.1, 0.2, 0.4, 0.8]
    assert all(pause <= limit for pause, limit in zip(driven.pauses, limits, strict=False))
    grown = driven.pauses[len(limits) : -1]
    assert max(grown) <= 1
    assert 0.3 < sum(grown) / len(grown) < 0.7
    assert min(grown) < 0.25


def test_many_waiters_are_cheap_and_wake_apart(driven, clock, unchanging, locks, sent):
    """Field case 19: 50 waiters for 10 s cost 2 writes each, and fewer than 30 reads.

    Their pauses differ, even where every process has seeded `random` alike.
    """
    locks.acquire("a", ttl=3600)
    unchanging()  # else moto takes 3 s for it
    start, pauses = time.time(), []
    sent.clear()
    for _ in range(50):  # one after the other: none does anything that another would see
        clock.move_to(time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(start)))
        driven.pauses.clear()
        random.seed(0)
        with pytest.raises(LockHeld):
            LockTable("Locks", client=locks.client).acquire("a", wait=10)
        pauses.append(tuple(driven.pauses[:5]))
    count = collections.Counter(sent)
    assert count["UpdateItem"] == 100
    assert count["GetItem"] < 1500
    assert len(set(pauses)) == 50


def test_holder_that_vanishes_for_another_is_waited_for(driven, far, client, locks, rival, meets, steal):
    """Field case 18: gone when read, and another came in: that one is waited for."""
    locks.acquire("a")
    meets("UpdateItem", [bare, after(lambda: steal(seconds=5))])
    meets("GetItem", [after(lambda: client.delete_item(**A))])
    start = time.time()
    assert rival.acquire("a", wait=10).held
    assert 5 < time.time() - start <= 5 + LATE


@pytest.mark.parametrize("wait", [0, 3])
def test_free_lock_that_is_refused_again_and_again_is_anothers(wait, driven, locks, meets, sent):
    """Field case 18: a try is two requests, with a read after each; in the end nobody can be named."""
    meets("UpdateItem", itertools.repeat(refused("ConditionalCheckFailedException")))
    sent.clear()
    start = time.time()
    with pytest.raises(LockHeld, match="another") as held:
        locks.acquire("a", wait=wait)
    assert held.value.holder is None
    assert time.time() - start == pytest.approx(wait, abs=1e-4)
    assert sent[:4] == ["UpdateItem", "GetItem"] * 2
    assert sent[4:5] == ["GetItem"] * bool(wait)


def test_look_that_is_out_of_date_costs_one_try(driven, client, locks, rival, meets, sent):
    """An eventually consistent read may show an old state: the try tells, and the wait goes on."""
    lease = locks.acquire("a", ttl=600)
    item = client.get_item(**A)["Item"]
    meets("GetItem", [None, after(lambda: client.delete_item(**A))])
    meets("UpdateItem", [None, after(lambda: client.put_item(TableName="Locks", Item=item))])
    sent.clear()
    with pytest.raises(LockHeld, match=lease.owner):
        rival.acquire("a", wait=10)
    assert sent[1:6] == ["GetItem", "GetItem", "DeleteItem", "UpdateItem", "PutItem"]
    assert sent.count("UpdateItem") == 3


def test_look_that_was_cut_short_is_not_a_free_lock(driven, locks, rival, meets, sent):
    """Field case 39: a look whose reply has no body says nothing: it is repeated, not tried on."""
    locks.acquire("a", ttl=600)
    meets("GetItem", [cut])
    sent.clear()
    with pytest.raises(LockHeld):
        rival.acquire("a", wait=10)
    assert sent.count("UpdateItem") == 2


def test_look_that_outlasts_the_wait_tells_whose_lock_it_is(driven, locks, rival, meets, sent):
    """Its reply comes when the time is over: it is the last word, and as complete as a try's."""
    lease = locks.acquire("a", ttl=600)
    meets("GetItem", [slow(5)])
    sent.clear()
    with pytest.raises(LockHeld) as held:
        rival.acquire("a", wait=3)
    assert sent == ["UpdateItem", "GetItem"]
    assert (held.value.key, held.value.holder.owner) == ("a", lease.owner)


def test_waiter_recognises_its_own_late_send(driven, client, locks, rival, meets, stored):
    """A send that the SDK gave up on is delivered when the lock is free: the waiter has it."""
    late = []

    def land():
        client.delete_item(**A)
        deliver(*late)

    locks.acquire("a", ttl=600)
    meets("UpdateItem", [held_back(late)])
    start = time.time()
    driven.later(5, land)
    lease = rival.acquire("a", wait=600)
    assert time.time() - start <= 6.1
    assert stored()["OwnerID"] == {"S": lease.owner}
    assert lease.held
    assert lease.release() is True


@pytest.mark.parametrize("operation", ["GetItem", "UpdateItem"])
def test_network_error_ends_the_wait(operation, driven, locks, rival, meets):
    """Field case 17: an error of a look or of a try is raised as it is, never as busy, and soon."""
    locks.acquire("a", ttl=5)
    driven.later(2, lambda: meets(operation, [unsent] * 12))
    start = time.time()
    with pytest.raises(ConnectTimeoutError):
        rival.acquire("a", wait=600)
    assert time.time() - start < 60


def test_item_that_is_no_lock_is_not_waited_for(driven, client, locks, rival):
    """What stands in the table under this name, and is no lock, ends the wait at once."""
    item = {"LockID": {"S": "a"}, "Total": {"N": "5"}}
    locks.acquire("a", ttl=600)
    driven.later(3, lambda: client.put_item(TableName="Locks", Item=item))
    start = time.time()
    with pytest.raises(LockTableError, match="'a'"):
        rival.acquire("a", wait=60)
    assert time.time() - start <= 4.1
    assert client.get_item(**A)["Item"] == item


def test_interrupted_wait_leaves_all_as_it_was(driven, locks, rival, stored):
    """Ctrl-C in a pause ends the wait; the holder's item is untouched."""

    def interrupt():
        raise KeyboardInterrupt

    locks.acquire("a", ttl=600)
    item = stored()
    driven.later(2, interrupt)
    with pytest.raises(KeyboardInterrupt):
        rival.acquire("a", wait=60)
    assert stored() == item


def test_silent_endpoint_does_not_outlast_the_wait(silent):
    """Field case 16: where nothing ever answers, the wait adds nothing to the request's limit."""
    config = Config(connect_timeout=0.2, read_timeout=0.2, retries={"total_max_attempts": 1})
    client = boto3.client("dynamodb", endpoint_url=silent, config=config)
    start = time.monotonic()
    with contextlib.closing(client), pytest.raises(ReadTimeoutError):
        LockTable("Locks", client=client).acquire("a", wait=2)
    assert 0.2 <= time.monotonic() - start < 2.2


def test_closed_port_ends_the_wait(driven, closed, monkeypatch):
    """Field case 16: with the default client too, a refused connection is raised within seconds."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_DYNAMODB", closed)
    locks, start = LockTable("Locks"), time.time()
    if locks.client.meta.endpoint_url != closed:
        locks.client.close()
        pytest.skip("this SDK is older than that variable")
    with (
        contextlib.closing(locks.client),
        pytest.raises(EndpointConnectionError, match="http://127"),
    ):
        locks.acquire("a", wait=2)
    assert time.time() - start < 2 + 6  # what the SDK sleeps between three sends is 3 s at most


def test_default_client_gives_up_before_a_lease_runs_out():
    """Field case 16: the default client's limits are far below the default ttl."""
    locks = LockTable("Locks")
    with contextlib.closing(locks.client):
        config = locks.client.meta.config
    assert (config.connect_timeout, config.read_timeout) == (2, 3)
    assert config.retries == {"mode": "standard", "total_max_attempts": 3}
    assert config.max_pool_connections == 64
    assert "simplelock/" in config.user_agent
    assert 3 * (config.connect_timeout + config.read_timeout) < locks.ttl / 3
