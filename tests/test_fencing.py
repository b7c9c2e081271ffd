"""Fencing: tokens that grow with every acquisition of a name, whatever happened in between."""

import time

import pytest
from faults import cut, deliver, dropped, held_back, lost, slow

from simplelock import LockLost, LockTable

HOUR = 3600


@pytest.fixture
def fenced(make_table):
    """A lock table with fencing."""
    return make_table(fencing=True)


@pytest.fixture
def cold(fenced, client):
    """The same lock table in another process, which has not spoken to DynamoDB yet."""
    return LockTable("Locks", client=client, fencing=True)


def test_without_fencing_there_is_no_token(locks, rival, stored):
    """Neither lease, holder nor item has one where it was not asked for."""
    assert locks.acquire("a").fencing_token is None
    assert rival.holder("a").fencing_token is None
    assert "FencingToken" not in stored()


def test_token_is_the_items_and_the_holders(clock, fenced, cold, stored):
    """Lease, item and holder show one token, a whole number above the time in milliseconds."""
    token = fenced.acquire("a").fencing_token
    assert stored()["FencingToken"] == {"N": str(token)}
    assert cold.holder("a").fencing_token == token
    assert time.time() * 1000 <= token <= (time.time() + 3) * 1000


@pytest.mark.parametrize("end", ["release", "break", "expiry"])
def test_token_grows_over_the_end_of_a_lease(end, clock, fenced, cold):
    """However a lease ends, the next one's token is higher, whoever acquires it."""
    tokens = []
    for locks in (fenced, cold, fenced):
        lease = locks.acquire("a", ttl=5)
        tokens.append(lease.fencing_token)
        if end == "release":
            assert lease.release() is True
        elif end == "break":
            assert cold.release("a", lease.owner) is True
        else:
            clock.tick(8)
    assert tokens == sorted(set(tokens))


def test_token_does_not_change_while_the_lock_is_held(clock, fenced, stored):
    """A renewal is no acquisition."""
    lease = fenced.acquire("a", ttl=10)
    token = lease.fencing_token
    clock.tick(5)
    lease.renew()
    assert lease.fencing_token == token
    assert stored()["FencingToken"] == {"N": str(token)}


@pytest.mark.parametrize("behind", [HOUR, 5 * HOUR])
def test_token_grows_over_the_sweep_of_the_tombstone(behind, clock, host, client, fenced, cold):
    """When TTL has swept the item, a first try from a host whose clock is hours slow goes on."""
    with fenced.acquire("a") as lease:
        pass
    clock.tick(HOUR + 4)
    client.delete_item(TableName="Locks", Key={"LockID": {"S": "a"}})
    host.set(wall=-behind)
    assert cold.acquire("a").fencing_token > lease.fencing_token


def test_token_grows_after_a_host_whose_clock_is_fast(clock, host, client, fenced, cold):
    """A holder whose clock is hours fast does not push the count beyond DynamoDB's time."""
    with host.off(wall=5 * HOUR), fenced.acquire("a") as lease:
        pass
    clock.tick(HOUR + 4)
    client.delete_item(TableName="Locks", Key={"LockID": {"S": "a"}})
    assert cold.acquire("a").fencing_token > lease.fencing_token


def test_cold_try_reads_once_before_it_writes(fenced, sent):
    """A token must not start from a local clock, so that a first try asks for the time."""
    sent.clear()
    fenced.acquire("a").release()
    assert sent == ["GetItem", "UpdateItem", "UpdateItem"]
    sent.clear()
    fenced.acquire("a").release()
    assert sent == ["UpdateItem", "UpdateItem"]


@pytest.mark.parametrize("fault", [lost, dropped])
def test_acquisition_whose_reply_is_lost_counts_once(fault, clock, fenced, meets, stored):
    """The SDK's second send finds the item of its first, and takes owner and token from it."""
    first = fenced.acquire("a")
    first.release()
    meets("UpdateItem", [fault])
    lease = fenced.acquire("a")
    assert lease.fencing_token == first.fencing_token + 1
    assert stored()["FencingToken"] == {"N": str(lease.fencing_token)}
    assert lease.held


def test_acquisition_whose_reply_is_cut_reads_its_token(clock, fenced, meets, sent, stored):
    """Field case 39: a 200 without its body has no token, so that one read brings it."""
    fenced.acquire("b")
    meets("UpdateItem", [cut])
    meets("GetItem", [cut])  # nor does a read without its body count
    sent.clear()
    lease = fenced.acquire("a")
    assert sent == ["UpdateItem", "GetItem", "GetItem"]
    assert stored()["FencingToken"] == {"N": str(lease.fencing_token)}


