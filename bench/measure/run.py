"""One run from configuration to verdict; the program on one screen."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.analysis import metrics
from bench.analysis.audit import AuditResult
from bench.analysis.cost_curve import CostCurve
from bench.analysis.summary import summarise
from bench.config import instantiate
from bench.config.identity import run_id
from bench.config.schema import RunConfig
from bench.errors import RunFailed
from bench.measure import agreement, instruments, manifest, preconditions, threshold_calibration, verify_cost
from bench.measure.interleave import Runner, Seconds
from bench.measure.manifest import Parts
from bench.measure.threshold_calibration import Choice, Writer
from bench.models import artifacts, loading
from bench.models.artifacts import Prepared
from bench.models.source import Loaded
from bench.records import lookup, run_folder
from bench.records.run_folder import RunFolder, Sample
from bench.report import terminal, tracked_run
from bench.report.terminal import plural
from bench.tasks import Task, prompts
from bench.utils import files, machine, redact
from bench.utils.progress import stage
from methods.decoder import Decoder

CALIBRATION = "calibration.json"  # beside the manifest: the losses that a threshold was chosen by
_BASELINE = {"name": "autoregressive", "_target_": "methods.autoregressive.Autoregressive"}
_MASK_BY_MASK = {  # the baseline of a diffusion model, which knows no order of tokens
    "name": "diffusion",
    "_target_": "methods.non_autoregressive.diffusion.Diffusion",
    "threshold": None,
    "tokens_per_step": 1,
    "cache": "none",
}


@dataclass(frozen=True, slots=True)
class RunResult:
    """Folder of a run, content of its summary.json, and the verdict."""

    path: Path
    summary: dict[str, Any]
    verdict: AuditResult


@dataclass(frozen=True, slots=True)
class Given:
    """What a Python program has made already; the rest is made from the configuration.

    Attributes:
        loaded: the target.
        task: the prompts.
        drafts: draft models by the name that the configuration has for them.
        model_bytes: memory of these models, which counts as the run's.
    """

    loaded: Loaded | None = None
    task: Task | None = None
    drafts: Mapping[str, Loaded] = field(default_factory=dict)
    model_bytes: int = 0


def run(
    cfg: RunConfig,
    *,
    fresh: bool | datetime = False,
    since: datetime | None = None,
    given: Given | None = None,
    quiet: bool = False,
) -> RunResult:
    """Measure a method, or report what was measured before.

    An interrupted run is resumed. A finished one is reported, unless it is INVALID because of noise: then it is
    measured again. The record of a finished run is kept until its repetition is complete.

    Args:
        cfg: the run.
        fresh: measure again whatever is recorded; a time: what started before it, so that a job that a cluster restarts
            resumes its own.
        since: when the job was submitted; a record that started later is its own, and kept even if it is noisy.
        given: parts of the run that exist already.
        quiet: do not print the table.

    Raises:
        UserError: the run is refused.
        RunFailed: it failed on its way; what was measured is kept.
    """
    parts = prepare(cfg, given)
    decided, results = manifest.resolved(parts), Path(cfg.paths.results)
    run_folder.restore(results / run_id(cfg, decided))
    path = lookup.find(results, cfg, decided) or results / run_id(cfg, decided)
    again, noisy = _finished(path), run_folder.is_noisy(path)
    if isinstance(fresh, datetime):
        since, fresh = fresh, _started_before(fresh, path)
    noisy = noisy and (since is None or _started_before(since, path))
    if again and not fresh and not noisy:
        print("Already measured. Use --fresh to repeat, in Python fresh=True.", file=sys.stderr)
        with run_folder.claimed(path):
            return report(cfg, path, quiet=quiet)
    if again and not fresh:
        print("Measured before, INVALID because of an unsteady machine. Measuring again.", file=sys.stderr)
    choice = _calibrate(cfg, parts)
    facts = manifest.manifest(cfg, parts, choice)
    config = manifest.config_yaml(cfg)
    with RunFolder.create(
        path.parent, path.name, facts, config, fresh=bool(fresh) and not again, beside=again
    ) as folder:
        with _status(folder):
            if choice:
                files.write_json(folder.path / CALIBRATION, choice.to_json())
            _measure(cfg, parts, folder)
        found = summarise(folder.path)
        run_folder.write_summary(folder.path, found.content)
    if again:
        run_folder.put_in_place(path)
    with run_folder.claimed(path):
        return report(cfg, path, quiet=quiet)


def prepare(cfg: RunConfig, given: Given | None = None) -> Parts:
    """Build everything, and refuse what cannot be run before anything is measured."""
    given = given or Given()
    preconditions.require(preconditions.check(cfg))
    task = given.task or instantiate.build_task(cfg.dataset, cfg.paths)
    examples = list(task.load())
    preconditions.require(preconditions.check_prompts(cfg, len(examples)))
    machine.set_threads(cfg.hardware.threads)
    stage(f"loading model {cfg.model['name']} and method {cfg.method['name']}")
    loading.import_libraries()
    floor_bytes = instruments.settled_bytes()
    gpu_busy = machine.gpu_utilisation(loading.resolve_hardware(asdict(cfg.hardware))[0])
    if floor_bytes is not None:
        floor_bytes -= given.model_bytes
    loaded = given.loaded or loading.load(
        cfg.model, asdict(cfg.hardware), cfg.paths, keep_hf=instantiate.needs_hf(cfg.method)
    )
    preconditions.require(preconditions.check_loaded(cfg, task, loaded))
    loading.require_languages(loaded, f"dataset={cfg.dataset['name']}", getattr(task, "languages", None))
    settings = manifest.settings(cfg, loaded)
    lengths = prompts.check(task, examples, loaded.tokenizer, settings.limit, settings.context, apart=settings.apart)
    baseline = instantiate.build_decoder(_MASK_BY_MASK if loaded.denoises else _BASELINE, loaded.lm, cfg.sampling)
    method, part = build_method(cfg, loaded, given.drafts)
    if settings.warmup:
        settings = replace(settings, warmup=max(settings.warmup, method.min_warmup))
    drawn = threshold_calibration.draw(cfg, method, loaded, examples, part, settings.context)
    named = lookup.local_files(cfg.method)
    return Parts(task, examples, loaded, baseline, method, settings, lengths, floor_bytes, gpu_busy, part, drawn, named)


def build_method(cfg: RunConfig, loaded: Loaded, drafts: Mapping[str, Loaded]) -> tuple[Decoder, Prepared | None]:
    """The decoder under test, and the checkpoint that it uses.

    Args:
        loaded: the target.
        drafts: see ``Given``.
    """
    part = artifacts.find(cfg.method, loaded.name, loaded.revision, cfg.paths)
    if part and part.warning:
        print(f"warning: {part.warning}", file=sys.stderr)
    load_model = loading.draft_loader(cfg, loaded.tokenizer, drafts)
    folder = part.folder if part else None
    return instantiate.build_decoder(cfg.method, loaded.lm, cfg.sampling, load_model, folder), part


def _calibrate(cfg: RunConfig, parts: Parts) -> Choice | None:
    """Set the method's threshold to the one that its risk target allows."""
    if parts.calibration is None:
        return None
    settings, part = parts.settings, parts.prepared.sha256 if parts.prepared else None
    writer = Writer(parts.loaded, settings.limit, settings.eos_ids, settings.batch_size)
    with run_folder.machine_failures("calibration"):
        return threshold_calibration.choose(parts.calibration, cfg, parts.baseline, parts.method, writer, part)


