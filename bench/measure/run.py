"""One run, or several against one baseline, from configuration to verdict."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.analysis.audit import AuditResult
from bench.analysis.cost_curve import CostSurface
from bench.analysis.summary import summarise
from bench.config import instantiate
from bench.config.identity import run_id
from bench.config.schema import RunConfig
from bench.errors import RunFailed, UserError, explain, missing_package
from bench.measure import (
    acceptance_check,
    agreement,
    cost_watch,
    draft_costs,
    instruments,
    manifest,
    memory_plan,
    observation,
    preconditions,
    threshold_calibration,
    verify_cost,
)
from bench.measure.cost_watch import CostWatch
from bench.measure.interleave import MethodArm, Runner, Seconds
from bench.measure.manifest import Parts, Shared
from bench.measure.threshold_calibration import Choice, Writer
from bench.models import artifacts, loading
from bench.models.artifacts import Prepared
from bench.models.source import Loaded
from bench.records import digests, lookup, run_folder
from bench.records.run_folder import RunFolder, Sample
from bench.report import terminal, tracked_run
from bench.report.terminal import plural
from bench.tasks import Task, prompts
from bench.utils import files, machine, redact
from bench.utils.progress import stage
from methods.decoder import CostAware, Decoder
from methods.engine.cuda_graphs import GraphedLM

BASELINE = {"name": "autoregressive", "_target_": "methods.autoregressive.Autoregressive"}
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
    (found,) = run_together([cfg], fresh=fresh, since=since, given=given, quiet=quiet)
    if isinstance(found, Exception):
        raise found
    return found


def run_together(
    cfgs: Sequence[RunConfig],
    *,
    fresh: bool | datetime = False,
    since: datetime | None = None,
    given: Given | None = None,
    quiet: bool = False,
) -> list[RunResult | Exception]:
    """Measure several methods against one baseline, prompt by prompt; each gets the record that it has alone.

    Args:
        cfgs: runs that differ in their method alone.
        fresh, since, given, quiet: see ``run``.

    Returns:
        For each run its result, or why it was refused or failed; the others go on.

    Raises:
        UserError: no run can be measured, for a reason that holds for all.
        RunFailed: likewise.
    """
    shared, prepared = _prepare(cfgs, given or Given())
    done: dict[int, RunResult | Exception] = {}
    arms: list[_Arm] = []
    for place, (cfg, parts) in enumerate(zip(cfgs, prepared, strict=True)):
        if isinstance(parts, Exception):
            done[place] = parts
            continue
        path, again, known = _recorded(cfg, parts, fresh, since)
        if known:
            with run_folder.claimed(path):
                done[place] = report(cfg, path, quiet=quiet)
            continue
        arms.append(_Arm(place, cfg, parts, path, bool(fresh) and not again, again))
    if arms:
        _calibrate_all(arms, done)
        _measure_all([arm for arm in arms if arm.place not in done], shared, done)
    for arm in arms:
        if arm.place not in done:
            if arm.beside:
                run_folder.put_in_place(arm.path)
            with run_folder.claimed(arm.path):
                done[arm.place] = report(arm.cfg, arm.path, quiet=quiet)
    return [done[place] for place in range(len(cfgs))]


@dataclass(slots=True)
class _Arm:
    """A run that is to be measured.

    Attributes:
        place: among the runs asked for.
        fresh, beside: see ``RunFolder.create``.
    """

    place: int
    cfg: RunConfig
    parts: Parts
    path: Path
    fresh: bool
    beside: bool
    choice: Choice | None = None


def _recorded(cfg: RunConfig, parts: Parts, fresh: bool | datetime, since: datetime | None) -> tuple[Path, bool, bool]:
    """The folder of a run, whether it holds a finished record, and whether that record will do."""
    decided, results = manifest.resolved(parts), Path(cfg.paths.results)
    run_folder.restore(results / run_id(cfg, decided))
    path = lookup.find(results, cfg, decided) or results / run_id(cfg, decided)
    again, noisy = _finished(path), run_folder.is_noisy(path)
    if isinstance(fresh, datetime):
        since, fresh = fresh, _started_before(fresh, path)
    noisy = noisy and (since is None or _started_before(since, path))
    if again and not fresh and not noisy:
        print("Already measured. Use --fresh to repeat, in Python fresh=True.", file=sys.stderr)
        return path, again, True
    if again and not fresh:
        print("Measured before, INVALID because of an unsteady machine. Measuring again.", file=sys.stderr)
    return path, again, False


def prepare(cfg: RunConfig, given: Given | None = None) -> Parts:
    """Build everything, and refuse what cannot be run before anything is measured.

    Raises:
        UserError: the run is refused.
    """
    _, (parts,) = _prepare([cfg], given or Given())
    assert isinstance(parts, Parts), "what is refused alone is raised"
    return parts


def _prepare(cfgs: Sequence[RunConfig], given: Given) -> tuple[Shared, list[Parts | Exception]]:
    """What runs share that differ in their method alone, and for each what it is made of, or why it is refused.

    Raises:
        UserError: all are refused; the reason of the first.
    """
    cfg = cfgs[0]
    assert all(replace(other, method=cfg.method) == cfg for other in cfgs), "runs differ in their method alone"
    refused = [_refusal(each) for each in cfgs]
    if all(refused):
        raise next(filter(None, refused))
    task = given.task or instantiate.build_task(cfg.dataset, cfg.paths)
    examples = prompts.by_length(task.load()) if cfg.measure.sort_by_length else list(task.load())
    preconditions.require(preconditions.check_prompts(cfg, len(examples)))
    machine.set_threads(cfg.hardware.threads)
    named = [each.method["name"] for each, reason in zip(cfgs, refused, strict=True) if reason is None]
    stage(f"loading model {cfg.model['name']} and {'method' if len(named) == 1 else 'methods'} {', '.join(named)}")
    loading.settle_libraries(asdict(cfg.hardware))
    task.load_scorers()
    if given.loaded is None:
        memory_plan.require_before(cfg, examples)
    floor_bytes = instruments.settled_bytes()
    gpu_busy = machine.gpu_utilisation(loading.resolve_hardware(asdict(cfg.hardware))[0])
    if floor_bytes is not None:
        floor_bytes -= given.model_bytes
    loaded = given.loaded or loading.load(
        cfg.model,
        asdict(cfg.hardware),
        cfg.paths,
        keep_hf=any(instantiate.needs_hf(each.method) for each in cfgs),
    )
    loaded = _alike_in_both_arms(cfgs, loaded)
    preconditions.require(preconditions.check_loaded(cfg, task, loaded))
    loading.require_languages(loaded, f"dataset={cfg.dataset['name']}", getattr(task, "languages", None))
    settings = manifest.settings(cfg, loaded)
    examples = task.filled(examples, loaded.tokenizer)
    lengths = prompts.check(task, examples, loaded.tokenizer, settings.limit, settings.context, apart=settings.apart)
    baseline = instantiate.build_decoder(_MASK_BY_MASK if loaded.denoises else BASELINE, loaded.lm, cfg.sampling)
    shared = Shared(task, examples, loaded, baseline, settings, lengths, floor_bytes, gpu_busy)
    found = [reason or _parts(each, shared, given) for each, reason in zip(cfgs, refused, strict=True)]
    if all(isinstance(parts, Exception) for parts in found):
        raise next(parts for parts in found if isinstance(parts, Exception))
    least = max(parts.method.min_warmup for parts in found if isinstance(parts, Parts))
    if settings.warmup:
        shared = replace(shared, settings=replace(settings, warmup=max(settings.warmup, least)))
    return shared, [parts if isinstance(parts, Exception) else replace(parts, shared=shared) for parts in found]


def _alike_in_both_arms(cfgs: Sequence[RunConfig], loaded: Loaded) -> Loaded:
    """The target without CUDA graphs if a method's passes cannot be replayed: its baseline's are not either, then."""
    kept = all(instantiate.method_class(cfg.method).replays_passes(cfg.method) for cfg in cfgs)
    if kept or not isinstance(loaded.lm, GraphedLM):
        return loaded
    return replace(loaded, lm=loaded.lm.without_graphs(), graphs_left=True)


def _refusal(cfg: RunConfig) -> UserError | None:
    reasons = preconditions.check(cfg)
    return UserError(" ".join(reasons)) if reasons else None


def _parts(cfg: RunConfig, shared: Shared, given: Given) -> Parts | Exception:
    """The method of a run; why it cannot be made, if it cannot."""
    before = _held(shared)
    try:
        method, part = build_method(cfg, shared.loaded, given.drafts)
        drawn = threshold_calibration.draw(cfg, method, shared.loaded, shared.examples, part, shared.settings.context)
    except UserError as error:
        return error
    except ModuleNotFoundError as error:
        return missing_package(error) or error
    except (RuntimeError, MemoryError, OSError) as error:
        return explain(error, f"loading method {cfg.method['name']}") or error
    parts = Parts(shared, method, part, drawn, lookup.local_files(cfg.method), max(0, _held(shared) - before))
    planned = partial(manifest.memory_planned, parts)
    rows, longest, device = manifest.rows(shared), max(shared.lengths), shared.loaded.lm.device
    try:
        memory_plan.require(planned, rows, longest, shared.settings.limit, device)
    except UserError as error:
        return error
    return parts


def _held(shared: Shared) -> int:
    """Memory that is in use now, as ``instruments.MemoryMeter`` counts it."""
    return instruments.held_bytes(shared.loaded.lm.device)


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
    cache = Path(cfg.paths.cache)
    return instantiate.build_decoder(cfg.method, loaded.lm, cfg.sampling, load_model, folder, cache), part


def _calibrate_all(arms: Sequence[_Arm], done: dict[int, RunResult | Exception]) -> None:
    """Choose the thresholds; what fails is not measured."""
    for arm in arms:
        try:
            arm.choice = _calibrate(arm.cfg, arm.parts)
        except (UserError, RunFailed) as error:
            done[arm.place] = error


def _calibrate(cfg: RunConfig, parts: Parts) -> Choice | None:
    """Set the method's threshold to the one that its risk target allows."""
    if parts.calibration is None:
        return None
    shared, part = parts.shared, parts.prepared.sha256 if parts.prepared else None
    settings = shared.settings
    writer = Writer(shared.loaded, settings.limit, settings.eos_ids, settings.batch_size)
    with run_folder.machine_failures("calibration"):
        return threshold_calibration.choose(parts.calibration, cfg, shared.baseline, parts.method, writer, part)


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


