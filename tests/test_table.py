"""The table: made, named, reached and shared; and the items in it that are not locks."""

import pathlib
import subprocess
import sys
import threading

import boto3
import pytest
from botocore.stub import Stubber
from faults import refused
from test_template import actions, statements

from simplelock import LockHeld, LockLost, LockTable, LockTableError


def put(client, **attributes):
    """Put an item "a" with these attributes, in low-level form."""
    client.put_item(TableName="Locks", Item={"LockID": {"S": "a"}, **attributes})


NO_LOCKS = {
    "no attributes at all": {},
    "no owner": {"ExpiresAt": {"N": "1000"}},
    "an owner that is a number": {"OwnerID": {"N": "5"}, "ExpiresAt": {"N": "1000"}},
    "an owner that is null": {"OwnerID": {"NULL": True}, "ExpiresAt": {"N": "1000"}},
    "no expiry": {"OwnerID": {"S": "me"}},
}


def test_created_table_is_on_demand_with_ttl(client):
    """A string key, no capacity to plan, and TTL to sweep up."""
    LockTable("Locks", client=client).create()
    table = client.describe_table(TableName="Locks")["Table"]
    assert table["KeySchema"] == [{"AttributeName": "LockID", "KeyType": "HASH"}]
    assert table["AttributeDefinitions"] == [{"AttributeName": "LockID", "AttributeType": "S"}]
    assert table["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST"
    assert client.describe_time_to_live(TableName="Locks")["TimeToLiveDescription"] == {
        "TimeToLiveStatus": "ENABLED",
        "AttributeName": "ExpiresAt",
    }


def test_created_table_has_the_names_asked_for(client):
    """Names of keys and of the TTL attribute are the table's own."""
    LockTable("Locks", client=client, key_name="pk", expires_name="ttl", sort_key=("sk", "lock")).create()
    table = client.describe_table(TableName="Locks")["Table"]
    assert table["KeySchema"] == [
        {"AttributeName": "pk", "KeyType": "HASH"},
        {"AttributeName": "sk", "KeyType": "RANGE"},
    ]
    ttl = client.describe_time_to_live(TableName="Locks")["TimeToLiveDescription"]
    assert ttl["AttributeName"] == "ttl"


def test_creating_again_changes_nothing(client, locks, sent):
    """A table that is right stays as it is, with the locks in it."""
    locks.create()
    lease = locks.acquire("a")
    sent.clear()
    locks.create()
    assert "UpdateTimeToLive" not in sent
    assert locks.holder("a").owner == lease.owner


def test_ttl_is_turned_on_when_it_is_off(client, locks):
    """A table that was created without waiting, or by others, gets what it lacks."""
    assert "AttributeName" not in client.describe_time_to_live(TableName="Locks")
    locks.create()
    ttl = client.describe_time_to_live(TableName="Locks")["TimeToLiveDescription"]
    assert ttl["AttributeName"] == "ExpiresAt"


def test_creating_without_waiting_sends_one_request(client, sent):
    """What takes DynamoDB a while is not waited for."""
    LockTable("Locks", client=client).create(wait=False)
    assert sent == ["CreateTable"]


def test_table_with_an_index_of_its_own_is_a_lock_table(client):
    """Attributes of indexes are defined beside the keys, in any order."""
    names = ["Kind", "LockID", "Sort"]
    client.create_table(
        TableName="Locks",
        BillingMode="PAY_PER_REQUEST",
        KeySchema=[
            {"AttributeName": "LockID", "KeyType": "HASH"},
            {"AttributeName": "Sort", "KeyType": "RANGE"},
        ],
        AttributeDefinitions=[{"AttributeName": name, "AttributeType": "S"} for name in names],
        GlobalSecondaryIndexes=[
            {
                "IndexName": "ByKind",
                "KeySchema": [{"AttributeName": "Kind", "KeyType": "HASH"}],
                "Projection": {"ProjectionType": "ALL"},
            }
        ],
    )
    locks = LockTable("Locks", client=client, sort_key=("Sort", "lock"))
    locks.create()
    assert locks.try_acquire("a")


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"key_name": "Id"}, "Id"), ({"sort_key": ("Sort", "lock")}, "LockID and Sort")],
)
def test_wrong_keys_are_named(options, expected, client, locks):
    """Field case 35: the error tells the table, the Region and the key that was expected."""
    wrong = LockTable("Locks", client=client, **options)
    for verb in (
        wrong.create,
        lambda: wrong.try_acquire("a"),
        lambda: wrong.acquire("a", wait=30),
        lambda: wrong.holder("a"),
    ):
        with pytest.raises(LockTableError, match=rf"'Locks'.*eu-west-1.*key {expected} "):
            verb()


