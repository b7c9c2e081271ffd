"""Errors of DynamoDB and of the network: passed on as they are, never "busy", nothing left over."""

import itertools
import time

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    NoCredentialsError,
    ReadTimeoutError,
)
from faults import bare, cut, deliver, failed, interrupted, lost, refused, unavailable, unsent

from simplelock import LockError, LockLost, LockTable, LockTableError

AT_ONCE = [  # the SDK does not send these again
    "AccessDeniedException",
    "ExpiredTokenException",
    "InvalidSignatureException",
    "UnrecognizedClientException",
]
THROTTLED = ["ProvisionedThroughputExceededException", "ThrottlingException"]
UNSERVED = ["ResourceNotFoundException", "ValidationException"]
DENIED, EXPIRED = refused("AccessDeniedException"), refused("ExpiredTokenException")
CTRL_C = (KeyboardInterrupt, [interrupted])
TROUBLES = [  # an error, and what a request meets to end in it
    (ClientError, [DENIED]),
    (ClientError, [unavailable] * 3),
    (ConnectTimeoutError, [unsent] * 3),
    (ReadTimeoutError, [lost] * 3),
    CTRL_C,
]
TROUBLE_IDS = ["denied", "server error", "unreachable", "reply lost", "Ctrl-C"]


@pytest.fixture(autouse=True)
def _retries_take_no_time(clock):
    """Let the SDK's pauses between two sends pass at once."""


@pytest.fixture
def cold(client):
    """A table of locks that has not spoken to DynamoDB yet."""

    def make(**options):
        return LockTable("Locks", client=client, **options)

    return make


def no_credentials(request):
    raise NoCredentialsError


def without_metadata(request):
    deliver(request)
    raise ClientError({"Error": {"Code": "Odd"}}, "UpdateItem")


def try_once(locks):
    return locks.try_acquire("a")


def wait_long(locks):
    return locks.acquire("a", wait=3600)


@pytest.mark.parametrize("code", AT_ONCE + THROTTLED)
def test_refusals_of_dynamodb_are_passed_on(code, locks, meets):
    """Field cases 17 and 26: no permission, an old signature, throttling: raised, never "busy"."""
    for operation in ("UpdateItem", "DeleteItem", "GetItem", "Scan"):
        meets(operation, itertools.repeat(refused(code)))
    for verb in (
        try_once,
        wait_long,
        lambda locks: locks.acquire_all(["a"]).__enter__(),
        lambda locks: locks.resume("a", "host:1/nonce"),
        lambda locks: locks.release("a", "host:1/nonce"),
        lambda locks: locks.holder("a"),
        lambda locks: list(locks.holders()),
    ):
        with pytest.raises(ClientError) as caught:
            verb(locks)
        assert caught.value.response["Error"]["Code"] == code


@pytest.mark.parametrize("code", UNSERVED)
@pytest.mark.parametrize("verb", [try_once, wait_long])
def test_requests_that_the_table_cannot_serve_are_its_errors(verb, code, locks, meets):
    """Field case 17: no such table, or other keys: raised at once, however long we would wait."""
    meets("UpdateItem", itertools.repeat(refused(code)))
    with pytest.raises(LockTableError, match=code) as caught:
        verb(locks)
    assert isinstance(caught.value.__cause__, ClientError)


@pytest.mark.parametrize(("error", "faults"), TROUBLES, ids=TROUBLE_IDS)
@pytest.mark.parametrize("verb", [try_once, wait_long])
def test_errors_of_server_and_network_are_passed_on(verb, error, faults, locks, meets):
    """Field case 17: whatever goes wrong, nobody is told that the lock is held by another."""
    meets("UpdateItem", faults)
    with pytest.raises(error):
        verb(locks)


def test_refused_look_of_a_waiter_is_passed_on(locks, rival, meets):
    """Field case 17: a waiter that may not look is told so, not left waiting."""
    locks.acquire("a")
    meets("GetItem", [DENIED])
    with pytest.raises(ClientError, match="AccessDenied"):
        rival.acquire("a", wait=30)


@pytest.mark.parametrize(
    "fault", [*map(refused, AT_ONCE + UNSERVED), no_credentials], ids=[*AT_ONCE, *UNSERVED, "none"]
)
def test_acquisition_that_was_not_applied_is_not_cleaned_up(fault, locks, meets, sent):
    """What was refused at its first send, or never sent, left nothing to delete."""
    sent.clear()
    meets("UpdateItem", [fault])
    with pytest.raises((ClientError, LockTableError, NoCredentialsError)):
        locks.try_acquire("a")
    assert sent == ["UpdateItem"]