def _measure_all(arms: Sequence[_Arm], shared: Shared, done: dict[int, RunResult | Exception]) -> None:
    """Measure into the folders of the runs; those that fail get their error in ``done``."""
    with ExitStack() as stack:
        measured = []
        for arm in arms:
            facts = manifest.manifest(arm.cfg, arm.parts, arm.choice, [other.cfg for other in arms])
            create = partial(RunFolder.create, arm.path.parent, arm.path.name, facts, manifest.config_yaml(arm.cfg))
            try:
                folder = stack.enter_context(create(fresh=arm.fresh, beside=arm.beside))
            except (UserError, RunFailed) as error:
                if len(arms) == 1:
                    raise
                done[arm.place] = error
                continue
            if arm.choice:
                files.write_entries(folder.path / run_folder.CALIBRATION, arm.choice.to_json())
            measured.append((arm, MethodArm(arm.parts.method, folder, arm.parts.held_bytes)))
        try:
            _measure([(arm.cfg, arm.parts, method) for arm, method in measured], shared)
        except BaseException as error:
            for arm, method in measured:
                _end(method.folder, method.error or error)
                done[arm.place] = method.error or error  # type: ignore[assignment]  # others are raised again
            if len(arms) == 1 or not isinstance(error, Exception):
                raise
            return
        for arm, method in measured:
            try:
                method.folder.require_samples()
            except RunFailed as error:
                method.error = method.error or error
            if method.error is not None:
                done[arm.place] = method.error
            else:
                method.folder.update(ended_at=manifest.now())
                run_folder.write_summary(method.folder.path, summarise(method.folder.path).content)
            _end(method.folder, method.error)
            method.folder.close()


