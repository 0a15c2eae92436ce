"""The example that restarts a server."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "restart.py"


@pytest.mark.parametrize("window", [None, 40])
def test_after_a_restart_the_kv_comes_from_disk_and_the_tokens_are_the_same(
    window: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, str(EXAMPLE), "--conversations", "1", "--turns", "1"]
    command += [] if window is None else ["--sliding-window", str(window)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    numbers = [
        [int(number.replace(",", "")) for number in re.findall(r"[\d,]+\d|\d", line)]
        for line in run.stdout.splitlines()
        if "life:" in line
    ]
    (prompt, computed, from_disk), (again, left, found) = numbers
    assert (prompt, from_disk) == (again, 0)
    assert computed == prompt
    # Blocks of 16 tokens; at least the last token of a prompt is computed.
    blocks = (prompt - 1) // 16
    assert left == prompt - 16 * blocks
    # The token behind them sees 39 before it: of a window its last three blocks are needed.
    assert found == blocks + (0 if window is None else 3)
    assert "All 12 generated tokens are equal before and after the restart." in run.stdout
    assert list(tmp_path.iterdir()) == []