@pytest.mark.parametrize(
    ("error", "faults"),
    [
        (ReadTimeoutError, [lost] * 3),
        (ClientError, [failed] * 3),
        (ClientError, [failed, DENIED]),
        (ClientError, [failed, refused("ThrottlingException"), EXPIRED]),
        (LockTableError, [failed, refused("ValidationException")]),
        (ConnectTimeoutError, [lost, unsent, unsent]),
        (ClientError, [without_metadata]),
        CTRL_C,
        (KeyboardInterrupt, [failed, interrupted]),
    ],
    ids=[
        "replies lost",
        "server errors",
        "denied when sent again",
        "throttled, then expired, when sent again",
        "invalid when sent again",
        "unreachable when sent again",
        "unclear error",
        "Ctrl-C",
        "Ctrl-C when sent again",
    ],
)
def test_failed_acquisition_leaves_nothing_behind(error, faults, locks, meets, stored):
    """Any other failure, or an interrupt: what may have been applied is undone, then raised."""
    meets("UpdateItem", faults)
    with pytest.raises(error):
        locks.try_acquire("a")
    assert stored() is None


def test_server_error_to_a_client_that_sends_once_leaves_nothing_behind(locks, stored):
    """It was not sent again, but a server error says nothing of whether it was applied."""
    once = boto3.client("dynamodb", config=Config(retries={"total_max_attempts": 1}))
    once.meta.events.register("before-send.dynamodb.UpdateItem", lambda request, **_: failed(request))
    with pytest.raises(ClientError):
        LockTable("Locks", client=once).try_acquire("a")
    assert stored() is None


def test_failed_acquisition_with_fencing_leaves_nothing_behind(locks, cold, meets):
    """What may have been applied is undone by a tombstone, for the count goes on."""
    meets("UpdateItem", [lost] * 3)
    with pytest.raises(ReadTimeoutError):
        cold(fencing=True).try_acquire("a")
    assert locks.holder("a") is None
    assert locks.try_acquire("a")


@pytest.mark.parametrize(("error", "faults"), TROUBLES, ids=TROUBLE_IDS)
@pytest.mark.parametrize("first", [[None], [failed, None]], ids=["granted", "found granted"])
def test_acquisition_whose_expiry_cannot_be_put_right_leaves_nothing_behind(
    first, error, faults, locks, cold, host, meets, stored
):
    """It was granted, by a wrong wall clock: with an error of the second write it is undone."""
    meets("UpdateItem", [*first, *faults])
    with host.off(wall=3600), pytest.raises(error):
        cold().try_acquire("a")
    assert stored() is None


@pytest.mark.parametrize(
    ("error", "faults"),
    [*TROUBLES, (LockError, [cut] * 3)],
    ids=[*TROUBLE_IDS, "cut short"],
)
def test_acquisition_that_cannot_be_read_again_leaves_nothing_behind(error, faults, locks, meets, stored):
    """It was applied, but its answer needs a read: with an error of that it is undone."""
    meets("UpdateItem", [failed, bare])
    meets("GetItem", faults)
    with pytest.raises(error):
        locks.try_acquire("a")
    meets("GetItem", [])
    assert stored() is None


@pytest.mark.parametrize("error", [ReadTimeoutError, KeyboardInterrupt])
def test_failing_clean_up_does_not_replace_the_error(error, locks, meets, sent):
    """The acquisition's own error is the one that is raised."""
    meets("UpdateItem", dict(TROUBLES)[error])
    meets("DeleteItem", [DENIED])
    with pytest.raises(error):
        locks.try_acquire("a")
    assert sent[-1] == "DeleteItem"


@pytest.mark.parametrize(
    ("error", "faults"),
    [*TROUBLES, (LockTableError, [refused("ResourceNotFoundException")])],
    ids=[*TROUBLE_IDS, "no table"],
)
def test_failed_renewal_keeps_the_deadline(error, faults, locks, meets):
    """Any other failure: raised; the lease ends when it would have, and can be renewed again."""
    lease = locks.acquire("a", ttl=60)
    time.sleep(20)
    ends = time.monotonic() + lease.remaining
    meets("UpdateItem", faults)
    with pytest.raises(error):
        lease.renew()
    assert time.monotonic() + lease.remaining == pytest.approx(ends)
    lease.check()
    lease.renew()
    assert 59 < lease.remaining <= 60


def test_lease_that_could_not_be_renewed_runs_out(locks, meets):
    """Without a reply nothing is assumed, even where the renewal was applied."""
    lease = locks.acquire("a", ttl=60)
    time.sleep(50)
    meets("UpdateItem", [lost] * 3)
    with pytest.raises(ReadTimeoutError):
        lease.renew()
    time.sleep(11)
    assert not lease.held
    with pytest.raises(LockLost):
        lease.check()


@pytest.mark.parametrize(("error", "faults"), TROUBLES, ids=TROUBLE_IDS)
def test_failed_release_can_be_repeated(error, faults, locks, meets, stored):
    """Field case 14: any other failure: raised; the lease is over, and a second call releases."""
    lease = locks.acquire("a")
    meets("DeleteItem", faults)
    with pytest.raises(error):
        lease.release()
    assert not lease.held
    for verb in (lease.check, lease.renew):
        with pytest.raises(LockLost, match="released"):
            verb()
    assert lease.release() is True
    assert stored() is None


def test_failed_release_in_a_body_is_repeated_on_the_way_out(locks, meets, stored):
    """Field case 14: leaving the `with` calls it again."""
    with locks.acquire("a") as lease:
        meets("DeleteItem", [DENIED])
        with pytest.raises(ClientError):
            lease.release()
    assert stored() is None
