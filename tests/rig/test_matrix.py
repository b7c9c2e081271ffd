"""Every verb meets every fault, on its first send and on each of them: its outcome, and the item that is there then.

A cell says `outcome:item`, with `>item` for the item after what the proxy held back has been delivered. An outcome is
what the verb returned, or what it raised, by the name in `RAISED`; 400 is a refusal whose text was lost. The item is as
it was `before`, `ours`, `renewed`, or `free`: there is none or, with fencing, a tombstone.
"""

from __future__ import annotations

import functools
import itertools
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
from botocore.exceptions import BotoCoreError, ClientError
from botocore.retries.standard import ExponentialBackoff

from simplelock import Holder, Lease, LockError, LockHeld, LockLost, LockTable

from . import engines
from .proxy import EVERY, FAULTS, Proxy

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dropped": ("drop_reply", {}),
    "reset": ("reset_reply", {}),
    "failed": ("fail_reply", {}),
    "cut": ("cut_reply", {}),
    "cut-unchecked": ("cut_reply", {"checksum": False}),
    "empty": ("empty_reply", {}),
    "empty-unchecked": ("empty_reply", {"checksum": False}),
    "slow": ("delay_reply", {"seconds": 0.1}),
    "late": ("delay_reply", {"seconds": 0.8}),
    "held-back": ("hold", {}),
    "throttled": ("throttle", {}),
    "denied": ("reject", {"code": "AccessDeniedException"}),
    "unavailable": ("reject", {"code": "InternalServerError", "status": 500}),
    "refused": ("refuse", {}),
}
TIMES_OUT = ("late", "held-back")
TABLE = "Matrix"
NUMBERS = itertools.count(1)
RAISED = {
    "ConnectionClosedError": "closed",
    "ReadTimeoutError": "timeout",
    "InternalServerError": "500",
    "ProvisionedThroughputExceededException": "throttled",
    "AccessDeniedException": "denied",
}

# A lock that is free, or whose holder's lease ran out, or that another holds.
ACQUIRE = """
fault           sends free                     expired                  held
dropped         first lease:ours               lease:ours               LockHeld:before
dropped         every closed:free              closed:free              closed:before
reset           first lease:ours               lease:ours               LockHeld:before
reset           every closed:free              closed:free              closed:before
failed          first lease:ours               lease:ours               LockHeld:before
failed          every 500:free                 500:free                 500:before
cut             first lease:ours               lease:ours               LockHeld:before
cut             every 400:free                 400:free                 400:before
cut-unchecked   first lease:ours               lease:ours               400:before
cut-unchecked   every lease:ours               lease:ours               400:before
empty           first lease:ours               lease:ours               LockHeld:before
empty           every 400:free                 400:free                 400:before
empty-unchecked first lease:ours               lease:ours               400:before
empty-unchecked every lease:ours               lease:ours               400:before
slow            every lease:ours               lease:ours               LockHeld:before
late            first lease:ours               lease:ours               LockHeld:before
late            every timeout:free             timeout:free             timeout:before
held-back       first lease:ours>ours          lease:ours>ours          LockHeld:before>before
held-back       every timeout:before>ours      timeout:before>ours      timeout:before>before
throttled       first lease:ours               lease:ours               LockHeld:before
throttled       every throttled:before         throttled:before         throttled:before
denied          first denied:before            denied:before            denied:before
unavailable     first lease:ours               lease:ours               LockHeld:before
unavailable     every 500:before               500:before               500:before
refused         first lease:ours               lease:ours               LockHeld:before
refused         every closed:before            closed:before            closed:before
"""

# A lease that is ours, or whose lock another took or somebody deleted while it ran.
RENEW = """
fault           sends ours                     taken                    gone
dropped         first none:renewed             LockLost:before          LockLost:before
dropped         every closed:renewed           closed:before            closed:before
reset           first none:renewed             LockLost:before          LockLost:before
reset           every closed:renewed           closed:before            closed:before
failed          first none:renewed             LockLost:before          LockLost:before
failed          every 500:renewed              500:before               500:before
cut             first none:renewed             LockLost:before          LockLost:before
cut             every none:renewed             400:before               400:before
cut-unchecked   first none:renewed             400:before               400:before
cut-unchecked   every none:renewed             400:before               400:before
empty           first none:renewed             LockLost:before          LockLost:before
empty           every none:renewed             400:before               400:before
empty-unchecked first none:renewed             400:before               400:before
empty-unchecked every none:renewed             400:before               400:before
slow            every none:renewed             LockLost:before          LockLost:before
late            first none:renewed             LockLost:before          LockLost:before
late            every timeout:renewed          timeout:before           timeout:before
held-back       first none:renewed>renewed     LockLost:before>before   LockLost:before>before
held-back       every timeout:before>renewed   timeout:before>before    timeout:before>before
throttled       first none:renewed             LockLost:before          LockLost:before
throttled       every throttled:before         throttled:before         throttled:before
denied          first denied:before            denied:before            denied:before
unavailable     first none:renewed             LockLost:before          LockLost:before
unavailable     every 500:before               500:before               500:before
refused         first none:renewed             LockLost:before          LockLost:before
refused         every closed:before            closed:before            closed:before
"""

