"""The demo, run as a newcomer runs it: as a program, without anything of AWS in the environment."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parent.parent / "infra" / "demo.py"
WORKERS, ROUNDS = 3, 3
KEPT = (WORKERS - 1) * ROUNDS + 1  # the victim gets one round done


@pytest.mark.rig
def test_demo_keeps_every_update_and_shows_the_take_over(tmp_path):
    """A killed holder's lock is taken over after its expiry, and no update is lost."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    demo = subprocess.run(
        [sys.executable, DEMO, "--workers", str(WORKERS), "--rounds", str(ROUNDS)],
        cwd=tmp_path,
        env=environment | {"HOME": str(tmp_path), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert (demo.returncode, demo.stderr) == (0, ""), demo.stdout
    assert re.search(rf"^With the lock +{KEPT} +{KEPT} +0$", demo.stdout, re.MULTILINE)
    rows = dict(re.findall(r"^worker (\d)  (.*)$", demo.stdout, re.MULTILINE))
    assert sorted(rows) == ["1", "2", "3"]
    assert re.search("X░+$", rows["2"])
    take_over = re.search(r"worker (\d) takes over, (\d+\.\d\d) s after expiry", demo.stdout)
    assert take_over, demo.stdout
    assert float(take_over[2]) < 5
    assert len(rows[take_over[1]]) > len(rows["2"])
    assert [line for line in demo.stdout.splitlines() if len(line) > 80 or "\33" in line] == []
