"""A single op that does not fit: even with every saved tensor on disk it dies, in slices it lives.

The limit is the system's, see `test_memory_limit`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.support import child
from tests.faults.test_memory_limit import QUIET

CHILD = Path(__file__).with_name("child_in_sections.py")


# The backward of a convolution takes two values of 48 MiB and makes a third. A slice of each is 6.
LIMIT = 100 << 20


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux alone")
def test_slices_train_where_a_single_op_does_not_fit(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(CHILD), str(LIMIT)],
        env={**child(), **QUIET, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["whole"]["error"] is None
    assert "memory" in found["whole, limited"]["error"].lower()
    assert found["whole, limited"]["losses"] == []
    assert found["sections, limited"]["error"] is None
    assert found["sections, limited"]["losses"] == pytest.approx(found["whole"]["losses"], rel=1e-5)
