"""Heartbeats: renewing in the background, in real time, and what is said when that fails."""

import contextlib
import http.server
import itertools
import threading
import time

import boto3
import pytest
from botocore.config import Config
from faults import after, deliver, lost, refused, unsent
from moto import mock_aws
from moto.dynamodb.responses import DynamoHandler

from simplelock import LockLost, LockTable

ONCE = Config(connect_timeout=2, read_timeout=2, retries={"total_max_attempts": 1})
A = {"TableName": "Locks", "Key": {"LockID": {"S": "a"}}}


@pytest.fixture(scope="module")
def session():
    """One for all, since it takes ten times as long to make as a client."""
    return boto3.Session()


@pytest.fixture
def client(session, monkeypatch):
    """A client that sends once, so that a fault fails a whole renewal; safe under threads."""
    mutex, call_action = threading.Lock(), DynamoHandler.call_action

    def call_alone(handler):
        with mutex:
            return call_action(handler)

    monkeypatch.setattr(DynamoHandler, "call_action", call_alone)
    with mock_aws(), contextlib.closing(session.client("dynamodb", config=ONCE)) as client:
        yield client


@pytest.fixture(autouse=True)
def _threads():
    """No test leaves a thread behind."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@pytest.fixture
def hanging(session):
    """A server that grants whatever is asked, but answers its second request only when it may."""
    numbers, may_answer = itertools.count(1), threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            if next(numbers) == 2:
                may_answer.wait(5)
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = False  # so that closing it waits for them
        url = f"http://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever, args=[0.01])
        serving.start()
        with contextlib.closing(session.client("dynamodb", endpoint_url=url, config=ONCE)) as client:
            yield LockTable("Locks", client=client), may_answer
        server.shutdown()
        serving.join()


def until(condition):
    """Wait for it, but not for ever."""
    for _ in range(600):
        if condition():
            return
        threading.Event().wait(0.005)  # time.sleep would drive a frozen clock
    pytest.fail("it did not happen")


def stays(condition, seconds):
    """Say whether it is so all that time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and condition():
        time.sleep(0.005)
    return condition()


def test_default_period_is_a_third_of_the_ttl(locks, monkeypatch):
    """Two renewals can fail before the lease would run out."""
    wait, pauses = threading.Event.wait, []

    def note(event, timeout=None):
        pauses.append(timeout)
        return wait(event, timeout)

    with locks.acquire("a", ttl=60) as lease:
        monkeypatch.setattr(threading.Event, "wait", note)
        with lease.heartbeat():
            until(lambda: 20 in pauses)


def test_heartbeat_does_not_keep_a_process_from_ending(locks):
    """Its threads are daemons: whoever ends without leaving the `with` takes them along."""
    before = set(threading.enumerate())
    with locks.acquire("a") as lease, lease.heartbeat(on_lost=pytest.fail):
        started = set(threading.enumerate()) - before
        assert [thread.daemon for thread in started] == [True, True]


def test_lock_is_held_for_longer_than_the_ttl(locks):
    """The lease is renewed in time, and held throughout."""
    losses = []
    with locks.acquire("a", ttl=1) as lease, lease.heartbeat(on_lost=losses.append) as same:
        assert same is lease
        assert stays(lambda: lease.held, 1.3)
    assert losses == []


def test_lease_with_little_time_left_is_kept(clock, locks):
    """The first renewal comes while there is time, not only when a period has passed."""
    with locks.acquire("a", ttl=60) as lease:
        clock.tick(59.6)
        assert 0 < lease.remaining < 0.5
        with lease.heartbeat():
            until(lambda: lease.remaining > 59)


@pytest.mark.parametrize("period", [30.001, 60, 0, -1, float("nan")])
def test_period_above_half_the_ttl_is_refused(period, locks, sent):
    """Field case 11: a period that leaves no room for a second try is a ValueError, unsent."""
    lease = locks.acquire("a", ttl=60)
    sent.clear()
    with pytest.raises(ValueError, match=r"period.*30 s"):
        lease.heartbeat(period)
    assert sent == []