# The same, resumed by its key and owner: what a renewal does, and the lease is returned.
RESUME = RENEW.replace("none:", "lease:")

# The same, and a lease that ran out before another took the lock. A refusal is no answer where the SDK sent twice: then
# what counts is whether the lease ran when it was first sent.
RELEASE = """
fault           sends ours                  taken                 gone                  lapsed
dropped         first True:free             True:before           True:before           False:before
dropped         every closed:free           closed:before         closed:before         closed:before
reset           first True:free             True:before           True:before           False:before
reset           every closed:free           closed:before         closed:before         closed:before
failed          first True:free             True:before           True:before           False:before
failed          every 500:free              500:before            500:before            500:before
cut             first True:free             True:before           True:before           False:before
cut             every 400:free              400:before            400:before            400:before
cut-unchecked   first True:free             400:before            400:before            400:before
cut-unchecked   every True:free             400:before            400:before            400:before
empty           first True:free             True:before           True:before           False:before
empty           every 400:free              400:before            400:before            400:before
empty-unchecked first True:free             400:before            400:before            400:before
empty-unchecked every True:free             400:before            400:before            400:before
slow            every True:free             False:before          False:before          False:before
late            first True:free             True:before           True:before           False:before
late            every timeout:free          timeout:before        timeout:before        timeout:before
held-back       first True:free>free        True:before>before    True:before>before    False:before>before
held-back       every timeout:before>free   timeout:before>before timeout:before>before timeout:before>before
throttled       first True:free             True:before           True:before           False:before
throttled       every throttled:before      throttled:before      throttled:before      throttled:before
denied          first denied:before         denied:before         denied:before         denied:before
unavailable     first True:free             True:before           True:before           False:before
unavailable     every 500:before            500:before            500:before            500:before
refused         first True:free             True:before           True:before           False:before
refused         every closed:before         closed:before         closed:before         closed:before
"""

# A lock that another holds, or that is free.
READ = """
fault           sends held                     free
dropped         first holder:before            none:before
dropped         every closed:before            closed:before
reset           first holder:before            none:before
reset           every closed:before            closed:before
failed          first holder:before            none:before
failed          every 500:before               500:before
cut             first holder:before            none:before
cut             every LockError:before         LockError:before
cut-unchecked   first holder:before            none:before
cut-unchecked   every LockError:before         LockError:before
empty           first holder:before            none:before
empty           every LockError:before         LockError:before
empty-unchecked first holder:before            none:before
empty-unchecked every LockError:before         LockError:before
slow            every holder:before            none:before
late            first holder:before            none:before
late            every timeout:before           timeout:before
held-back       first holder:before>before     none:before>before
held-back       every timeout:before>before    timeout:before>before
throttled       first holder:before            none:before
throttled       every throttled:before         throttled:before
denied          first denied:before            denied:before
unavailable     first holder:before            none:before
unavailable     every 500:before               500:before
refused         first holder:before            none:before
refused         every closed:before            closed:before
"""


class Cell(NamedTuple):
    """One case of a table above."""

    fault: str
    sends: str
    state: str
    outcome: str
    item: str
    landed: str  # the item after what was held back has landed

    def __str__(self) -> str:
        return f"{self.fault}-{self.sends}-{self.state}"


def each(table: str, *states: str) -> pytest.MarkDecorator:
    """A test for each case of some columns."""
    (_, _, *names), *rows = [line.split() for line in table.split("\n") if line]
    found = []
    for fault, sends, *texts in rows:
        for state, text in zip(names, texts, strict=True):
            if state in states:
                outcome, item, landed = re.fullmatch(r"(\w+):(\w+)(?:>(\w+))?", text).groups()
                found.append(Cell(fault, sends, state, outcome, item, landed))
    return pytest.mark.parametrize("cell", found, ids=str)