def test_release_leaves_a_tombstone_for_an_hour(clock, fenced, stored):
    """Key, token and an expiry in an hour are kept; neither owner nor note is."""
    lease = fenced.acquire("a", data="nightly")
    clock.tick(5)
    assert lease.release() is True
    item = stored()
    assert item.keys() == {"LockID", "ExpiresAt", "FencingToken"}
    assert item["FencingToken"] == {"N": str(lease.fencing_token)}
    assert HOUR <= int(item["ExpiresAt"]["N"]) - time.time() <= HOUR + 3


def test_tombstone_is_no_holder(fenced, cold, locks):
    """Neither `holder` nor `holders` shows it, with fencing or without."""
    fenced.acquire("a").release()
    fenced.acquire("b")
    for table in (fenced, cold, locks):
        assert table.holder("a") is None
        assert [holder.key for holder in table.holders()] == ["b"]


def test_tombstone_is_free_at_once(clock, fenced, cold, rival, sent):
    """The first try takes it, with fencing or without."""
    fenced.acquire("a").release()
    sent.clear()
    lease = rival.acquire("a")
    assert sent == ["UpdateItem"]
    assert lease.held
    assert rival.holder("a").owner == lease.owner


def test_lease_whose_release_left_a_tombstone_is_over(clock, fenced, cold, stored):
    """Whoever still counts on a lease that was broken is told so, and the tombstone stays."""
    lease = fenced.acquire("a")
    cold.release("a", lease.owner)
    item = stored()
    with pytest.raises(LockLost):
        lease.renew()
    assert lease.release() is False
    assert stored() == item


@pytest.mark.parametrize("fault", [lost, dropped])
def test_release_whose_reply_is_lost_is_true(fault, clock, fenced, meets, stored):
    """Field case 13: the SDK's second send finds a tombstone: its first one made it."""
    lease = fenced.acquire("a")
    meets("UpdateItem", [fault])
    assert lease.release() is True
    assert "OwnerID" not in stored()
    lease = fenced.acquire("a")
    meets("UpdateItem", [fault])
    assert fenced.release("a", lease.owner) is True


def test_release_on_a_first_send_that_finds_a_tombstone_is_false(fenced, cold):
    """Field case 13: nothing was lost here, so it was another who released it."""
    lease = fenced.acquire("a")
    assert cold.release("a", lease.owner) is True
    assert fenced.release("a", lease.owner) is False
    assert lease.release() is False


@pytest.mark.parametrize("fault", [None, cut])
def test_resumed_lease_has_the_token(fault, clock, fenced, cold, meets):
    """Going on elsewhere is no acquisition: the token is the one in the table."""
    lease = fenced.acquire("a")
    meets("UpdateItem", [fault])
    assert cold.resume("a", lease.owner).fencing_token == lease.fencing_token


def test_late_send_of_an_acquisition_does_not_count_back(clock, fenced, cold, meets, stored):
    """A first send that is delivered after the lock changed hands twice changes nothing."""
    late = []
    fenced.acquire("b")
    meets("UpdateItem", [held_back(late)])
    with fenced.acquire("a"):
        pass
    lease = cold.acquire("a")
    item = stored()
    deliver(*late)
    assert stored() == item
    assert lease.held


def test_store_that_compares_tokens_refuses_the_late_writer(clock, fenced, cold):
    """What fencing is for: the paused holder wakes after the next one has written."""
    seen = 0
    late = fenced.acquire("a", ttl=5)
    clock.tick(10)
    for lease, accepted in ((cold.acquire("a"), True), (late, False)):
        assert (lease.fencing_token > seen) is accepted
        seen = max(seen, lease.fencing_token)


def test_token_of_a_later_try_is_not_that_of_an_earlier_one(driven, make_table, meets):
    """A grant whose reply came too late is taken by another; the waiter's next one has a higher token."""
    locks, rival = (make_table(fencing=True, ttl=5) for _ in range(2))
    holder = []

    def take() -> None:
        driven.sleep(30)
        holder.append(rival.acquire("a"))
        driven.later(3, holder[0].release)

    meets("UpdateItem", [slow(0, pause=lambda _: take())])
    lease = locks.acquire("a", wait=60)
    assert lease.held
    assert lease.fencing_token > holder[0].fencing_token
