"""The CloudFormation template, read as data and deployed: it makes the table the module expects."""

import inspect
import json
import re

import boto3
import pytest
from moto import mock_aws
from templates import INFRA, load

import simplelock

PATH = INFRA / "table.yaml"
REGION = "eu-west-1"
KEY_ARN = f"arn:aws:kms:{REGION}:123456789012:key/mrk-0a1b"
ALL_SET = {
    "TableName": "Locks",
    "LockNamePrefix": "reports/",
    "DeletionProtection": "false",
    "KmsKeyArn": KEY_ARN,
}
TEMPLATE = load("table.yaml")
TABLE = TEMPLATE["Resources"]["LockTable"]
PROPERTIES = TABLE["Properties"]


def default_of(parameter):
    return inspect.signature(simplelock.LockTable.__init__).parameters[parameter].default


def statements(policy, *, own_key):
    document = TEMPLATE["Resources"][policy]["Properties"]["PolicyDocument"]
    condition, with_key, without_key = document["Statement"]["Fn::If"]
    assert condition == "OwnKey"
    return with_key if own_key else without_key


def actions(statement):
    granted = statement["Action"]
    return {granted} if isinstance(granted, str) else set(granted)


@pytest.fixture(params=[{}, ALL_SET], ids=["default parameters", "all parameters set"])
def stack(request):
    """The parameters that a stack was deployed with, and its outputs."""
    with mock_aws():
        cloudformation = boto3.client("cloudformation", region_name=REGION)
        cloudformation.create_stack(
            StackName="locks",
            TemplateBody=PATH.read_text(),
            Capabilities=["CAPABILITY_IAM"],
            Parameters=[{"ParameterKey": name, "ParameterValue": value} for name, value in request.param.items()],
        )
        described = cloudformation.describe_stacks(StackName="locks")["Stacks"][0]
        assert described["StackStatus"] == "CREATE_COMPLETE"
        outputs = {each["OutputKey"]: each["OutputValue"] for each in described["Outputs"]}
        yield request.param, outputs


def deployed_statements(policy_arn):
    policy = boto3.client("iam", region_name=REGION).get_policy_version(PolicyArn=policy_arn, VersionId="v1")
    return policy["PolicyVersion"]["Document"]["Statement"]


def test_table_key_is_the_modules_default():
    """Field case 36: the template's only key is the module's default key_name, a string."""
    name = default_of("key_name")
    assert PROPERTIES["KeySchema"] == [{"AttributeName": name, "KeyType": "HASH"}]
    assert PROPERTIES["AttributeDefinitions"] == [{"AttributeName": name, "AttributeType": "S"}]


def test_ttl_attribute_is_the_modules_default():
    """Field case 36: TTL is on, for the module's default expires_name."""
    ttl = {"AttributeName": default_of("expires_name"), "Enabled": True}
    assert PROPERTIES["TimeToLiveSpecification"] == ttl


def test_table_outlives_its_stack_and_its_replacement():
    """Field case 37: neither deleting nor updating the stack deletes the table."""
    assert TABLE["DeletionPolicy"] == "Retain"
    assert TABLE["UpdateReplacePolicy"] == "Retain"


def test_table_is_on_demand_with_point_in_time_recovery():
    """No capacity to plan, and every second of the last weeks can be restored."""
    assert PROPERTIES["BillingMode"] == "PAY_PER_REQUEST"
    assert "ProvisionedThroughput" not in PROPERTIES
    assert PROPERTIES["PointInTimeRecoverySpecification"] == {"PointInTimeRecoveryEnabled": True}


def test_deletion_protection_becomes_a_boolean():
    """The parameter's string never reaches the property, where "false" would be true."""
    condition, *values = PROPERTIES["DeletionProtectionEnabled"]["Fn::If"]
    parameter = TEMPLATE["Parameters"]["DeletionProtection"]
    assert values[0] is True
    assert values[1] is False
    assert TEMPLATE["Conditions"][condition] == {"Fn::Equals": [{"Ref": "DeletionProtection"}, "true"]}
    assert (parameter["Default"], parameter["AllowedValues"]) == ("true", ["true", "false"])


