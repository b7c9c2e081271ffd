"""Each case that was reported from the field has a test which says so."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
CASES = range(1, 41)


def cases(source):
    """The numbers of the cases that the docstrings of a file's tests name."""
    tests = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"
    )
    named = re.findall(r"Field cases? ([\d, and]+):", "\n".join(ast.get_docstring(test) or "" for test in tests))
    return {int(number) for numbers in named for number in re.findall(r"\d+", numbers)}


def test_every_field_case_has_a_test():
    """None of the 40 is missing from the docstrings of the tests, and none is named that does not exist."""
    found = set().union(*(cases(path.read_text(encoding="utf-8")) for path in TESTS.rglob("test_*.py")))
    assert found == set(CASES)


def test_only_docstrings_of_tests_count():
    """Neither a comment nor a helper's docstring stands for a test."""
    source = '''
def test_a():
    """Field cases 1, 2 and 30: a rule."""
    # Field case 4: not asserted.

def helper():
    """Field case 5: not a test."""
'''
    assert cases(source) == {1, 2, 30}