def _measure(arms: Sequence[tuple[RunConfig, Parts, MethodArm]], shared: Shared) -> None:
    """Warm-up, cost curve, the loop, quality, agreement; each writes its results into the manifests."""
    spent, watch = Seconds(), None
    runner = Runner(
        shared.baseline,
        [arm for _, _, arm in arms],
        shared.task,
        shared.examples,
        shared.loaded.tokenizer,
        shared.settings,
        instruments.Instruments(shared.loaded.lm.device, shared.floor_bytes),
        shared.task.spare,
        seconds=spent,
    )
    try:
        fresh = _hand_over_costs(arms, shared, spent)
        with _clocked(spent, "device"):
            observation.record_peaks(runner.arms, shared.loaded.lm.device, arms[0][0].measure)
        stage(f"warming up, {plural(shared.settings.warmup, 'prompt')} or more by {_arms_in_words(len(arms))}")
        warm = [[] for _ in arms] if runner.complete else runner.warm_up()
        for (cfg, parts, arm), samples in zip(arms, warm, strict=True):
            if doubt := acceptance_check.doubt(cfg, parts.method, parts.prepared, samples):
                print(f"warning: {doubt}", file=sys.stderr)
                arm.folder.update(doubt=doubt)
        _record_cost_curve(arms, shared, spent, [sample for samples in warm for sample in samples])
        _confirm_costs(fresh, shared, spent, alone=len(arms) == 1)
        if isinstance(shared.loaded.lm, GraphedLM):
            stage("capturing the passes that the prompts may need")
            GraphedLM.prepare(_longest(shared))
        ahead = manifest.made_ahead(shared)
        watch = _cost_watch(arms, shared, runner)
        runner.measure()
        in_all = manifest.made_ahead(shared)
        with _clocked(spent, "device"):
            observation.observe(runner.open, runner, arms[0][0].measure)
        judged: agreement.Known = {}
        for cfg, parts, arm in arms:
            if arm.error is not None:
                continue
            folder = arm.folder
            folder.update(**{kind: {"before": ahead[kind], "in_all": in_all[kind]} for kind in ahead})
            folder.update(**manifest.after(parts, folder.manifest, folder.samples))
            with _clocked(spent, "quality"):
                folder.update(**_quality(shared, folder.samples), quality_notes=shared.task.notes())
            if cfg.measure.agreement:
                stage(f"checking the outputs{_of(cfg, arms)} against the target")
                with _clocked(spent, "agreement"):
                    folder.update(agreement=_agreement(cfg, parts, folder.samples, judged))
    finally:
        if watch is not None:
            with suppress(RunFailed):  # the disk may be full: that message is on its way already
                watch.record()
        for _, _, arm in arms:
            with suppress(RunFailed):
                _note_time(arm.folder, spent.share(len(arms)))