def test_table_takes_a_customer_key_only_when_given():
    """Without KmsKeyArn the table says nothing of encryption, which leaves DynamoDB's own key."""
    assert PROPERTIES["SSESpecification"]["Fn::If"] == [
        "OwnKey",
        {"SSEEnabled": True, "SSEType": "KMS", "KMSMasterKeyId": {"Ref": "KmsKeyArn"}},
        {"Ref": "AWS::NoValue"},
    ]


@pytest.mark.parametrize(
    ("parameter", "good", "bad"),
    [
        ("TableName", ["", "Locks", "a.b"], ["ab", "a b", "x" * 256]),
        ("LockNamePrefix", ["", "reports/", "s3://b/k:"], ["a*", "a?", "${aws:username}"]),
        ("KmsKeyArn", ["", KEY_ARN], ["alias/x", f"arn:aws:kms:{REGION}:123456789012:alias/x"]),
    ],
)
def test_parameter_takes_only_what_it_can_use(parameter, good, bad):
    """What DynamoDB or IAM would refuse, or read as a pattern, does not get into the stack."""
    pattern = TEMPLATE["Parameters"][parameter]["AllowedPattern"]
    assert [value for value in good if not re.search(pattern, value)] == []
    assert [value for value in bad if re.search(pattern, value)] == []


def test_client_is_granted_the_modules_three_operations_only():
    """Field case 34: the client's policy grants GetItem, UpdateItem and DeleteItem on the table."""
    (lock,) = statements("ClientPolicy", own_key=False)
    assert lock["Effect"] == "Allow"
    assert actions(lock) == {"dynamodb:GetItem", "dynamodb:UpdateItem", "dynamodb:DeleteItem"}
    assert lock["Resource"] == {"Fn::GetAtt": ["LockTable", "Arn"]}


def test_client_is_confined_to_the_prefix_by_both_conditions():
    """Every key must match the prefix, and there must be a key: ForAllValues alone lets none by."""
    (lock,) = statements("ClientPolicy", own_key=False)
    prefix = {"dynamodb:LeadingKeys": [{"Fn::Sub": "${LockNamePrefix}*"}]}
    assert lock["Condition"] == {
        "ForAllValues:StringLike": prefix,
        "Null": {"dynamodb:LeadingKeys": "false"},
    }


def test_observer_reads_scans_and_describes_only():
    """The observer's policy grants nothing that writes, on the table alone."""
    (look,) = statements("ObserverPolicy", own_key=False)
    assert look["Effect"] == "Allow"
    assert actions(look) == {
        "dynamodb:GetItem",
        "dynamodb:Scan",
        "dynamodb:DescribeTable",
        "dynamodb:DescribeTimeToLive",
    }
    assert look["Resource"] == {"Fn::GetAtt": ["LockTable", "Arn"]}


@pytest.mark.parametrize("policy", ["ClientPolicy", "ObserverPolicy"])
def test_customer_key_adds_decrypt_through_dynamodb_and_nothing_else(policy):
    """With a customer key the same first statement stands, and only that key may be used."""
    first, key = statements(policy, own_key=True)
    assert [first] == statements(policy, own_key=False)
    assert (key["Effect"], actions(key)) == ("Allow", {"kms:Decrypt"})
    assert key["Resource"] == {"Ref": "KmsKeyArn"}
    service = {"Fn::Sub": "dynamodb.${AWS::Region}.${AWS::URLSuffix}"}
    assert key["Condition"] == {"StringEquals": {"kms:ViaService": service}}


def test_every_statement_names_its_actions_and_resource():
    """Nothing is granted by wildcard or by exclusion."""
    policies = [name for name, resource in TEMPLATE["Resources"].items() if resource["Type"].startswith("AWS::IAM::")]
    assert sorted(policies) == ["ClientPolicy", "ObserverPolicy"]
    for statement in (each for name in policies for each in statements(name, own_key=True)):
        assert not {"NotAction", "NotResource"} & statement.keys()
        assert "*" not in json.dumps([statement["Action"], statement["Resource"]])


