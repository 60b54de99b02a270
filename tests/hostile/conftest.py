"""Nothing here is collected unless DECODEBENCH_HOSTILE=1, as ``make test-hostile`` sets."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.commands import Shell
from tests.hostile.inputs import make

collect_ignore_glob = [] if os.environ.get("DECODEBENCH_HOSTILE", "0") not in ("", "0") else ["test_*.py"]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompt files, model folders and checkpoints that are wrong in one way each."""
    return make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def shell(tmp_path: Path, inputs: Path) -> Iterator[Shell]:
    """Runs commands in an empty folder, with ``in/`` as a link to the inputs."""
    (tmp_path / "in").symlink_to(inputs)
    yield Shell(tmp_path)
    shutil.rmtree(tmp_path, ignore_errors=True)
