"""What callers pass is checked before anything is sent, and the error names the limit."""

import decimal
import math

import boto3
import pytest

from simplelock import LockTable

KEY_TAKERS = [
    lambda locks, key: locks.try_acquire(key),
    lambda locks, key: locks.acquire(key),
    lambda locks, key: locks.acquire_all(["good", key]),
    lambda locks, key: locks.resume(key, "host:1/nonce"),
    lambda locks, key: locks.release(key, "host:1/nonce"),
    lambda locks, key: locks.holder(key),
]
TTL_TAKERS = [
    lambda locks, ttl: LockTable("Locks", client=locks.client, ttl=ttl),
    lambda locks, ttl: locks.try_acquire("a", ttl=ttl),
    lambda locks, ttl: locks.acquire("a", ttl=ttl),
    lambda locks, ttl: locks.acquire_all(["a"], ttl=ttl),
    lambda locks, ttl: locks.resume("a", "host:1/nonce", ttl=ttl),
]
WAIT_TAKERS = [
    lambda locks, wait: locks.acquire("a", wait=wait),
    lambda locks, wait: locks.acquire_all(["a"], wait=wait),
]
NO_TEXTS = [None, 5, b"x"]
NO_TTLS = [0, -1, -0.5, math.nan, math.inf, -math.inf, 366 * 86400 + 1, 1_767_225_600_000]
NO_NUMBERS = [True, "60", decimal.Decimal(60), [60]]


@pytest.fixture(scope="module")
def silent():
    """A client, and the requests that were made through it."""
    client, requests = boto3.client("dynamodb", "eu-west-1"), []
    client.meta.events.register("before-call", lambda model, **_: requests.append(model.name))
    return client, requests


@pytest.fixture
def unsent(silent):
    """A lock table to which nothing has been sent when the test is over."""
    client, requests = silent
    yield LockTable("Locks", client=client)
    assert requests == []


@pytest.mark.parametrize("key", ["k" * 2049, "字" * 683, ""], ids=["ASCII", "UTF-8", "empty"])
def test_key_of_wrong_length_is_refused(key, unsent):
    """Field cases 1 and 2: a key is 1 to 2048 bytes, in UTF-8."""
    for take in KEY_TAKERS:
        with pytest.raises(ValueError, match="2048 bytes"):
            take(unsent, key)


@pytest.mark.parametrize("key", ["k" * 2048, "字" * 682, "k", "\0 '\"/%"])
def test_key_within_limits_is_taken(key, locks):
    """Field case 1: any other text of up to 2048 bytes is a key."""
    with locks.acquire(key) as lease:
        assert locks.holder(key).owner == lease.owner


def test_key_that_is_not_unicode_is_refused(unsent):
    """Field case 2: half a surrogate pair is no text."""
    for take in KEY_TAKERS:
        with pytest.raises(ValueError, match="key"):
            take(unsent, "\ud800")


@pytest.mark.parametrize("key", NO_TEXTS)
def test_key_that_is_not_a_string_is_refused(key, unsent):
    """Field case 2: a key is a string, and nothing else is made into one."""
    for take in KEY_TAKERS:
        with pytest.raises(TypeError, match="string"):
            take(unsent, key)


def test_keys_that_are_one_string_are_refused(unsent):
    """A string would be as many locks as it has characters."""
    with pytest.raises(TypeError, match="keys"):
        unsent.acquire_all("nightly")


@pytest.mark.parametrize(("name", "limit"), [("owner", 1024), ("data", 400_000)])
def test_text_longer_than_its_limit_is_refused(name, limit, unsent):
    """What the item is to hold besides must fit into it."""
    for verb in (unsent.try_acquire, unsent.acquire):
        with pytest.raises(ValueError, match=rf"{name}.*{limit}"):
            verb("a", **{name: "x" * (limit + 1)})
        with pytest.raises(ValueError, match=name):
            verb("a", **{name: "\udfff"})


@pytest.mark.parametrize("text", NO_TEXTS[1:])
@pytest.mark.parametrize("name", ["owner", "data"])
def test_text_that_is_not_a_string_is_refused(name, text, unsent):
    """A label or note is a string, and nothing else is made into one."""
    for verb in (unsent.try_acquire, unsent.acquire):
        with pytest.raises(TypeError, match=name):
            verb("a", **{name: text})


