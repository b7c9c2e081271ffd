"""Each case that was reported from the field has a test which says so; `pytest --collect-only` shows which."""

import ast
import collections
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CASES = range(1, 41)


def named_in(source):
    """The names of a file's tests by the number of each case that their docstrings name."""
    found = collections.defaultdict(list)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for numbers in re.findall(r"Field cases? ([\d, and]+):", ast.get_docstring(node) or ""):
                for number in re.findall(r"\d+", numbers):
                    found[int(number)].append(node.name)
    return found


FOUND = collections.defaultdict(list)
for path in sorted(TESTS.rglob("test_*.py")):
    for number, names in named_in(path.read_text(encoding="utf-8")).items():
        FOUND[number] += [f"{path.relative_to(TESTS)}:{name}" for name in names]


@pytest.mark.parametrize(
    ("case", "names"),
    [pytest.param(case, FOUND[case], id=f"{case}-{','.join(FOUND[case])}") for case in CASES],
)
def test_field_case_has_a_test(case, names):
    """None of the 40 is missing from the docstrings of the tests."""
    assert names, f"no test's docstring names field case {case}"


def test_no_field_case_is_made_up():
    """A test that names a case which does not exist has mistaken its number."""
    assert {number for number, names in FOUND.items() if names} <= set(CASES)


def test_only_docstrings_of_tests_count():
    """Neither a comment nor a helper's docstring stands for a test."""
    source = '''
def test_a():
    """Field cases 1, 2 and 30: a rule."""
    # Field case 4: not asserted.

def helper():
    """Field case 5: not a test."""
'''
    assert dict(named_in(source)) == {1: ["test_a"], 2: ["test_a"], 30: ["test_a"]}
