"""``python -m bench promise method=calm model=NAME method.calibration.corpus=FILE.jsonl``"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from bench.config import compose, options
from bench.config.schema import RunConfig
from bench.errors import INVALID, OK, UserError
from bench.promise.settings import PromiseConfig

_SUMMARY = """\
Tests the promise of a calibrated exit threshold: that texts lose at most the tolerance on average, except for a share
of calibrations, method.calibration.error_rate. All prompts of a corpus are decoded once in full and once per threshold;
they are then split again and again into prompts that calibrate and prompts that test.

method (calm, free, static_depth, hash_ee), model, hardware, seed, max_new_tokens and batch_size are as in
python -m bench; method.calibration.corpus names prompts that chose nothing else.
Exit code 3: a promise is broken more often than it may be, at 95 % certainty."""
_EXAMPLES = (
    "python -m bench promise method=calm model=smollm2 method.calibration.corpus=dolly prompts=400 max_new_tokens=32",
    "python -m bench promise method=calm method.confidence=classifier method.decay=paper tolerances=0.05,0.1",
    "python -m bench promise record=results/promise/NAME resamplings=1000",
)
_OWN = {"tolerance": "tolerances", "against": "losses", "prompts": "prompts", "whole_grid": None}


def help_text() -> str:
    return options.help_text("promise method=NAME [key=value ...]", _SUMMARY, _EXAMPLES, {"Options": PromiseConfig})


def main(argv: Sequence[str] | None = None) -> int:
    """Decode, resample, record, print; returns the exit code."""
    return options.command(_main, help_text, argv)


def _main(words: list[str]) -> int:
    config, overrides = options.parse(PromiseConfig, words)
    if config.record is None:
        return run(config, compose_run(config, overrides))
    where = [word for word in overrides if word.startswith("paths.results=")]
    options.refuse([word for word in overrides if word not in where], "promise", options.keys(PromiseConfig))
    return run_again(config, Path(config.record), Path(compose.compose(where).paths.results))


def run_again(config: PromiseConfig, earlier: Path, results: Path) -> int:
    """Resample the losses of an earlier record; otherwise as ``main``.

    Raises:
        UserError: it is no such record, or one that was changed.
    """
    from bench.promise import records
    from bench.promise.measure import measure_again

    if problem := next(records.problems(earlier), None):
        raise UserError(
            f"record must be a folder of {records.FOLDER}/ in a folder of results, got {earlier}: {problem}."
        )
    record = records.read_one(earlier)
    result, losses = measure_again(record, config)
    folder = records.write_again(results, config, record, result, losses)
    print(records.render(records.read_one(folder)))
    return OK if result["passed"] else INVALID


def compose_run(config: PromiseConfig, overrides: Sequence[str]) -> RunConfig:
    """The configuration of a calibrated run.

    Raises:
        UserError: a setting that has no effect here, or a method that has no risk target.
    """
    for word in overrides:
        key = word.lstrip("+~").partition("=")[0]
        setting = key.removeprefix("method.calibration.")
        if key != setting and setting in _OWN:
            instead = f" Set {_OWN[setting]} in its place." if _OWN[setting] else " Leave it out."
            raise UserError(f"{word} has no effect here.{instead}")
        if key.split(".")[0] == "dataset":
            raise UserError(f"{word} has no effect: prompts come from method.calibration.corpus. Leave it out.")
    if not any(word.startswith("method=") for word in overrides):
        raise UserError("promise needs method=NAME, one of calm, free, static_depth, hash_ee.")
    cfg = compose.compose(overrides)
    if "calibration" not in cfg.method:
        raise UserError(
            f"promise needs a method whose threshold can be calibrated, got {cfg.method['name']}. Use method=calm, "
            "free, static_depth or hash_ee."
        )
    promised = [f"method.calibration.tolerance={config.tolerances[0]}", "method.calibration.against=risk"]
    return compose.compose([*overrides, *promised])


def run(config: PromiseConfig, cfg: RunConfig) -> int:
    """See ``main``."""
    from bench.config import instantiate
    from bench.measure import preconditions
    from bench.models import artifacts, loading
    from bench.promise import records
    from bench.promise.measure import measure
    from bench.utils import machine
    from bench.utils.memory import keep_freed_memory

    instantiate.check(cfg)
    preconditions.require(preconditions.check(cfg))
    keep_freed_memory()
    machine.set_threads(cfg.hardware.threads)
    loaded = loading.load(cfg.model, asdict(cfg.hardware), cfg.paths)
    part = artifacts.find(cfg.method, loaded.name, loaded.revision, cfg.paths)
    begin = datetime.now(timezone.utc)
    result, losses = measure(cfg, config, loaded)
    seconds = (datetime.now(timezone.utc) - begin).total_seconds()
    name = records.folder_name(cfg, config, loaded, part.sha256 if part else None, result["corpus"]["sha256"])
    folder = Path(cfg.paths.results) / records.FOLDER / name
    records.write(folder, cfg, config, loaded, result, losses, begin, seconds)
    print(records.render(records.read_one(folder)))
    return OK if result["passed"] else INVALID