def _arms_in_words(methods: int) -> str:
    return "both arms" if methods == 1 else f"{methods} methods and the baseline"


def _of(cfg: RunConfig, arms: Sequence[Any]) -> str:
    return f" of {cfg.method['name']}" if len(arms) > 1 else ""


def _hand_over_costs(
    arms: Sequence[tuple[RunConfig, Parts, MethodArm]], shared: Shared, spent: Seconds
) -> list[MethodArm]:
    """Tell methods that size their drafts what passes cost here; a resumed run uses the costs that it began with.

    Returns:
        The arms whose costs were measured now.
    """
    asking = [arm for _, _, arm in arms if draft_costs.wanted(arm.decoder)]
    unknown = [arm for arm in asking if "draft_costs" not in arm.folder.manifest]
    if unknown:
        stage("measuring what the nodes of a draft cost")
        with _clocked(spent, "cost_curve"):
            for arm, costs in _measured_costs(unknown, shared, alone=len(arms) == 1):
                arm.folder.update(draft_costs=costs)
    for arm in asking:
        if arm.error is None:
            _use_costs(arm)
    return [arm for arm in unknown if arm.error is None]


def _confirm_costs(fresh: Sequence[MethodArm], shared: Shared, spent: Seconds, *, alone: bool) -> None:
    """Measure costs again that differ from the run's own cost curve: one of the two moments was noisy."""
    own = {id(arm): _own_costs(arm, shared) for arm in fresh if "cost_curve" in arm.folder.manifest}
    doubtful = [
        arm
        for arm in fresh
        if id(arm) in own
        and draft_costs.deviation(arm.folder.manifest["draft_costs"], own[id(arm)]) > draft_costs.TOLERANCE
    ]
    if not doubtful:
        return
    stage("measuring what the nodes of a draft cost again, as it differs from the cost of a forward pass")
    for arm in doubtful:
        assert isinstance(arm.decoder, CostAware), "only those ask"
        arm.decoder.forget_costs()
    with _clocked(spent, "cost_curve"):
        for arm, again in _measured_costs(doubtful, shared, alone=alone):
            first = arm.folder.manifest["draft_costs"]
            arm.folder.update(draft_costs=draft_costs.settled(first, own[id(arm)], again))
            _use_costs(arm)


