"""The guard of the benchmarks: what it lets pass, and what it must not."""

from __future__ import annotations

import time
from typing import Any

import pytest
from bench import guard

from simplelock import Lease, LockTable


class Chatty(LockTable):
    """Sends one more request in every cycle."""

    def acquire(self, key: str, **options: Any) -> Lease:
        self.holder(key)
        return super().acquire(key, **options)


class Slow(LockTable):
    """Takes a millisecond of CPU more in every cycle."""

    def acquire(self, key: str, **options: Any) -> Lease:
        end = time.process_time() + 1e-3
        while time.process_time() < end:
            pass
        return super().acquire(key, **options)


def test_guard_passes_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module as it is passes; its lines are slower where their coverage is measured."""
    monkeypatch.setattr(guard, "LIMIT", 2)
    assert guard.main(blocks=3, cycles=10) == 0


@pytest.mark.parametrize(
    ("table", "complaint"),
    [(Chatty, "FAIL: a cycle takes 2 requests, not 3"), (Slow, "FAIL: a cycle takes less than")],
)
def test_guard_fails_dearer_cycle(table: type[LockTable], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One more request in a cycle fails, and so does a cycle that takes much more CPU."""
    assert guard.main(table, blocks=3, cycles=10) == 1
    assert complaint in capsys.readouterr().out