@pytest.mark.parametrize("period", ["5", True])
def test_period_that_is_not_a_number_is_refused(period, locks):
    """Field case 11: a period of another type is a TypeError."""
    with pytest.raises(TypeError, match="period"):
        locks.acquire("a").heartbeat(period)


def test_heartbeat_does_not_stall_the_release(locks, meets):
    """Field case 30: where the next renewal is due in 30 s, the release is sent within 0.2 s."""
    releases = []
    meets("DeleteItem", [after(lambda: releases.append(time.monotonic()))])
    with locks.acquire("a", ttl=60) as lease, lease.heartbeat(30, on_lost=pytest.fail):
        left = time.monotonic()
    assert releases[0] - left < 0.2


@pytest.mark.parametrize("started", [0, 1])
def test_thread_that_cannot_start_is_an_error(started, locks, stored, monkeypatch):
    """Field case 30: the error is raised, the body does not run, and `with` still releases."""
    start, numbers = threading.Thread.start, itertools.count()

    def fail(thread):
        if next(numbers) == started:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    with (
        pytest.raises(RuntimeError, match="start new thread"),
        locks.acquire("a") as lease,
        lease.heartbeat(on_lost=pytest.fail),
    ):
        pytest.fail("the body ran")
    assert stored() is None


@pytest.mark.parametrize("fault", [unsent, lost])
def test_two_failed_renewals_do_not_end_it(fault, clock, locks, meets, sent):
    """Field case 29: two renewals fail, the third succeeds: held throughout, and nothing told."""
    losses = []
    with locks.acquire("a", ttl=60) as lease:
        clock.tick(40)
        meets("UpdateItem", [fault, fault])
        sent.clear()
        with lease.heartbeat(0.05, on_lost=losses.append):
            until(lambda: lease.remaining > 59)
    assert sent.count("UpdateItem") >= 3
    assert losses == []


def test_failing_for_good_is_told_once_when_the_lease_ends(locks, meets):
    """Field case 29: where no renewal succeeds, `on_lost` is called once, by the deadline."""
    losses, threads = [], threading.active_count()
    with locks.acquire("a", ttl=0.6) as lease:
        meets("UpdateItem", itertools.repeat(refused("ThrottlingException")))
        ends = time.monotonic() + lease.remaining
        with lease.heartbeat(0.1, on_lost=lambda lost: losses.append((lost, time.monotonic()))):
            until(lambda: losses)
            with pytest.raises(LockLost, match="ThrottlingException"):
                lease.check()
            until(lambda: threading.active_count() == threads)
    [(told, at)] = losses
    assert told is lease
    assert ends - 0.05 < at < ends + 0.5


@pytest.mark.parametrize(("by", "reason"), [("another", "thief/1"), ("TTL", "gone")])
def test_refused_renewal_is_told_at_once(by, reason, locks, client, steal, stored):
    """A refusal ends the heartbeat, long before the lease would; nothing is made again."""
    losses, threads = [], threading.active_count()
    with pytest.raises(LockLost, match=reason), locks.acquire("a") as lease:  # noqa: PT012, SIM117
        with lease.heartbeat(0.1, on_lost=losses.append):
            theirs = steal() if by == "another" else client.delete_item(**A) and None
            until(lambda: threading.active_count() == threads)
            with pytest.raises(LockLost, match=reason):
                lease.check()
    assert losses == [lease]
    assert stored() == theirs


def test_refused_renewal_ends_a_heartbeat_that_tells_nobody(locks, steal):
    """Without `on_lost` too, nothing goes on in the background."""
    threads = threading.active_count()
    with pytest.raises(LockLost, match="thief/1"), locks.acquire("a") as lease, lease.heartbeat(0.1):  # noqa: PT012
        steal()
        until(lambda: threading.active_count() == threads)