def _cost_watch(arms: Sequence[tuple[RunConfig, Parts, MethodArm]], shared: Shared, runner: Runner) -> CostWatch | None:
    """What looks at the costs of passes between prompts, where there are costs."""
    lm = shared.loaded.lm
    kept = [arm for _, _, arm in arms if {"cost_curve", "draft_costs"} & arm.folder.manifest.keys()]
    if not kept or lm.device.type != "cpu" or shared.loaded.denoises:
        return None
    watch = CostWatch(lm, kept, _batch_of_costs(shared), _middle(shared, cost_watch.NODES[-1]), runner.wall)
    runner.between = watch.look
    return watch


def _use_costs(arm: MethodArm) -> None:
    assert isinstance(arm.decoder, CostAware), "only those ask"
    arm.decoder.use_costs(arm.folder.manifest["draft_costs"])


def _own_costs(arm: MethodArm, shared: Shared) -> dict[int, float]:
    """What the run's cost curve says of the passes that the arm's costs are about."""
    curve = CostSurface.from_manifest(arm.folder.manifest["cost_curve"])
    sizes = [int(nodes) for nodes, _ in arm.folder.manifest["draft_costs"][1:]]
    return draft_costs.relative(curve, sizes, _batch_of_costs(shared), _middle(shared))


def _measured_costs(
    asking: Sequence[MethodArm], shared: Shared, *, alone: bool
) -> Iterator[tuple[MethodArm, list[list[float]]]]:
    """The costs of each arm, at a length in the middle of the texts'; one that fails has none."""
    lm, decoders = shared.loaded.lm, [arm.decoder for arm in asking]
    beyond = draft_costs.ROUNDS + 2 * max(map(draft_costs.wanted, decoders))
    curve = draft_costs.passes(lm, decoders, _batch_of_costs(shared), _middle(shared, beyond))
    for arm in asking:
        try:
            yield arm, draft_costs.measure(lm, arm.decoder, curve)
        except Exception as error:
            if alone:
                raise
            arm.error = error
            print(f"warning: {arm.name} is given up, the others go on: {error}", file=sys.stderr)


def _middle(shared: Shared, beyond: int = 0) -> int:
    """Tokens of a text in the middle of the run's, fewer where the context has no room for ``beyond`` more."""
    middle = (min(shared.lengths) + max(shared.lengths) + shared.settings.limit) // 2
    return max(1, min(middle, shared.settings.context - beyond))


def _batch_of_costs(shared: Shared) -> int:
    return min(shared.settings.batch_size, len(shared.examples))