def report(cfg: RunConfig, path: Path, *, quiet: bool = False) -> RunResult:
    """Print the summary unless ``quiet``, and send the run to the tracker; from the records alone."""
    found = summarise(path)
    if not (path / run_folder.SUMMARY).is_file():
        run_folder.write_summary(path, found.content)
    if not quiet:
        print(terminal.render(found.content, path, cfg.to_dict(), _reference(cfg)))
    instantiate.build_tracker(cfg.tracker).log(partial(tracked_run.finished_run, path, cfg.paths))
    return RunResult(path, found.content, found.verdict)


def _reference(cfg: RunConfig) -> dict[str, Any] | None:
    """Summary of the project's record that is closest to this run, on whatever machine."""
    folder = Path(cfg.paths.reference or "")
    if not (cfg.paths.reference and folder.is_dir()) or folder.resolve() == Path(cfg.paths.results).resolve():
        return None
    found = (files.read_json(path / run_folder.SUMMARY) for path in lookup.similar(folder, cfg))
    return next((summary for summary in found if summary), None)


# -------------------------------------------------------------------------------------------------------- measuring


def _measure(cfg: RunConfig, parts: Parts, folder: RunFolder) -> None:
    """Warm-up, cost curve, the loop, quality, agreement; each writes its results into the manifest."""
    spent = Seconds()
    runner = Runner(
        parts.baseline,
        parts.method,
        parts.task,
        parts.examples,
        parts.loaded.tokenizer,
        folder,
        parts.settings,
        instruments.Instruments(parts.loaded.lm.device, parts.floor_bytes),
        parts.task.spare,
        seconds=spent,
    )
    try:
        stage(f"warming up, {plural(parts.settings.warmup, 'prompt')} or more by both arms")
        warm = [] if runner.complete else runner.warm_up()
        rates = [metrics.kept_at(sample) for sample in warm if sample.arm == "method"]
        if rates and (doubt := parts.method.acceptance_warning(rates)):
            print(f"warning: {doubt}", file=sys.stderr)
            folder.update(doubt=doubt)
        if cfg.measure.cost_curve and not parts.loaded.denoises and "cost_curve" not in folder.manifest:
            stage("measuring the cost of a forward pass by its number of tokens")
            with _clocked(spent, "cost_curve"):
                folder.update(cost_curve=_cost_curve(parts, warm).to_dict())
        ahead = manifest.made_ahead(parts)
        runner.measure()
        in_all = manifest.made_ahead(parts)
        folder.update(**{kind: {"before": ahead[kind], "in_all": in_all[kind]} for kind in ahead})
        folder.update(**manifest.after(parts, folder.manifest, folder.samples))
        with _clocked(spent, "quality"):
            folder.update(**_quality(parts, folder.samples), quality_notes=parts.task.notes())
        if cfg.measure.agreement:
            stage("checking the outputs against the target")
            with _clocked(spent, "agreement"):
                folder.update(agreement=_agreement(cfg, parts, folder.samples))
    finally:
        with suppress(RunFailed):  # the disk may be full: that message is on its way already
            _note_time(folder, spent)


