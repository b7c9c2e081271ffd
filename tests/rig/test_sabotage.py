"""Each sabotage of the module turns the suite red: what the tests claim to catch, they catch.

The tests run in forks of one child in which the SDK and moto are imported already.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from . import engines

TESTS = Path(__file__).parents[1]
SECONDS = 120  # for one copy; a sabotage needs 1 or 2, the module as it is 15
RED = re.compile(r"^(?:FAILED|ERROR) .*?(test_\w+\.py.*?)(?: - .*)?$", re.MULTILINE)


class Sabotage(NamedTuple):
    """A text of the module, what is put in its place, and the test that turns red."""

    what: str
    old: str
    new: str
    test: str


SABOTAGES = [
    Sabotage(
        "take-over by the local clock",
        "self.data, seed, earliest)",
        "self.data, seed, time.time())",
        "test_clock.py::test_wall_clock_off_does_not_take_a_live_lock",
    ),
    Sabotage(
        "take-over at the very moment of expiry",
        "ExpiresAt < :now",
        "ExpiresAt <= :now",
        "test_acquire.py::test_lock_is_not_free_before_its_expiry_has_passed",
    ),
    Sabotage(
        "what is not a lock is taken over",
        "(attribute_type(OwnerID, :string) AND ExpiresAt < :now)",
        "(attribute_type(OwnerID, :string) AND ExpiresAt < :now) OR NOT attribute_type(OwnerID, :string)",
        "test_table.py::test_item_that_is_not_a_lock_is_never_overwritten",
    ),
    Sabotage(
        "own send not recognised by an acquisition",
        "if holder is None or holder.owner != self.owner:",
        "if holder is None or holder.owner != self.owner or not self._ends[0]:",
        "test_lost_replies.py::test_acquisition_whose_reply_is_lost_is_granted",
    ),
    Sabotage(
        "own send not recognised by a release",
        "self._held_at_release and (again or answer.retried)",
        "self._held_at_release and again",
        "test_lost_replies.py::test_release_whose_reply_is_lost_is_true",
    ),
    Sabotage(
        "second try missing",
        "for _ in range(2):",
        "for _ in range(1):",
        "test_acquire.py::test_cold_try_on_a_dead_holders_lock_sends_two_requests",
    ),
    Sabotage(
        "a wrong first expiry is left as it is",
        "if again and not -1 <= surplus <= MAX_SURPLUS:",
        "if again and surplus > math.inf:",
        "test_clock.py::test_wall_clock_off_takes_a_free_lock_for_its_ttl",
    ),
    Sabotage(
        "expiry rounded down",
        "expires_at = math.ceil(self._clock.now()[1] + self._ttl)",
        "expires_at = math.floor(self._clock.now()[1] + self._ttl)",
        "test_input.py::test_lock_is_never_stored_expired",
    ),
    Sabotage(
        "owner's nonce from `random`",
        "os.urandom(8).hex()",
        "random.randbytes(8).hex()",
        "test_acquire.py::test_owners_differ_between_processes_seeded_alike",
    ),
    Sabotage(
        "renewal without an owner",
        '"OwnerID = :owner AND ExpiresAt <= :expires"',
        '"(OwnerID = :owner OR attribute_exists(LockID)) AND ExpiresAt <= :expires"',
        "test_renew.py::test_lease_that_was_taken_is_lost",
    ),
    Sabotage(
        "renewal without a look at the expiry",
        '"OwnerID = :owner AND ExpiresAt <= :expires"',
        '"OwnerID = :owner"',
        "test_lost_replies.py::test_late_renewal_does_not_undercut_a_newer_one",
    ),
    Sabotage(
        "renewal makes a deleted item again",
        '"OwnerID = :owner AND ExpiresAt <= :expires"',
        '"attribute_not_exists(LockID) OR OwnerID = :owner AND ExpiresAt <= :expires"',
        "test_renew.py::test_lease_whose_item_was_deleted_is_lost",
    ),
    Sabotage(
        "release without an owner",
        'condition, values = "OwnerID = :owner", ',
        'condition, values = "OwnerID = :owner OR attribute_exists(LockID)", ',
        "test_release.py::test_late_release_does_not_touch_the_next_holders_lock",
    ),
    Sabotage(
        "lease counts from the reply",
        "(answer.sent + runs, answer.wall + runs)",
        "(time.monotonic() + self._ttl, time.time() + self._ttl)",
        "test_lease.py::test_time_that_the_request_took_is_not_remaining",
    ),
    Sabotage(
        "lease by the monotonic clock only",
        "min(self._ends[0] - time.monotonic(), self._ends[1] - time.time())",
        "self._ends[0] - time.monotonic()",
        "test_lease.py::test_pause_in_which_a_clock_stood_still_ends_the_lease",
    ),
    Sabotage(
        "lease by the wall clock only",
        "min(self._ends[0] - time.monotonic(), self._ends[1] - time.time())",
        "self._ends[1] - time.time()",
        "test_lease.py::test_pause_in_which_a_clock_stood_still_ends_the_lease",
    ),
    Sabotage(
        "clocks that never drift apart",
        "DRIFT = 0.0005",
        "DRIFT = 0",
        "test_clock.py::test_clocks_that_drifted_apart_do_not_take_a_live_lock",
    ),
    Sabotage(
        "held until a release has succeeded",
        'self._held_at_release, self._lost = self.held, "it was released"',
        "self._held_at_release = self.held",
        "test_lease.py::test_held_is_false_from_the_moment_of_release",
    ),
    Sabotage(
        "token forgotten before the release has succeeded",
        "        answer = self._release()\n        self._released = True\n",
        "        self._released = True\n        answer = self._release()\n",
        "test_failures.py::test_failed_release_can_be_repeated",
    ),
    Sabotage(
        "released by a forked child",
        "        if self._released or self._pid != os.getpid():\n            return False\n",
        "        if self._released:\n            return False\n",
        "test_lease.py::test_lease_is_inert_in_a_forked_child",
    ),
    Sabotage(
        "no permission passed off as a lock that is held",
        'if code != "ConditionalCheckFailedException":',
        'if code not in ("ConditionalCheckFailedException", "AccessDeniedException"):',
        "test_failures.py::test_refusals_of_dynamodb_are_passed_on",
    ),
    Sabotage(
        "nothing cleaned up after an acquisition that failed",
        "                with suppress(Exception):\n                    self._release()\n",
        "                pass\n",
        "test_failures.py::test_failed_acquisition_leaves_nothing_behind",
    ),
    Sabotage(
        "a reply that was cut short taken for a free lock",
        'if "ConsumedCapacity" in reply:',
        "if True:",
        "test_holders.py::test_reply_that_was_cut_short_is_read_again",
    ),
    Sabotage(
        "heartbeat ends with the first error",
        "                if not self.held:\n                    break\n",
        "                break\n",
        "test_heartbeat.py::test_two_failed_renewals_do_not_end_it",
    ),
    Sabotage(
        "release does not wait for the heartbeat",
        "                stack.callback(thread.join)\n",
        "",
        "test_heartbeat.py::test_what_was_told_lost_stays_lost",
    ),
    Sabotage(
        "a late renewal unsays a loss that was told",
        "            self._lost = self._lost or self._trouble",
        "            pass",
        "test_heartbeat.py::test_what_was_told_lost_stays_lost",
    ),
    Sabotage(
        "no try at the deadline",
        "if time.monotonic() < deadline:",
        "if True:",
        "test_waiting.py::test_last_try_is_made_at_the_deadline",
    ),
    Sabotage(
        "waiters that were seeded alike meet",
        "random.SystemRandom()",
        "random",
        "test_waiting.py::test_many_waiters_are_cheap_and_wake_apart",
    ),
    Sabotage(
        "several locks in the caller's order",
        "sorted({Lease(self, key, ttl, owner).key for key in keys})",
        "list({Lease(self, key, ttl, owner).key: None for key in keys})",
        "test_acquire_all.py::test_locks_are_acquired_sorted_and_released_in_reverse",
    ),
    Sabotage(
        "no tombstone",
        "math.ceil(self._clock.now()[1]) + TOMBSTONE_SECONDS if self._table.fencing else None",
        "None",
        "test_fencing.py::test_release_leaves_a_tombstone_for_an_hour",
    ),
    Sabotage(
        "token from the local clock",
        "int(latest * 1000)",
        "int(time.time() * 1000)",
        "test_fencing.py::test_token_grows_over_the_sweep_of_the_tombstone",
    ),
]


def sabotaged(text: str, sabotage: Sabotage) -> str:
    """Apply it; a module that has changed may need another text here."""
    assert text.count(sabotage.old) == 1, f"does not apply any more: {sabotage.what}"
    return text.replace(sabotage.old, sabotage.new)


def test_suite_catches_each_sabotage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the module as it is all these tests pass, and with each sabotage the one that is named turns red."""
    text = Path(importlib.util.find_spec("simplelock").origin).read_text(encoding="utf-8")
    tests = {sabotage.test for sabotage in SABOTAGES}
    copies = [(text, tests), *[(sabotaged(text, sabotage), {sabotage.test}) for sabotage in SABOTAGES]]
    folders = [tmp_path / f"{number:02}" for number in range(len(copies))]
    for folder, (module, selected) in zip(folders, copies, strict=True):
        folder.mkdir()
        (folder / "simplelock.py").write_text(module, encoding="utf-8")
        (folder / "selected").write_text("\n".join(sorted(selected)), encoding="utf-8")

    command = engines.leashed([sys.executable, "-m", "rig.test_sabotage", str(tmp_path)])
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    child = subprocess.Popen(command, cwd=tmp_path, env=env, start_new_session=True)
    try:
        assert child.wait(SECONDS * 5) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):  # all has ended
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()

    as_it_is, *found = map(outcome, folders)
    with capsys.disabled():
        print()
        for sabotage, (_, red) in zip(SABOTAGES, found, strict=True):
            print(f"sabotage: {sabotage.what:<52} {red}")
    assert as_it_is == (0, "nothing")
    assert [sabotage.what for sabotage, (status, _) in zip(SABOTAGES, found, strict=True) if status != 1] == []