@pytest.fixture(autouse=True)
def _retries_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long the SDK pauses between two sends is its own affair, and random."""
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda *_: 0)


@pytest.fixture(scope="session")
def shared(engine: engines.Engine) -> Iterator[tuple[Any, Proxy]]:
    """What the tests of an engine share: a client with a table, and a proxy."""
    with Proxy.before(engine) as proxy, closing(engines.make_client(engine)) as direct:
        engines.make_table(direct, TABLE, ttl=False)  # an engine may sweep once a minute, and in the midst of a test
        yield direct, proxy


@pytest.fixture
def cast(shared: tuple[Any, Proxy], make_client: Any) -> Iterator[Callable[..., Stage]]:
    """Make a stage; afterwards, nothing is broken any more."""
    direct, proxy = shared

    def make_locks_client(sends: int = 3, **limits: Any) -> Any:
        retries = {"mode": "standard", "total_max_attempts": sends}
        return make_client(proxy, connect_timeout=0.5, retries=retries, **limits)

    yield functools.partial(Stage, direct, proxy, make_locks_client)
    proxy.heal()


class Stage:
    """One lock, the faults that requests for it meet, and what the table has of it."""

    def __init__(self, direct: Any, proxy: Proxy, make_client: Callable[..., Any], *, fencing: bool = False) -> None:
        self.direct, self.proxy, self.make_client = direct, proxy, make_client
        # A client of its own: what a client failed at counts against its retries.
        self.locks, self.key = LockTable(TABLE, client=make_client(), fencing=fencing), f"name-{next(NUMBERS)}"
        self.releases = "UpdateItem" if fencing else "DeleteItem"

    @contextmanager
    def impatience(self, sends: int) -> Iterator[None]:
        """Give up soon, but only here: elsewhere a busy machine must not matter."""
        patient = self.locks._client
        self.locks._client = self.make_client(sends, read_timeout=0.5)
        yield
        self.locks._client = patient

    @property
    def item(self) -> dict[str, Any] | None:
        """The item as the table has it."""
        return self.direct.get_item(TableName=TABLE, Key={"LockID": {"S": self.key}}, ConsistentRead=True).get("Item")

    def put(self, owner: str, seconds: float = 60) -> None:
        """Give the lock to somebody, whoever has it."""
        item = {"LockID": {"S": self.key}, "OwnerID": {"S": owner}, "LockData": {"S": "note"}}
        item["ExpiresAt"] = {"N": str(int(time.time() + seconds))}
        self.direct.put_item(TableName=TABLE, Item=item)

    def delete(self) -> None:
        """Delete the item, whosever it is."""
        self.direct.delete_item(TableName=TABLE, Key={"LockID": {"S": self.key}})

    def lease(self, state: str, ttl: float = 30) -> Lease:
        """Acquire the lock, and let happen to it what the column of a table says."""
        lease = self.locks.acquire(self.key, ttl=0.05 if state == "lapsed" else ttl)
        if state == "lapsed":
            time.sleep(lease.remaining)
        if state in ("taken", "lapsed"):
            self.put("other/1")
        if state == "gone":
            self.delete()
        return lease

    def play(self, cell: Cell, verb: str, call: Callable[[], Any]) -> Any:
        """Call it, with the fault for requests of this verb; what it returned, if it is all as the cell says."""
        before = self.item
        fault, options = KINDS[cell.fault]
        rule = self.proxy.fault(verb, fault, nth=1 if cell.sends == "first" else EVERY, **options)
        sends = 2 if cell.sends == "every" else 5  # as long as nothing else is slow, two are made
        with self.impatience(sends) if cell.fault in TIMES_OUT else nullcontext():
            outcome, value = told(call)
        self.proxy.heal()
        assert rule.fired >= 1
        assert outcome == cell.outcome
        self.expect(cell.item, before)
        if cell.landed:
            rule.deliver()
            self.expect(cell.landed, before)
        return value

    def expect(self, what: str, before: dict[str, Any] | None) -> None:
        """Compare the item with the word for it."""
        item = self.item
        if what == "before":
            assert item == before
        elif what == "renewed":
            assert item == before | {"ExpiresAt": item["ExpiresAt"]}
            assert int(item["ExpiresAt"]["N"]) > int(before["ExpiresAt"]["N"]) + 20
        elif what == "ours":
            assert item.keys() - {"FencingToken"} == {"LockID", "OwnerID", "ExpiresAt"}
            assert ("FencingToken" in item) is self.locks.fencing
            assert item["OwnerID"]["S"].startswith("me/")
        elif self.locks.fencing:
            assert item.keys() == {"LockID", "ExpiresAt", "FencingToken"}
        else:
            assert item is None


def told(call: Callable[[], Any]) -> tuple[str, Any]:
    """What a caller is told, in a word of the tables, and what was returned."""
    try:
        value = call()
    except ClientError as error:
        code = error.response["Error"]["Code"]
        return RAISED.get(code, code), None
    except (BotoCoreError, LockError) as error:
        name = type(error).__name__
        return RAISED.get(name, name), error
    return {Lease: "lease", Holder: "holder", bool: str(value), type(None): "none"}[type(value)], value


@pytest.mark.parametrize("fencing", [False, True], ids=["", "fencing"])
@each(ACQUIRE, "free", "expired", "held")
def test_acquire(cell: Cell, fencing: bool, cast: Any) -> None:
    """Field cases 12 and 39: what was applied is a lease; an error is never "busy" and leaves nothing behind."""
    stage = cast(fencing=fencing)
    if cell.state != "free":
        stage.put("other/1", seconds=60 if cell.state == "held" else -10)
        stage.locks.holder(stage.key)  # so that the first try knows the time
    if fencing and (cell.outcome, cell.landed) == ("timeout", "ours"):
        cell = cell._replace(landed="free")  # its clean-up, the same verb, was held back too, and landed last
    got = stage.play(cell, "UpdateItem", lambda: stage.locks.acquire(stage.key, owner="me", ttl=30))
    if isinstance(got, LockHeld):
        assert got.holder.owner == "other/1"
    if isinstance(got, Lease):
        item = stage.item
        assert (item["OwnerID"]["S"], item["ExpiresAt"]["N"]) == (got.owner, str(got.expires_at))
        assert got.fencing_token == (int(item["FencingToken"]["N"]) if fencing else None)
        assert 25 < got.remaining <= 30
        assert got.release() is True


@each(RENEW, "ours", "taken", "gone")
def test_renew(cell: Cell, cast: Any) -> None:
    """What was applied is renewed, what is another's or gone is lost, and an error leaves the deadline as it was."""
    stage = cast()
    lease = stage.lease(cell.state)
    expires_at = lease.expires_at
    stage.play(cell, "UpdateItem", lambda: lease.renew(ttl=60))
    if cell.outcome == "none":
        assert 55 < lease.remaining <= 60
        assert stage.item["ExpiresAt"]["N"] == str(lease.expires_at)
    elif cell.outcome == "LockLost":
        assert not lease.held
    else:
        assert lease.expires_at == expires_at
        assert 20 < lease.remaining <= 30