def _cost_curve(parts: Parts, warm: Sequence[Sample]) -> CostCurve:
    """At the shortest and the longest text of the run, up to the method's largest pass."""
    most = max((nodes for sample in warm if sample.arm == "method" for nodes in sample.step_nodes), default=64)
    contexts = (min(parts.lengths), max(parts.lengths) + parts.settings.limit)
    batch = min(parts.settings.batch_size, len(parts.examples))
    return verify_cost.measure(parts.loaded.lm, batch, verify_cost.grid(most), contexts)


def _agreement(cfg: RunConfig, parts: Parts, samples: Sequence[Sample]) -> dict[str, Any]:
    lm, greedy = parts.loaded.lm, cfg.sampling.temperature == 0.0
    if parts.loaded.denoises:
        return agreement.compare(samples, greedy=greedy, reason="a diffusion model judges no text token by token")
    gap = agreement.near_tie_gap(lm.dtype, cfg.measure.near_tie_gap)
    found = agreement.check_run(lm, samples, gap, greedy=greedy)
    if (verifier := parts.method.reference_model()) is not None:
        found["verifier"] = agreement.check_own(verifier, samples, gap, greedy=greedy)
    return found


def _quality(parts: Parts, samples: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """Scores over all answers of an arm (first repeat), and the change from the baseline's over what both answered.

    A corpus metric such as BLEU is no mean of its answers' scores.
    """
    asked = {prompts.prompt_id(e, turn): (e, turn) for e in parts.examples for turn in range(len(e.turns))}
    answers: dict[str, dict[str, tuple[Any, int, str]]] = {"method": {}, "baseline": {}}
    for sample in samples:
        if sample.phase == "measure" and sample.repeat == 0:
            answers[sample.arm][sample.prompt_id] = (*asked[sample.prompt_id], sample.text)
    scores = {arm: parts.task.aggregate(given.values()) for arm, given in answers.items()}
    shared = [name for name in answers["baseline"] if name in answers["method"]]
    before, after = ([answers[arm][name] for name in shared] for arm in ("baseline", "method"))
    change = {metric: asdict(found) for metric, found in parts.task.change(before, after).items()}
    return {"quality": scores, "quality_change": change}


def _note_time(folder: RunFolder, spent: Seconds) -> None:
    total = Seconds(**folder.manifest.get("seconds", {})) + spent
    folder.update(seconds=asdict(total), harness_share=total.harness_share, n_done=len(folder.done_keys()))


@contextmanager
def _clocked(spent: Seconds, stage: str) -> Iterator[None]:
    begin = perf_counter()
    try:
        yield
    finally:
        setattr(spent, stage, getattr(spent, stage) + perf_counter() - begin)


@contextmanager
def _status(folder: RunFolder) -> Iterator[None]:
    """Record in the manifest how the measurement ended."""
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, (KeyboardInterrupt, SystemExit))  # by the user, or by a cluster that resumes later
        status = "interrupted" if stopped else "failed"
        with suppress(RunFailed):
            folder.update(status=status, ended_at=manifest.now(), error=redact.text(traceback.format_exc()))
        raise
    folder.update(status="finished", ended_at=manifest.now())


def _finished(path: Path) -> bool:
    return (run_folder.read_manifest(path) or {}).get("status") == "finished"


def _started_before(time: datetime, path: Path) -> bool:
    started = (run_folder.read_manifest(path) or {}).get("started_at")
    return started is None or datetime.fromisoformat(started) < time