def test_key_of_the_wrong_type_is_named(client):
    """Field case 35: a key of numbers is no key for names."""
    client.create_table(
        TableName="Locks",
        BillingMode="PAY_PER_REQUEST",
        KeySchema=[{"AttributeName": "LockID", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "LockID", "AttributeType": "N"}],
    )
    with pytest.raises(LockTableError, match=r"'Locks'.*eu-west-1.*LockID \(S\)"):
        LockTable("Locks", client=client).create()


@pytest.mark.parametrize("region", ["eu-west-1", "us-east-1"], ids=["no table", "wrong Region"])
def test_missing_table_is_named(region, make_table):
    """Field case 35: the error tells the table, the Region that was asked, and the remedy."""
    make_table("Others")
    name = "Locks" if region == "eu-west-1" else "Others"
    missing = LockTable(name, client=boto3.client("dynamodb", region_name=region))
    for verb in (
        lambda: missing.try_acquire("a"),
        lambda: missing.acquire("a", wait=30),
        lambda: missing.resume("a", "host:1/nonce"),
        lambda: missing.release("a", "host:1/nonce"),
        lambda: missing.holder("a"),
        lambda: list(missing.holders()),
    ):
        with pytest.raises(LockTableError, match=rf"'{name}'.*{region}.*LockID.*create"):
            verb()


@pytest.mark.parametrize(
    "options",
    [
        {"key_name": "Owner", "expires_name": "ttl"},
        {"key_name": "Name", "expires_name": "Date", "sort_key": ("Timestamp", "lock")},
        {"key_name": "a.b-c d", "expires_name": "9 #:x", "sort_key": ("key", "字")},
    ],
    ids=["reserved", "reserved, with a sort key", "odd"],
)
@pytest.mark.parametrize("fencing", [False, True])
def test_any_name_will_do(options, fencing, make_table):
    """Field case 8: reserved words and odd characters are names like others, in every request."""
    locks = make_table(**options, fencing=fencing)
    with locks.acquire("a", ttl=60, data="note") as lease:
        assert locks.try_acquire("a") is None
        lease.renew()
        lease.renew(ttl=5)
        assert locks.resume("a", lease.owner).data == "note"
        assert locks.holder("a").owner == lease.owner
        assert [holder.key for holder in locks.holders()] == ["a"]
    assert locks.holder("a") is None
    assert list(locks.holders()) == []
    lease = locks.acquire("a", wait=1)
    assert locks.release("a", lease.owner) is True
    assert locks.holder("a") is None


def test_table_can_be_named_by_its_arn(client, locks):
    """Both names are of the same locks."""
    arn = client.describe_table(TableName="Locks")["Table"]["TableArn"]
    lease = LockTable(arn, client=client).acquire("a")
    assert locks.holder("a").owner == lease.owner


@pytest.mark.parametrize("attributes", NO_LOCKS.values(), ids=NO_LOCKS)
@pytest.mark.parametrize("known", [False, True])
def test_item_that_is_not_a_lock_is_never_overwritten(known, attributes, clock, locks, client, sent, stored):
    """Refused, no string OwnerID or no numeric ExpiresAt: an error, at once, and it stays."""
    put(client, **attributes)
    before = stored()
    if known:
        locks.holder("other")
    for verb in (
        lambda: locks.try_acquire("a"),
        lambda: locks.acquire("a", wait=30),
        lambda: locks.holder("a"),
    ):
        sent.clear()
        with pytest.raises(LockTableError, match=r"'Locks'.*eu-west-1.*'a'.*not a lock"):
            verb()
        assert len(sent) == 1
        assert stored() == before


def test_expiry_that_is_a_string_is_not_a_locks(locks, meets):
    """Refused, ExpiresAt is a string: DynamoDB compares it with no number, and nor do we."""
    item = {"LockID": {"S": "a"}, "OwnerID": {"S": "me"}, "ExpiresAt": {"S": "1000"}}
    meets("UpdateItem", [refused("ConditionalCheckFailedException", Item=item)])
    with pytest.raises(LockTableError, match="not a lock"):
        locks.try_acquire("a")