@each(RESUME, "ours", "taken")
def test_resume(cell: Cell, cast: Any) -> None:
    """It is a renewal that also reads the fencing token, however its reply was cut short."""
    stage = cast(fencing=True)
    lease = stage.lease(cell.state)
    got = stage.play(cell, "UpdateItem", lambda: stage.locks.resume(stage.key, lease.owner, ttl=60))
    if isinstance(got, Lease):
        assert (got.owner, got.fencing_token) == (lease.owner, lease.fencing_token)
        assert 55 < got.remaining <= 60
        assert stage.item["ExpiresAt"]["N"] == str(got.expires_at)


def release(cell: Cell, stage: Stage) -> None:
    lease = stage.lease(cell.state)
    stage.play(cell, stage.releases, lease.release)
    assert not lease.held
    sure = cell.outcome in ("True", "False")
    assert lease.release() is (not sure and cell.state != "lapsed")
    if cell.state == "ours":
        stage.expect("free", None)
    assert lease.release() is False


@each(RELEASE, "ours", "taken", "gone", "lapsed")
def test_release(cell: Cell, cast: Any) -> None:
    """Field cases 13 and 14: what was applied is True; after an error, it is not held, and a second call releases."""
    release(cell, cast())


@each(RELEASE, "ours", "taken")
def test_release_with_fencing(cell: Cell, cast: Any) -> None:
    """Field cases 13 and 14: the same where a tombstone is left."""
    release(cell, cast(fencing=True))


