"""Acquiring: one conditional write, which only a free lock lets through."""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from faults import after, bare

from simplelock import LockHeld

PRINT_OWNER = """
import random
import boto3, botocore.awsrequest
import simplelock

class Empty:
    def stream(self):
        return [b"{}"]

def accept(request, **_):
    return botocore.awsrequest.AWSResponse(request.url, 200, {}, Empty())

random.seed(0)
client = boto3.client("dynamodb")
client.meta.events.register("before-send", accept)
print(simplelock.LockTable("Locks", client=client).acquire("a", owner="worker").owner)
"""


def test_item_is_the_name_the_owner_and_the_expiry(locks, stored):
    """An item has three attributes, unless it is asked for more."""
    lease = locks.acquire("a")
    assert stored() == {
        "LockID": {"S": "a"},
        "OwnerID": {"S": lease.owner},
        "ExpiresAt": {"N": str(lease.expires_at)},
    }


def test_expiry_is_a_whole_number_of_ten_digits(clock, locks, stored):
    """Field cases 9 and 21: DynamoDB deletes by a number of whole seconds, and by nothing else."""
    clock.tick(0.7)
    locks.acquire("a", ttl=30.5)
    assert re.fullmatch(r"\d{10}", stored()["ExpiresAt"]["N"])
    assert 1 <= int(stored()["ExpiresAt"]["N"]) - (time.time() + 30.5) <= 4


def test_holder_can_be_written_as_json(locks):
    """Field case 9: no Decimal reaches the caller."""
    locks.acquire("a", data="note")
    fields = dataclasses.asdict(locks.holder("a"))
    assert json.loads(json.dumps(fields)) == fields


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Kolkata"])
def test_expiry_does_not_depend_on_the_time_zone(zone, clock, locks, monkeypatch):
    """Field case 23: the same instant gives the same expiry everywhere."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        lease = locks.acquire("a", ttl=60)
    time.tzset()
    assert lease.expires_at == 1767225600 + 62
    assert lease.remaining > 59


def test_try_on_a_held_lock_is_none(locks, rival, stored):
    """Refused, the item is another's: held, and the item stays as it is."""
    locks.acquire("a")
    before = stored()
    assert rival.try_acquire("a", data="mine now") is None
    assert stored() == before


def test_refusal_says_who_holds_the_lock(locks, rival, sent):
    """Refused, the item is another's: the error tells of the holder, for no request more."""
    lease = locks.acquire("a", ttl=60, data="since noon")
    sent.clear()
    with pytest.raises(LockHeld) as caught:
        rival.acquire("a")
    assert sent == ["UpdateItem"]
    assert caught.value.key == "a"
    assert caught.value.holder.owner == lease.owner
    assert caught.value.holder.data == "since noon"
    assert caught.value.holder.expires_at == lease.expires_at
    assert 59 < caught.value.holder.expires_in <= 64
    for part in ("'a'", lease.owner, "since noon"):
        assert part in str(caught.value)


def test_second_acquisition_by_the_same_process_is_refused(locks, stored):
    """Field case 6: a lock is not reentrant, and the first lease stays as it was."""
    lease = locks.acquire("a", owner="same")
    before = stored()
    assert locks.try_acquire("a", owner="same") is None
    with pytest.raises(LockHeld):
        locks.acquire("a", owner="same")
    assert stored() == before
    assert lease.held
    assert lease.release()


def test_expired_lock_is_free_while_its_item_lingers(clock, locks, rival, stored):
    """Field case 20: expiry frees a lock, not the deletion that may come days later."""
    locks.acquire("a", ttl=60)
    clock.tick(3 * 86400)
    lease = rival.try_acquire("a")
    assert lease.held
    assert stored()["OwnerID"]["S"] == lease.owner