def test_texts_at_their_limits_are_taken(locks):
    """An empty note is a note, and the longest one fits beside the longest key and owner."""
    locks.acquire("empty", data="")
    assert locks.holder("empty").data == ""
    locks.acquire("k" * 2048, owner="o" * 1024, data="d" * 400_000)
    assert len(locks.holder("k" * 2048).data) == 400_000


@pytest.mark.parametrize(("owner", "error"), [("", ValueError), *[(o, TypeError) for o in NO_TEXTS]])
def test_owner_to_go_on_with_is_a_string(owner, error, unsent):
    """Without the whole owner nothing can be resumed or released."""
    for verb in (unsent.resume, unsent.release):
        with pytest.raises(error, match="owner"):
            verb("a", owner)


@pytest.mark.parametrize("ttl", NO_TTLS)
def test_ttl_out_of_range_is_refused(ttl, unsent):
    """Field case 4: a ttl is above 0, and above a year it is somebody's milliseconds."""
    for take in TTL_TAKERS:
        with pytest.raises(ValueError, match=r"^ttl .*\bs\b"):
            take(unsent, ttl)


@pytest.mark.parametrize("ttl", NO_NUMBERS)
def test_ttl_that_is_not_a_number_is_refused(ttl, unsent):
    """Field case 4: a ttl is an int or a float, and True is not 1."""
    for take in TTL_TAKERS:
        with pytest.raises(TypeError, match=r"^ttl is a number of seconds"):
            take(unsent, ttl)


def test_renewal_for_no_such_ttl_changes_nothing(clock, locks, sent):
    """Field case 4: a ttl is checked before the renewal is sent, and the lease stays as it was."""
    lease = locks.acquire("a")
    sent.clear()
    for ttl in [*NO_TTLS, *NO_NUMBERS]:
        with pytest.raises((ValueError, TypeError), match=r"^ttl "):
            lease.renew(ttl)
    assert sent == []
    lease.renew()
    assert 59 < lease.remaining <= 60


@pytest.mark.parametrize("ttl", [1e-9, 0.5, 366 * 86400])
@pytest.mark.parametrize("fraction", [0, 0.5, 0.999999])
def test_lock_is_never_stored_expired(ttl, fraction, clock, locks, stored):
    """Field case 4: half a second is a ttl too, at any moment of a second, and is held for its length."""
    clock.tick(fraction)
    now = clock().timestamp()
    lease = locks.acquire("a", ttl=ttl)
    assert int(stored()["ExpiresAt"]["N"]) > now + ttl
    assert 0.999 * ttl - 1e-6 < lease.remaining <= ttl


@pytest.mark.parametrize("wait", [-1, -math.inf, math.nan])
def test_wait_below_zero_is_refused(wait, unsent):
    """Only a time from 0 up can be waited for."""
    for take in WAIT_TAKERS:
        with pytest.raises(ValueError, match=r"^wait "):
            take(unsent, wait)


@pytest.mark.parametrize("wait", [None, *NO_NUMBERS])
def test_wait_that_is_not_a_number_is_refused(wait, unsent):
    """A wait is an int or a float, and True is not 1."""
    for take in WAIT_TAKERS:
        with pytest.raises(TypeError, match=r"^wait is a number of seconds"):
            take(unsent, wait)


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("", {}, ValueError),
        (None, {}, TypeError),
        ("n" * 1025, {}, ValueError),
        ("Locks", {"key_name": ""}, ValueError),
        ("Locks", {"key_name": None}, TypeError),
        ("Locks", {"key_name": "k" * 256}, ValueError),
        ("Locks", {"expires_name": ""}, ValueError),
        ("Locks", {"key_name": "OwnerID"}, ValueError),
        ("Locks", {"key_name": "ttl", "expires_name": "ttl"}, ValueError),
        ("Locks", {"expires_name": "FencingToken"}, ValueError),
        ("Locks", {"expires_name": "LockData"}, ValueError),
        ("Locks", {"sort_key": ("LockID", "x")}, ValueError),
        ("Locks", {"sort_key": ("Kind", "")}, ValueError),
        ("Locks", {"sort_key": ("Kind", "字" * 342)}, ValueError),
        ("Locks", {"sort_key": ("Kind", 5)}, TypeError),
        ("Locks", {"sort_key": (5, "x")}, TypeError),
        ("Locks", {"ttl": None}, TypeError),
    ],
)
def test_table_that_cannot_be_is_refused(name, options, error):
    """Names are strings within DynamoDB's limits, and no two attributes have the same."""
    with pytest.raises(error, match=r"name|sort key|ttl"):
        LockTable(name, **options)