def test_outputs_are_exported_under_the_stacks_name():
    """Name, ARN and both policies can be imported by other stacks, two lock stacks side by side."""
    exports = {name: each["Export"]["Name"] for name, each in TEMPLATE["Outputs"].items()}
    assert exports == {
        name: {"Fn::Sub": "${AWS::StackName}-" + name}
        for name in ("TableName", "TableArn", "ClientPolicyArn", "ObserverPolicyArn")
    }


def test_skipped_checks_carry_their_reason():
    """A checkov check is skipped only in the template, where its reason stands beside it."""
    skips = TABLE["Metadata"]["checkov"]["skip"]
    assert [each["id"] for each in skips if not each.get("comment")] == []


def test_deployed_table_has_the_template_schema(stack):
    """The stack makes one table, on demand, with the key and the protection asked for."""
    parameters, outputs = stack
    dynamodb = boto3.client("dynamodb", region_name=REGION)
    assert dynamodb.list_tables()["TableNames"] == [outputs["TableName"]]
    table = dynamodb.describe_table(TableName=outputs["TableName"])["Table"]
    assert table["TableArn"] == outputs["TableArn"]
    assert table["TableName"] == parameters.get("TableName", table["TableName"])
    assert table["KeySchema"] == PROPERTIES["KeySchema"]
    assert table["AttributeDefinitions"] == PROPERTIES["AttributeDefinitions"]
    assert table["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST"
    assert table["DeletionProtectionEnabled"] is (parameters == {})


def test_deployed_table_accepts_the_templates_ttl_and_recovery(stack):
    """Field case 36: DynamoDB's API takes both settings as the template has them."""
    # moto's CloudFormation passes over these two, so they go to the same table by the API.
    _, outputs = stack
    dynamodb = boto3.client("dynamodb", region_name=REGION)
    name = outputs["TableName"]
    ttl = PROPERTIES["TimeToLiveSpecification"]
    recovery = PROPERTIES["PointInTimeRecoverySpecification"]
    dynamodb.update_time_to_live(TableName=name, TimeToLiveSpecification=ttl)
    dynamodb.update_continuous_backups(TableName=name, PointInTimeRecoverySpecification=recovery)
    described = dynamodb.describe_time_to_live(TableName=name)["TimeToLiveDescription"]
    assert described["AttributeName"] == default_of("expires_name")
    assert described["TimeToLiveStatus"] in {"ENABLING", "ENABLED"}
    backups = dynamodb.describe_continuous_backups(TableName=name)["ContinuousBackupsDescription"]
    status = backups["PointInTimeRecoveryDescription"]["PointInTimeRecoveryStatus"]
    assert status == "ENABLED"


def test_deployed_policies_hold_the_stacks_parameters(stack):
    """The prefix and the key arrive in the policies; without a key nothing is said of KMS."""
    parameters, outputs = stack
    lock, *client_rest = deployed_statements(outputs["ClientPolicyArn"])
    look, *observer_rest = deployed_statements(outputs["ObserverPolicyArn"])
    assert lock["Resource"] == look["Resource"] == outputs["TableArn"]
    assert lock["Condition"] == {
        "ForAllValues:StringLike": {"dynamodb:LeadingKeys": [parameters.get("LockNamePrefix", "") + "*"]},
        "Null": {"dynamodb:LeadingKeys": "false"},
    }
    keys = [KEY_ARN] if "KmsKeyArn" in parameters else []
    assert [each["Resource"] for each in client_rest] == keys
    assert [each["Resource"] for each in observer_rest] == keys


def test_deployed_table_takes_a_lock_of_a_default_locktable(stack):
    """Field case 36: a LockTable that was told only the name locks and releases in the table."""
    _, outputs = stack
    client = boto3.client("dynamodb", region_name=REGION)
    locks = simplelock.LockTable(outputs["TableName"], client=client)
    lease = locks.try_acquire("reports/2026.csv")
    assert lease is not None
    (item,) = client.scan(TableName=outputs["TableName"])["Items"]
    assert item[PROPERTIES["KeySchema"][0]["AttributeName"]] == {"S": "reports/2026.csv"}
    assert "N" in item[PROPERTIES["TimeToLiveSpecification"]["AttributeName"]]
    assert locks.try_acquire("reports/2026.csv") is None
    assert lease.release() is True
