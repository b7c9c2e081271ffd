"""Releasing: one delete, of nothing but what is ours."""


def test_release_deletes_the_item(locks, stored):
    """A release that is granted is True, and the lock is free at once."""
    lease = locks.acquire("a")
    assert lease.release() is True
    assert stored() is None
    assert not lease.held
    assert locks.try_acquire("a")


def test_release_of_a_released_lease_sends_nothing(locks, rival, sent, stored):
    """What is released is not ours any more, and whoever came since keeps it."""
    lease = locks.acquire("a")
    lease.release()
    other = rival.acquire("a")
    sent.clear()
    assert lease.release() is False
    assert sent == []
    assert stored()["OwnerID"]["S"] == other.owner


def test_late_release_does_not_touch_the_next_holders_lock(clock, locks, rival, stored):
    """Field case 7: refused, the item is another's: False, and it stays byte for byte."""
    lease = locks.acquire("a", ttl=5)
    clock.tick(10)
    rival.acquire("a")
    before = stored()
    assert lease.release() is False
    assert stored() == before


def test_release_of_a_deleted_item_is_false(locks, client, stored):
    """Field case 13: refused, no item, sent only once: somebody deleted it, so it was not ours."""
    lease = locks.acquire("a")
    client.delete_item(TableName="Locks", Key={"LockID": {"S": "a"}})
    assert lease.release() is False
    assert stored() is None


def test_release_of_an_expired_lock_that_nobody_took_is_true(clock, locks, stored):
    """The owner is what counts: an item that is still ours is ours to delete."""
    lease = locks.acquire("a", ttl=5)
    clock.tick(100)
    assert lease.release() is True
    assert stored() is None


def test_lock_can_be_released_by_key_and_owner(locks, rival, stored):
    """Who knows the whole owner, such as from `holder`, can break the lock."""
    lease = locks.acquire("a", owner="worker")
    assert rival.release("a", "worker") is False
    assert rival.release("b", lease.owner) is False
    assert stored()["OwnerID"]["S"] == lease.owner
    assert rival.release("a", rival.holder("a").owner) is True
    assert stored() is None
    assert rival.release("a", lease.owner) is False
