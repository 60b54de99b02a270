"""A translation track in miniature: a data folder of one grammar, and models of it made by the command itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.train import command
from tests.base_models.test_translation import sentences

MACHINE = ("hardware=cpu_fp32", "hardware.threads=1")
_SPLITS = {"train": 200, "val": 4, "test_2016_flickr": 6}


def write_data(root: Path) -> Path:
    """A folder that ``DECODEBENCH_DATA`` may name: Multi30k in its file names only."""
    folder = root / "multi30k"
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate(_SPLITS.items()):
        for side, language in enumerate(("en", "de")):
            lines = [pair[side] for pair in sentences(count, seed)]
            (folder / f"{split}.{language}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return root


def make_model(layers: Sequence[int], cache: Path, *words: str, steps: int = 80) -> None:
    """``bench.train method=teacher`` in seconds: ``multi30k_4_4`` or ``multi30k_6_1`` by their shapes, of width 32."""
    shape = {"width": 32, "inner": 64, "heads": 2, "vocabulary": 300, "positions": 96, "layers": list(layers)}
    recipe = {"steps": steps, "tokens": 600, "learning_rate": 0.01, "warmup": 20, "evaluations": 1, "average": 1}
    own = [f"train.{key}={value}" for key, value in shape.items()]
    own += [f"train.recipe.{key}={value}" for key, value in recipe.items()]
    code = command.main(["method=teacher", "corpus=multi30k", *own, *MACHINE, f"paths.cache={cache}", *words])
    assert code == 0, "the tiny model could not be made"
