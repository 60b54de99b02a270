"""Imports go one way: decodebench knows all, bench the interface, a method the engine, the engine no method."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted([*ROOT.glob("methods/**/*.py"), *ROOT.glob("bench/**/*.py")])
API = sorted(ROOT.glob("decodebench/**/*.py"))
HEAVY = {
    "torch",
    "transformers",
    "datasets",
    "pandas",
    "seaborn",
    "matplotlib",
    "wandb",
    "scipy",
    "hydra",
    "methods",
} | {"ray", "submitit"}
LIGHT_FILES = sorted(
    file.relative_to(ROOT).as_posix()
    for pattern in ("*.py", "config/*.py", "sweep/*.py", "train/__*__.py", "train/command.py")
    for file in (ROOT / "bench").glob(pattern)
)
# From top to bottom: a package imports from itself and from the lines below, also inside functions.
LAYERS = [
    line.split()
    for line in """
    bench.__main__
    bench.cli bench.readme
    bench.gpu
    bench.doctor bench.validate
    bench.sweep bench.train bench.cost bench.lossless bench.rivals bench.promise
    bench.measure
    bench.contract
    bench.report
    bench.analysis
    bench.records
    bench.models
    bench.tasks
    bench.scoring
    bench.config
    bench.utils
    bench.errors
    methods.autoregressive methods.beam_search methods.external methods.base_models
    methods.early_exit
    methods.speculative
    methods.non_autoregressive
    methods.training
    methods.drafting methods.rows
    methods.decoder
    methods.engine
    """.strip().splitlines()
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
SHARED = {"decoder", "drafting", "rows", "engine", "training"}  # what every method and the benchmark may use
# The baseline is the speculative loop with an empty draft, and the denominator of every run.
# A student drafts for its teacher. Models trained here can have exits or draft for themselves. SpecEE asks its exits
# about drafted tokens.
ALSO = {
    "methods/autoregressive.py": {"speculative"},
    "methods/speculative/nar_drafter.py": {"non_autoregressive"},
    "methods/early_exit/specee.py": {"speculative"},
    "methods/base_models/translation.py": {"early_exit"},
    "methods/base_models/characters.py": {"early_exit"},
    "methods/base_models/hash_teacher.py": {"early_exit"},
    "methods/base_models/exit_model.py": {"early_exit"},
    "methods/base_models/self_diffusion.py": {"speculative"},
    "methods/base_models/masked_diffusion.py": {"non_autoregressive"},
    "bench": {"autoregressive"},
}
EXPERIMENTS = {  # look at one family from inside
    "bench/measure/confidence_timing.py": "methods.early_exit",
    "bench/promise/measure.py": "methods.early_exit.calibrator",
}
# The lossless experiments draw from the rules themselves, correct and wrong ones.
RULES = {"methods.speculative", "bench.lossless.wrong_rules"}


def imports(body: list[ast.stmt], *, inside: bool) -> Iterator[str]:
    """Dotted names of imported modules; those inside functions and type-checking blocks only if ``inside``."""
    nodes = (node for statement in body for node in (ast.walk(statement) if inside else [statement]))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_go_one_way(file: Path) -> None:
    name = file.relative_to(ROOT).as_posix()
    package, part = name.split("/")[0], name.split("/")[1].removesuffix(".py")
    for module in imports(ast.parse(file.read_text()).body, inside=True):
        top, imported = (*module.split("."), "")[:2]
        assert top != "decodebench", f"{name} may not import the Python API: {module}"
        if top == "bench":
            assert package == "bench", f"{name} is a method and imports the benchmark: {module}"
        if top == "methods" and imported:
            allowed = SHARED | ALSO.get(name, set()) | (ALSO["bench"] if package == "bench" else {part})
            tested = name.startswith("bench/lossless/") and module.startswith(tuple(RULES))
            tested = tested or module.startswith(EXPERIMENTS.get(name, "-"))
            assert imported in allowed or tested, f"{name} may not import {module}"


@pytest.mark.parametrize("file", API, ids=lambda file: file.name)
def test_the_python_api_knows_no_single_method(file: Path) -> None:
    for module in imports(ast.parse(file.read_text()).body, inside=True):
        top, imported = (*module.split("."), "")[:2]
        assert top != "methods" or imported in SHARED, f"{file.name} may not import {module}"


def test_every_package_is_in_a_layer() -> None:
    found = {".".join(file.relative_to(ROOT).with_suffix("").parts[:2]) for file in FILES}
    assert found - {"bench.__init__", "methods.__init__"} == set(RANK)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_go_down_the_layers(file: Path) -> None:
    name = file.relative_to(ROOT).as_posix()
    own = ".".join(file.relative_to(ROOT).with_suffix("").parts[:2])
    tree = ast.parse(file.read_text())
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    for_types = {module for block in blocks for module in imports(block.body, inside=True)}
    for module in set(imports(tree.body, inside=True)) - for_types:
        package = ".".join(module.split(".")[:2])
        if package in RANK and package != own and own in RANK:
            assert RANK[package] > RANK[own], f"{name} may not import {module}: {package} is not below {own}"


@pytest.mark.parametrize("name", LIGHT_FILES)
def test_what_shows_help_imports_nothing_heavy(name: str) -> None:
    modules = imports(ast.parse((ROOT / name).read_text()).body, inside=False)
    assert not {module.split(".")[0] for module in modules} & HEAVY


def test_records_and_numbers_are_read_without_torch() -> None:
    modules = (
        "bench.records.lookup, bench.analysis.metrics, bench.utils.stats, bench.models.loading, bench.tasks.sources"
    )
    code = f"import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import {modules}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