def test_lock_is_not_free_before_its_expiry_has_passed(clock, locks, rival, stored, sent):
    """Field case 24: nothing is cut off a lease, and at the very moment of expiry it holds yet: one try is enough."""
    clock.move_to("1970-01-01 00:16:40.900000")  # second 1000.9
    locks.acquire("a", ttl=1)
    expiry = int(stored()["ExpiresAt"]["N"])
    assert expiry >= 1002
    clock.tick(expiry - time.time())
    assert rival.holder("a").expires_in == pytest.approx(0)
    sent.clear()
    assert rival.try_acquire("a") is None
    assert sent == ["UpdateItem"]
    clock.tick(0.01)
    assert rival.try_acquire("a")


def test_former_holders_note_does_not_stay(clock, locks, rival, stored):
    """An acquisition removes the note of whoever held the lock before."""
    locks.acquire("a", ttl=1, data="old")
    clock.tick(10)
    lease = rival.acquire("a")
    assert "LockData" not in stored()
    assert lease.data is None
    clock.tick(100)
    locks.acquire("a", data="new")
    assert stored()["LockData"] == {"S": "new"}


def test_owner_is_a_label_and_a_fresh_nonce(locks):
    """Field case 31: the owner says who, and no two acquisitions have the same."""
    one, two = locks.acquire("a"), locks.acquire("b")
    label = f"{socket.gethostname()}:{os.getpid()}"
    assert re.fullmatch(rf"{re.escape(label)}/\w{{16,}}", one.owner)
    assert one.owner != two.owner
    named = [locks.acquire(key, owner="worker/7").owner for key in "cd"]
    assert all(owner.startswith("worker/7/") for owner in named)
    assert named[0] != named[1]


def test_owners_differ_between_processes_seeded_alike():
    """Field case 31: a nonce does not come from `random`, which may start anywhere alike."""
    command = [sys.executable, "-c", PRINT_OWNER]
    path = os.pathsep.join(sys.path)
    children = [
        subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    owners = [child.communicate()[0].strip() for child in children]
    assert all(owner.startswith("worker/") for owner in owners)
    assert owners[0] != owners[1]


def test_acquisition_and_release_send_two_requests(locks, sent):
    """A cycle is two writes; with its clock known, a process asks for nothing else."""
    sent.clear()
    with locks.acquire("a"):
        pass
    assert sent == ["UpdateItem", "DeleteItem"]


def test_warm_try_on_a_dead_holders_lock_sends_one_request(clock, locks, rival, sent):
    """Whoever knows DynamoDB's clock takes over with the first write."""
    locks.acquire("a", ttl=5)
    rival.holder("other")
    clock.tick(10)
    sent.clear()
    assert rival.try_acquire("a")
    assert sent == ["UpdateItem"]


def test_cold_try_on_a_dead_holders_lock_sends_two_requests(clock, locks, rival, sent):
    """Whoever does not is refused once, learns the time from the refusal, and takes over."""
    locks.acquire("a", ttl=5)
    clock.tick(10)
    sent.clear()
    assert rival.try_acquire("a")
    assert sent == ["UpdateItem", "UpdateItem"]


def test_refusal_without_the_item_is_followed_by_one_read(locks, rival, meets, sent):
    """Refused, no item in the reply: one consistent read says who holds the lock."""
    lease = locks.acquire("a")
    sent.clear()
    meets("UpdateItem", [bare])
    with pytest.raises(LockHeld) as caught:
        rival.acquire("a")
    assert caught.value.holder.owner == lease.owner
    assert sent == ["UpdateItem", "GetItem"]


@pytest.mark.parametrize("wait", [0, 30])
def test_holder_that_vanishes_after_the_refusal_is_no_holder(wait, clock, locks, rival, meets):
    """Field case 18: refused, no item in the reply, and none in the table by now: try again."""
    former = locks.acquire("a")
    meets("UpdateItem", [bare])
    meets("GetItem", [after(former.release)])
    began = time.monotonic()
    assert rival.acquire("a", wait=wait).held
    assert time.monotonic() - began < 2


def test_signal_handlers_are_left_alone(locks):
    """Field case 32: how a process ends is its own affair."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with locks.acquire("a") as lease, lease.heartbeat(on_lost=print):
        during = {number: signal.getsignal(number) for number in signal.valid_signals()}
    assert during == before
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
