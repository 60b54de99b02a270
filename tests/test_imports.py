"""Imports go one way: bench knows the interface, a method knows the engine, the engine knows no method."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted([*ROOT.glob("methods/**/*.py"), *ROOT.glob("bench/**/*.py")])
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
LIGHT_FILES = {
    "cluster.py",
    "cluster_job.py",
    "cluster_ray.py",
    "cluster_slurm.py",
    "__init__.py",
    "__main__.py",
    "cli.py",
    "config.py",
    "arguments.py",
    "errors.py",
    "failures.py",
    "preflight.py",
    "train.py",
}
SHARED = {"decoder", "engine"}  # what every method and the benchmark may use
# The baseline is the speculative loop with an empty draft, and the denominator of every run.
# Exits learn from what draft heads learn from: the target's own answers and its states over them.
# A student drafts for its teacher.
ALSO = {
    "methods/autoregressive.py": {"speculative"},
    "methods/early_exit/training_states.py": {"speculative"},
    "methods/speculative/nar_drafter.py": {"non_autoregressive"},
    "bench": {"autoregressive"},
}
# The laboratory draws from the rules themselves, right and wrong ones, without a decoder around them.
RULES = {"methods.speculative.verification", "bench.lossless.wrong_rules"}


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
        if top == "bench":
            assert package == "bench", f"{name} is a method and imports the benchmark: {module}"
        if top == "methods" and imported:
            allowed = SHARED | ALSO.get(name, set()) | (ALSO["bench"] if package == "bench" else {part})
            tested = name.startswith("bench/lossless/") and module.startswith(tuple(RULES))
            assert imported in allowed or tested, f"{name} may not import {module}"


@pytest.mark.parametrize("name", sorted(LIGHT_FILES))
def test_what_shows_help_imports_nothing_heavy(name: str) -> None:
    modules = imports(ast.parse((ROOT / "bench" / name).read_text()).body, inside=False)
    assert not {module.split(".")[0] for module in modules} & HEAVY


def test_records_and_numbers_are_read_without_torch() -> None:
    modules = (
        "bench.records.run_folder, bench.analysis.metrics, bench.utils.stats, bench.models.loading, bench.tasks.sources"
    )
    code = f"import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import {modules}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