@each(RELEASE, "ours", "gone", "lapsed")
def test_release_by_key_and_owner(cell: Cell, cast: Any) -> None:
    """Field case 13: the same without a lease, where it counts that nobody else holds the lock."""
    stage = cast()
    owner = stage.lease(cell.state).owner
    stage.play(cell, "DeleteItem", lambda: stage.locks.release(stage.key, owner))


@each(READ, "held", "free")
def test_holder(cell: Cell, cast: Any) -> None:
    """Field case 39: the holder of a held lock is told or an error is raised; never None."""
    stage = cast()
    if cell.state == "held":
        stage.put("other/1")
    got = stage.play(cell, "GetItem", lambda: stage.locks.holder(stage.key))
    if isinstance(got, Holder):
        assert (got.owner, got.data) == ("other/1", "note")


def test_tables_have_every_fault() -> None:
    """Each fault of the proxy has its rows, in every table, for the first send and for all."""
    assert {fault for fault, _ in KINDS.values()} == set(FAULTS)
    rows = {(fault, sends) for fault in KINDS for sends in ("first", "every")}
    for table in (ACQUIRE, RENEW, RESUME, RELEASE, READ):
        found = {tuple(line.split()[:2]) for line in table.split("\n")[2:-1]}
        assert rows - found == {("slow", "first"), ("denied", "every")}  # of each, both are the same


@pytest.mark.parametrize("fencing", [False, True])
def test_nobody_listens(fencing: bool, cast: Any) -> None:
    """Every verb raises what happened, and nothing has changed."""
    stage = cast(fencing=fencing)
    lease = stage.lease("ours")
    before, locks = stage.item, stage.locks
    verbs = [lambda: locks.acquire(stage.key), lambda: locks.acquire("new"), lease.renew, lambda: locks.holder("new")]
    with stage.proxy.down():
        for verb in [*verbs, lambda: locks.resume(stage.key, lease.owner), lease.release]:
            assert told(verb)[0] == "EndpointConnectionError"
    assert stage.item == before
    assert locks.holder("new") is None
    assert lease.release() is True


@pytest.mark.parametrize("fencing", [False, True])
def test_renewal_in_flight_does_not_outlive_the_release(fencing: bool, cast: Any) -> None:
    """Field case 15: held up for 0.5 s, until after the release, the renewal makes no item, and no error."""
    stage = cast(fencing=fencing)
    rule = stage.proxy.fault("UpdateItem", "hold", nth=2)
    with stage.locks.acquire(stage.key, ttl=30) as lease, ThreadPoolExecutor(1) as pool:
        renewal = pool.submit(lease.renew)
        rule.wait()
        time.sleep(0.5)
        assert lease.release() is True
        assert rule.deliver() == [400]
        with pytest.raises(LockLost):
            renewal.result()
    stage.expect("free", None)


def test_renewal_that_timed_out_lands_after_a_newer_one(cast: Any) -> None:
    """Field case 40: renewal 1 times out, renewal 2 succeeds, renewal 1 lands: the expiry stays."""
    stage = cast()
    lease = stage.lease("ours", ttl=5)
    rule = stage.proxy.fault("UpdateItem", "hold", nth=EVERY)
    with stage.impatience(sends=2):
        assert told(lambda: lease.renew(ttl=10))[0] == "timeout"
    stage.proxy.heal()
    lease.renew(ttl=30)
    before = stage.item
    assert before["ExpiresAt"]["N"] == str(lease.expires_at)
    assert rule.deliver() == [400, 400]
    stage.expect("before", before)


@pytest.mark.parametrize("fencing", [False, True])
def test_release_that_timed_out_lands_after_another_acquired(fencing: bool, cast: Any) -> None:
    """Field cases 14 and 40: not held from the first release on; whenever it lands, the next holder stays."""
    stage = cast(fencing=fencing)
    lease = stage.lease("ours")
    rule = stage.proxy.fault(stage.releases, "hold", nth=EVERY)
    with stage.impatience(sends=2):
        assert told(lease.release)[0] == "timeout"
    stage.proxy.heal()
    assert not lease.held
    assert told(lease.renew)[0] == "LockLost"
    assert lease.release() is True
    other = stage.locks.acquire(stage.key, owner="me")
    before = stage.item
    assert rule.deliver() == [400, 400]
    stage.expect("before", before)
    assert other.release() is True