@pytest.mark.parametrize("attributes", NO_LOCKS.values(), ids=NO_LOCKS)
def test_item_that_is_not_a_lock_is_not_released_or_renewed(attributes, locks, client, stored):
    """Whatever took the place of a lock is not ours to change."""
    lease = locks.acquire("a")
    put(client, **attributes)
    before = stored()
    with pytest.raises((LockLost, LockTableError)):
        lease.renew()
    assert lease.release() is False
    assert locks.release("a", lease.owner) is False
    assert stored() == before


@pytest.mark.parametrize("make", [boto3.client, boto3.resource])
@pytest.mark.parametrize("service", ["dynamodb", "s3"])
def test_client_is_a_low_level_one_of_dynamodb(make, service):
    """A resource or another service's client would fail later, and not so clearly."""
    client = make(service)
    if make is boto3.client and service == "dynamodb":
        assert LockTable("Locks", client=client).client is client
    else:
        with pytest.raises(TypeError, match="dynamodb"):
            LockTable("Locks", client=client)


def test_tables_and_names_are_not_clients():
    """Whatever else could be meant by a client is a TypeError too."""
    for client in (boto3.resource("dynamodb").Table("Locks"), "dynamodb", boto3, object()):
        with pytest.raises(TypeError, match="dynamodb"):
            LockTable("Locks", client=client)


def test_botocores_stubber_can_stand_in(client):
    """Callers may use it in their tests: its replies are without the metadata of real ones."""
    with Stubber(client) as stubber:
        stubber.add_response("update_item", {})
        stubber.add_response("delete_item", {})
        with LockTable("Locks", client=client).acquire("a", ttl=60) as lease:
            assert 59 < lease.remaining <= 60
        stubber.assert_no_pending_responses()


@pytest.fixture
def made(monkeypatch):
    """The clients that boto3 makes."""
    clients, make = [], boto3.client

    def note(*args, **kwargs):
        clients.append(make(*args, **kwargs))
        return clients[-1]

    monkeypatch.setattr(boto3, "client", note)
    return clients


def test_default_client_is_made_once(locks, made):
    """Field case 33: however many threads use the table first."""
    table = LockTable("Locks")
    assert made == []
    ready, leases = threading.Barrier(50), []

    def work(number):
        ready.wait()
        leases.append(table.try_acquire(f"{number}"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(leases) == 50
    assert all(leases)


def test_given_client_is_used_as_it_is(locks, made):
    """No other one is made."""
    with locks.acquire("a"):
        pass
    assert made == []


def test_boto3_is_not_imported_before_it_is_needed():
    """Who passes a client of their own need not wait for it, nor have it."""
    code = "import simplelock, sys; sys.exit('boto3' in sys.modules)"
    root = pathlib.Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)


def granted(policy):
    return {a for s in statements(policy, own_key=False) for a in actions(s)}


def operations(sent):
    return {f"dynamodb:{operation}" for operation in sent}


@pytest.mark.parametrize("fencing", [False, True])
def test_what_clients_send_is_what_they_are_granted(fencing, clock, make_table, sent):
    """Field case 34: the client's policy covers every verb but `holders`, and nothing more."""
    locks = make_table(fencing=fencing)
    sent.clear()
    lease = locks.acquire("a", ttl=60)
    for _ in range(2):
        with pytest.raises(LockHeld):
            locks.acquire("a", wait=1)
    lease.renew(ttl=5)
    with locks.resume("a", lease.owner) as resumed, resumed.heartbeat():
        locks.holder("a")
    with locks.acquire_all(["a", "b"]):
        pass
    locks.acquire("a")
    locks.release("a", locks.holder("a").owner)
    if fencing:  # a tombstone is no deletion
        sent.append("DeleteItem")
    assert operations(sent) == granted("ClientPolicy")


def test_what_observers_send_is_what_they_are_granted(locks, sent):
    """Field case 34: the observer's policy covers `holder` and `holders`."""
    locks.acquire("a")
    sent.clear()
    locks.holder("a")
    list(locks.holders())
    assert operations(sent) <= granted("ObserverPolicy")