def test_loss_is_told_while_a_renewal_hangs(hanging):
    """`on_lost` is called within half a second of the lease's end, though no reply comes, once."""
    locks, may_answer = hanging
    losses = []
    with locks.acquire("a", ttl=0.6) as lease:
        ends = time.monotonic() + lease.remaining
        with lease.heartbeat(on_lost=lambda _: losses.append(time.monotonic())):
            until(lambda: losses)
            assert not may_answer.is_set()
            may_answer.set()
    [at] = losses
    assert ends - 0.05 < at < ends + 0.5


def test_loss_by_a_suspension_is_told_soon(clock, locks):
    """A thread's sleep stops with the machine; when it goes on, `on_lost` is not a ttl late."""
    losses, told = [], threading.Event()

    def note(lease):
        losses.append(lease)
        told.set()

    with locks.acquire("a", ttl=60) as lease, lease.heartbeat(on_lost=note):
        clock.tick(61)
        told.wait(2)
        assert losses == [lease]


def test_what_was_told_lost_stays_lost(locks, meets):
    """A renewal that hung and lands after `on_lost` was called does not unsay it."""
    may_land, landed, losses = threading.Event(), [], []

    def hang(request):
        may_land.wait(5)
        landed.append(deliver(request))

    with locks.acquire("a", ttl=0.5) as lease:
        meets("UpdateItem", [hang])
        with lease.heartbeat(on_lost=losses.append):
            until(lambda: losses)
            may_land.set()
        assert len(landed) == 1
        assert (lease.held, lease.remaining) == (False, 0.0)
        for verb in (lease.check, lease.renew):
            with pytest.raises(LockLost, match="ran out"):
                verb()
    assert losses == [lease]


@pytest.mark.parametrize("where", ["in the body", "by leaving"])
def test_released_lease_is_not_told_lost(where, locks):
    """`on_lost` is not called for a lease that was released, nor after the heartbeat's end."""
    losses = []
    with locks.acquire("a", ttl=0.5) as lease, lease.heartbeat(on_lost=losses.append):
        if where == "in the body":
            assert lease.release() is True
            time.sleep(0.7)
    time.sleep(0.7 * (where == "by leaving"))
    assert losses == []


def test_renewal_in_flight_does_not_bring_back_a_released_lock(locks, meets, stored):
    """Field case 15: held up until after the release, the renewal makes no item, and no error."""
    may_land, under_way = threading.Event(), threading.Event()

    def hang(_):
        under_way.set()
        may_land.wait(5)

    with locks.acquire("a", ttl=0.6) as lease, lease.heartbeat():
        meets("UpdateItem", [hang])
        until(under_way.is_set)
        assert lease.release() is True
        time.sleep(0.5)
        may_land.set()
    assert stored() is None


def test_held_does_not_depend_on_the_thread(clock, locks):
    """While the thread sleeps, `held`, `remaining` and `check` ask the clock."""
    with locks.acquire("a") as lease, lease.heartbeat():
        clock.tick(61)
        assert (lease.held, lease.remaining) == (False, 0.0)
        with pytest.raises(LockLost, match="ran out"):
            lease.check()


def test_body_error_is_not_replaced(locks, steal):
    """Neither the end of the heartbeat nor a lost lock replaces it."""
    with (  # noqa: PT012
        pytest.raises(KeyError, match="body"),
        locks.acquire("a") as lease,
        lease.heartbeat(0.1),
    ):
        steal()
        until(lambda: not lease.held)
        raise KeyError("body")


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_forked_child_leaves_the_heartbeat_to_its_parent(locks, sent, in_child):
    """Leaving both `with` in a child ends at once; the parent's heartbeat and lock go on."""
    with contextlib.ExitStack() as stack:
        lease = stack.enter_context(locks.acquire("a", ttl=1))
        stack.enter_context(lease.heartbeat())

        def leave():
            sent.clear()
            stack.close()
            return sent

        assert in_child(leave) == []
        sent.clear()
        until(lambda: "UpdateItem" in sent)
        assert lease.held