def outcome(folder: Path) -> tuple[int, str]:
    """What pytest says of the module of that folder: its exit status (1: tests failed), and which test failed."""
    status = folder / "status"  # there is none if the time was over, or another module was tested
    red = RED.search((folder / "log").read_text(encoding="utf-8"))
    return int(status.read_text(encoding="utf-8")) if status.exists() else -1, red[1] if red else "nothing"


def main(folder: Path) -> None:
    """In the child: run the tests of each copy in a fork."""
    import boto3  # noqa: F401
    import moto.dynamodb.models  # noqa: F401

    for copy in sorted(folder.iterdir()):
        fork = os.fork()
        if fork == 0:
            try:
                signal.alarm(SECONDS)
                run(copy)
            finally:
                os._exit(1)
        os.waitpid(fork, 0)


def run(copy: Path) -> None:
    """In the fork: run its tests, with the module that lies there."""
    sys.path.insert(0, str(copy))
    log = os.open(copy / "log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    tests = [f"{TESTS}/{test}" for test in (copy / "selected").read_text(encoding="utf-8").split()]
    status = pytest.main([*tests, "-x", "-q", "--no-cov", "-p", "no:cacheprovider"])
    assert sys.modules["simplelock"].__file__ == str(copy / "simplelock.py")
    (copy / "status").write_text(f"{int(status)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