def _record_cost_curve(
    arms: Sequence[tuple[RunConfig, Parts, MethodArm]], shared: Shared, spent: Seconds, warm: Sequence[Sample]
) -> None:
    """Measure the cost of target passes for the records that have none yet, up to the largest pass of any method."""
    without = [arm for cfg, _, arm in arms if cfg.measure.cost_curve and "cost_curve" not in arm.folder.manifest]
    if not without or shared.loaded.denoises:
        return
    stage("measuring the cost of a forward pass by its number of tokens")
    with _clocked(spent, "cost_curve"):
        curve = _cost_curve(shared, warm).to_manifest()
    for arm in without:
        arm.folder.update(cost_curve=curve)


def _cost_curve(shared: Shared, warm: Sequence[Sample]) -> CostSurface:
    """At the shortest and the longest text of the run, up to the methods' largest pass."""
    most = max((nodes for sample in warm if sample.arm == "method" for nodes in sample.step_nodes), default=64)
    contexts = (min(shared.lengths), max(shared.lengths) + shared.settings.limit)
    batch = min(shared.settings.batch_size, len(shared.examples))
    return verify_cost.measure_rows(shared.loaded.lm, batch, verify_cost.grid(most), contexts)


def _longest(shared: Shared) -> dict[int, int]:
    """By size of the batches, tokens of the longest text."""
    whole, rest = (
        min(shared.settings.batch_size, len(shared.examples)),
        len(shared.examples) % shared.settings.batch_size,
    )
    longest = max(shared.lengths) + shared.settings.limit
    return {batch: longest for batch in (whole, rest) if batch}


def _agreement(cfg: RunConfig, parts: Parts, samples: Sequence[Sample], judged: agreement.Known) -> dict[str, Any]:
    loaded, greedy = parts.shared.loaded, cfg.sampling.temperature == 0.0
    if loaded.denoises:
        return agreement.compare(samples, greedy=greedy, reason="a diffusion model judges no text token by token")
    gap = agreement.near_tie_gap(loaded.lm.dtype, cfg.measure.near_tie_gap)
    found = agreement.check_run(loaded.lm, samples, gap, greedy=greedy, known=judged)
    if (verifier := parts.method.reference_model()) is not None:
        found["verifier"] = agreement.check_own(verifier, samples, gap, greedy=greedy)
    return found


def _quality(shared: Shared, samples: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """Scores over all answers of an arm (first repeat), and the change from the baseline's over what both answered.

    A corpus metric such as BLEU is no mean of its answers' scores.
    """
    asked = {prompts.prompt_id(e, turn): (e, turn) for e in shared.examples for turn in range(len(e.turns))}
    answers: dict[str, dict[str, tuple[Any, int, str]]] = {"method": {}, "baseline": {}}
    for sample in samples:
        if sample.phase == "measure" and sample.repeat == 0:
            answers[sample.arm][sample.prompt_id] = (*asked[sample.prompt_id], sample.text)
    scores = {arm: shared.task.aggregate(given.values()) for arm, given in answers.items()}
    common = [name for name in answers["baseline"] if name in answers["method"]]
    before, after = ([answers[arm][name] for name in common] for arm in ("baseline", "method"))
    change = {metric: asdict(found) for metric, found in shared.task.change(before, after).items()}
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


def _end(folder: RunFolder, error: BaseException | None) -> None:
    """Record in the manifest how the measurement ended."""
    if error is None:
        folder.update(**digests.sealed(folder.path, folder.manifest | {"status": "finished"}))
        return
    stopped = isinstance(error, (KeyboardInterrupt, SystemExit))  # by the user, or by a cluster that resumes later
    trace = "".join(traceback.format_exception(error))
    with suppress(RunFailed):
        folder.update(status="interrupted" if stopped else "failed", ended_at=manifest.now(), error=redact.text(trace))


def _finished(path: Path) -> bool:
    return (run_folder.read_manifest(path) or {}).get("status") == "finished"


def _started_before(time: datetime, path: Path) -> bool:
    started = (run_folder.read_manifest(path) or {}).get("started_at")
    return started is None or datetime.fromisoformat(started) < time
