"""What the tests share: one thread, no network, the folder with public data, the embedded model where it is."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import heap, type_checks

ROOT = Path(__file__).resolve().parents[1]
SIBLING_DATA = ROOT.parent / "shared" / "data"

os.environ["COLUMNS"] = "100"  # tables are as wide as the terminal
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for _heavy in ("hydra", "pandas", "scipy.stats", "transformers.generation", "transformers.models.llama.modeling_llama"):
    importlib.import_module(_heavy)  # within a module that jaxtyping loads, Python would compile them from source
type_checks.check_few_calls()


def pytest_collection_finish() -> None:
    heap.keep_frozen()


def pytest_runtest_setup() -> None:
    torch.set_num_threads(1)  # a run may have set another number
    type_checks.next_test()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skips = {
        "network": "network" not in config.getoption("markexpr"),
        "gpu": not torch.cuda.is_available(),
        "slurm": shutil.which("slurmctld") is None,
    }
    for item in items:
        for marker, skip in skips.items():
            if skip and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"{marker} is not here, or was not asked for with -m {marker}"))


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder with the public data sets: DECODEBENCH_DATA, or shared/data beside the checkout."""
    folder = Path(os.environ.get("DECODEBENCH_DATA") or SIBLING_DATA)
    if not folder.is_dir():
        pytest.skip("no data sets here; set DECODEBENCH_DATA to a folder that has them")
    return folder


@pytest.fixture(scope="session")
def cache_root() -> Path:
    """Where fetched models lie: DECODEBENCH_CACHE, or data/cache of the checkout."""
    return Path(os.environ.get("DECODEBENCH_CACHE") or ROOT / "data" / "cache")


@pytest.fixture(scope="session")
def smollm2_dir(cache_root: Path) -> Path:
    """The folder of the embedded model, converted; ``python -m bench fetch models smollm2`` makes it."""
    from bench.models.embedded import SMOLLM2

    folder = SMOLLM2.folder(cache_root)
    if not (folder / "model.safetensors").is_file():
        pytest.skip("the embedded model is not here; python -m bench fetch models smollm2")
    return folder


@pytest.fixture(scope="session")
def real_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """SLURM's own daemons, started for the tests."""
    from tests.helpers.fake_slurm import slurm

    if os.geteuid() != 0:
        pytest.skip("SLURM's daemons are started by root")
    with slurm(tmp_path_factory.mktemp("slurm")):
        yield


@pytest.fixture
def use_run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Put a function in the place of ``bench.measure.run.run``, which serves several runs too, one by one."""

    def use(run: Callable[..., Any]) -> None:
        module = types.ModuleType("bench.measure.run")
        module.run = run  # type: ignore[attr-defined]
        module.run_together = lambda cfgs, **options: [run(cfg, **options) for cfg in cfgs]  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "bench.measure.run", module)

    return use


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Products of the kernels by two threads, whatever the number is otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
