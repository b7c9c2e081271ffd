"""Who holds what: `holder` and `holders` read, and never take, a lock."""

import dataclasses
import time

import pytest
from faults import cut

from simplelock import Holder, LockError, LockTable, LockTableError

NO_LOCKS = [
    {"Total": {"N": "5"}},
    {"OwnerID": {"S": "web/1"}},
    {"ExpiresAt": {"N": "1893456000"}},
    {"OwnerID": {"N": "7"}, "ExpiresAt": {"N": "1893456000"}},
    {"OwnerID": {"S": "web/1"}, "ExpiresAt": {"S": "1893456000"}},
]


def test_free_lock_has_no_holder(locks, sent):
    """Nobody is None, found out by one read."""
    sent.clear()
    assert locks.holder("a") is None
    assert sent == ["GetItem"]


def test_holder_says_what_the_table_says(clock, locks, rival, sent):
    """Key, owner, expiry, the seconds to it, and the note; another process reads the same."""
    lease = locks.acquire("a", owner="web-1", data="nightly", ttl=60)
    clock.tick(20)
    sent.clear()
    holder = rival.holder("a")
    assert holder == Holder(
        key="a",
        owner=lease.owner,
        expires_at=lease.expires_at,
        expires_in=pytest.approx(lease.expires_at - time.time(), abs=1),
        data="nightly",
    )
    assert isinstance(holder.expires_at, int)
    assert sent == ["GetItem"]


def test_holder_is_frozen(locks):
    """A record of what was so does not change."""
    locks.acquire("a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        locks.holder("a").owner = "me"


def test_expired_lock_that_nobody_took_is_still_shown(clock, locks, rival):
    """Who died shows, with `expires_in` below 0, and the lock is free to be taken."""
    lease = locks.acquire("a", ttl=5)
    clock.tick(100)
    assert rival.holder("a").owner == lease.owner
    assert rival.holder("a").expires_in < -90
    assert [holder.expires_in < -90 for holder in rival.holders()] == [True]
    assert rival.try_acquire("a")


def test_reads_are_consistent(locks, client):
    """`holder` and `holders` show what was written just before."""
    reads = []
    for operation in ("GetItem", "Scan"):
        client.meta.events.register(
            f"before-parameter-build.dynamodb.{operation}",
            lambda params, **_: reads.append(params["ConsistentRead"]),
        )
    locks.holder("a")
    list(locks.holders())
    assert reads == [True, True]


def test_holders_are_all_of_every_page(locks, client, sent):
    """A table of more than 1 MB comes in pages; none is left out, none comes twice."""
    keys = {locks.acquire(f"{number}", data="x" * 390_000).key for number in range(6)}
    sent.clear()
    assert sorted(holder.key for holder in locks.holders()) == sorted(keys)
    assert len(sent) >= 3


def test_holders_are_read_as_they_are_asked_for(locks, sent):
    """No page is read before it is needed."""
    for number in range(6):
        locks.acquire(f"{number}", data="x" * 390_000)
    sent.clear()
    holders = locks.holders()
    assert sent == []
    next(holders)
    assert sent == ["Scan"]


def test_holders_of_an_empty_table_are_none(locks):
    """A table without locks has no holders."""
    assert list(locks.holders()) == []


@pytest.mark.parametrize("item", NO_LOCKS)
def test_item_that_is_no_lock_has_no_holder(item, locks, client):
    """`holder` says that this is not a lock; it is not None, which is a free lock."""
    client.put_item(TableName="Locks", Item={"LockID": {"S": "a"}, **item})
    with pytest.raises(LockTableError, match=r"'a'.*not a lock"):
        locks.holder("a")


@pytest.mark.parametrize("locked", [[], ["a"], ["a", "z"]])
def test_holders_pass_over_items_that_are_no_locks(locked, locks, client):
    """Other items among the locks are left out, wherever they come."""
    for key in locked[:1]:
        locks.acquire(key)
    for number, item in enumerate(NO_LOCKS):
        client.put_item(TableName="Locks", Item={"LockID": {"S": f"m{number}"}, **item})
    for key in locked[1:]:
        locks.acquire(key)
    assert sorted(holder.key for holder in locks.holders()) == locked


def test_holders_are_those_of_the_sort_key(make_table):
    """Of a table that others share, only the locks under our sort key are shown."""
    ours = make_table("Shared", sort_key=("Kind", "lock"))
    theirs = LockTable("Shared", client=ours.client, sort_key=("Kind", "lease"))
    mine = [ours.acquire(key).owner for key in ("a", "b")]
    other = theirs.acquire("a")
    assert sorted(holder.owner for holder in ours.holders()) == sorted(mine)
    assert [holder.owner for holder in theirs.holders()] == [other.owner]
    assert ours.holder("a").owner == mine[0]
    assert theirs.holder("b") is None


def test_holders_are_found_under_other_names(make_table):
    """Reserved words as attribute names are honoured here too."""
    locks = make_table("Other", key_name="Name", expires_name="ttl")
    lease = locks.acquire("a")
    assert [holder.owner for holder in locks.holders()] == [lease.owner]
    assert locks.holder("a").expires_at == lease.expires_at


def test_reply_that_was_cut_short_is_read_again(locks, meets, sent):
    """Field case 39: a 200 without its body is neither a free lock nor an empty table."""
    lease = locks.acquire("a")
    meets("GetItem", [cut, cut])
    meets("Scan", [cut, cut])
    sent.clear()
    assert locks.holder("a").owner == lease.owner
    assert [holder.owner for holder in locks.holders()] == [lease.owner]
    assert sent == ["GetItem"] * 3 + ["Scan"] * 3


def test_replies_that_are_all_cut_short_are_an_error(locks, meets, sent):
    """Field case 39: when no whole reply is to be had, that is said; never None, never empty."""
    locks.acquire("a")
    meets("GetItem", [cut] * 9)
    meets("Scan", [cut] * 9)
    with pytest.raises(LockError, match="cut short"):
        locks.holder("a")
    with pytest.raises(LockError, match="cut short"):
        list(locks.holders())


def test_missing_table_is_an_error(client):
    """There is no telling who holds what in a table that is not there."""
    locks = LockTable("Missing", client=client)
    with pytest.raises(LockTableError, match="Missing"):
        locks.holder("a")
    with pytest.raises(LockTableError, match="Missing"):
        list(locks.holders())


def test_token_that_another_program_wrote_is_read_as_a_whole_number(locks, client):
    """One odd item does not keep the others from being listed."""
    odd = {"LockID": {"S": "odd"}, "OwnerID": {"S": "web/1"}, "ExpiresAt": {"N": "1893456000.5"}}
    client.put_item(TableName="Locks", Item=odd | {"FencingToken": {"N": "1.5"}})
    locks.acquire("a")
    assert {holder.key for holder in locks.holders()} == {"a", "odd"}
    assert locks.holder("odd").fencing_token == 1
