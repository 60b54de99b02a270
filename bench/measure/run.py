"""One run from configuration to verdict; the program on one screen."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import yaml

from bench.analysis import audit, metrics
from bench.analysis.cost_curve import CostCurve
from bench.config import instantiate
from bench.config.schema import RunConfig, run_id
from bench.errors import RunFailed, UserError
from bench.measure import agreement, threshold_calibration, verify_cost
from bench.measure.instruments import Instruments
from bench.measure.interleave import Runner, Seconds, Settings
from bench.measure.preconditions import refilling
from bench.measure.threshold_calibration import Choice, Trial, Writer
from bench.models import artifacts, loading
from bench.models.artifacts import Prepared
from bench.models.source import Loaded
from bench.records import run_folder
from bench.records.run_folder import RunFolder, Sample
from bench.report import terminal
from bench.tasks import prompts
from bench.utils import files, machine, redact
from methods.decoder import Decoder

CALIBRATION = "calibration.json"  # beside the manifest: the losses that a threshold was chosen by
_DOUBT_PROMPTS = 3  # at least, of the warm-up of a method that doubts itself
_BASELINE = {"name": "autoregressive", "_target_": "methods.autoregressive.Autoregressive"}
_MASK_BY_MASK = {  # what stands in its place for a diffusion model, which knows no order of tokens
    "name": "diffusion",
    "_target_": "methods.non_autoregressive.diffusion.Diffusion",
    "threshold": None,
    "tokens_per_step": 1,
    "cache": "none",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the numbers may be believed; if not, why, and what to do."""

    valid: bool
    reasons: list[str]
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run hands back: its folder, what summary.json holds, and the verdict."""

    path: Path
    summary: dict[str, Any]
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Parts:
    """What a configuration becomes.

    Attributes:
        loaded: the target with its tokenizer and revision.
        lengths: tokens of every prompt; of later turns the most they can have.
        floor_bytes: memory of the process before the model was loaded.
        gpu_busy: percent, before the model was loaded.
        prepared: what was made beforehand for the method and this model, if the method takes such a part.
        trial: what the method's threshold is chosen by, if it promises something.
    """

    task: Any
    examples: list[Any]
    loaded: Any
    baseline: Decoder
    method: Decoder
    settings: Settings
    lengths: list[int]
    floor_bytes: int | None
    gpu_busy: float | None
    prepared: Prepared | None = None
    trial: Trial | None = None


def run(cfg: RunConfig, *, fresh: bool | datetime = False) -> Outcome:
    """Measure a method, or report what was measured before.

    A run that was cut goes on where it stopped; a finished one is summed up from its records again.

    Args:
        cfg: the run.
        fresh: forget earlier records of this run; of a time: those of a run that started before it, so that a job which
            a cluster starts again goes on with its own.

    Raises:
        UserError: what was asked for cannot be run.
        RunFailed: it broke on its way; what was measured is kept.
    """
    parts = prepare(cfg)
    path = Path(cfg.paths.results) / run_id(cfg, **_resolved(parts))
    if isinstance(fresh, datetime):
        fresh = _started_before(fresh, path)
    if not fresh and _finished(path):
        print(f"Measured before. To measure anew, delete {path}", file=sys.stderr)
        with run_folder.claimed(path):
            return report(cfg, path)
    choice = _calibrate(cfg, parts)
    manifest = _manifest(cfg, parts, choice)
    with RunFolder.create(path.parent, path.name, manifest, _config_yaml(cfg), fresh=fresh) as folder:
        with _status(folder):
            if choice:
                files.write_json(path / CALIBRATION, choice.to_json())
            _measure(cfg, parts, folder)
        return report(cfg, path)


def prepare(cfg: RunConfig) -> Parts:
    """Build everything, and refuse what cannot be run before anything is measured."""
    _check_batch(cfg)
    if found := refilling(cfg):
        raise UserError(f"{found} Or set measure.refill=false.")
    task = instantiate.build_task(cfg.dataset, cfg.paths)
    examples = list(task.load())
    _check_refill(cfg, examples)
    machine.set_threads(cfg.hardware.threads)
    loading.import_libraries()
    floor_bytes = machine.settled_bytes()
    gpu_busy = machine.gpu_utilisation(loading.resolve_hardware(asdict(cfg.hardware))[0])
    loaded = loading.load(cfg.model, asdict(cfg.hardware), cfg.paths, keep_hf=instantiate.needs_hf(cfg.method))
    _check_kind(cfg, task, loaded)
    _check_order(cfg, loaded)
    loading.require_languages(loaded, f"dataset={cfg.dataset['name']}", getattr(task, "languages", None))
    settings = _settings(cfg, loaded)
    lengths = prompts.check(task, examples, loaded.tokenizer, settings.limit, settings.context, apart=settings.apart)
    baseline = instantiate.build_decoder(_MASK_BY_MASK if loaded.denoises else _BASELINE, loaded.lm, cfg.sampling)
    part = artifacts.find(cfg.method, loaded.name, loaded.revision, cfg.paths)
    if part and part.warning:
        print(f"warning: {part.warning}", file=sys.stderr)
    load_model = instantiate.model_loader(cfg, loaded.tokenizer)
    method = instantiate.build_decoder(cfg.method, loaded.lm, cfg.sampling, load_model, part.folder if part else None)
    if hasattr(method, "doubt") and settings.warmup:
        settings = replace(settings, warmup=max(settings.warmup, _DOUBT_PROMPTS))
    trial = threshold_calibration.draw(cfg, method, loaded, examples, part, settings.context)
    return Parts(task, examples, loaded, baseline, method, settings, lengths, floor_bytes, gpu_busy, part, trial)


def _calibrate(cfg: RunConfig, parts: Parts) -> Choice | None:
    """Let the method have the threshold that its promise allows."""
    if parts.trial is None:
        return None
    settings, part = parts.settings, parts.prepared.sha256 if parts.prepared else None
    writer = Writer(parts.loaded, settings.limit, settings.eos_ids, settings.batch_size)
    with run_folder.machine_failures("calibration"):
        return threshold_calibration.choose(parts.trial, cfg, parts.baseline, parts.method, writer, part)


def _check_batch(cfg: RunConfig) -> None:
    """A class may declare ``max_batch``, the most rows it takes."""
    most = getattr(instantiate.locate(cfg.method["_target_"]), "max_batch", None)
    if most is not None and cfg.batch_size > most:
        raise UserError(
            f"batch_size came as {cfg.batch_size}; method '{cfg.method['name']}' takes {most} row(s) at a time. "
            f"Set batch_size={most}, or choose another method."
        )


def _check_refill(cfg: RunConfig, examples: Sequence[Any]) -> None:
    """Some prompt has to wait for a row."""
    if not cfg.measure.refill:
        return
    rows, queue = cfg.batch_size, cfg.measure.refill_queue
    if len(examples) <= rows:
        raise UserError(
            f"measure.refill=true came with {len(examples)} prompts for batch_size={rows}; at least one must wait for "
            "a row to end. Raise dataset.limit, lower batch_size, or set measure.refill=false."
        )
    if queue is not None and queue <= rows:
        raise UserError(
            f"measure.refill_queue came as {queue} with batch_size={rows}; a queue must hold more prompts than there "
            "are rows, several times as many for its end to weigh little. Raise it, or leave it out: one queue of all."
        )


def _check_kind(cfg: RunConfig, task: Any, loaded: Loaded) -> None:
    """A chat model is not asked to continue bare sentences, nor a translator to translate a request for an essay."""
    if task.kind in (loaded.kind, "any"):
        return
    kinds = {"causal": "a causal model", "seq2seq": "an encoder-decoder model (translation, summaries)"}
    raise UserError(
        f"dataset={cfg.dataset['name']} is written for {kinds[task.kind]}, and {loaded.name} is "
        f"{kinds[loaded.kind]}; the two must be of one kind. Choose another data set (python -m bench list "
        "datasets), or another model with model=hf model.name=HUB_ID_OR_FOLDER."
    )


def _check_order(cfg: RunConfig, loaded: Loaded) -> None:
    """A class that fills in masks declares ``denoises``."""
    if bool(getattr(instantiate.locate(cfg.method["_target_"]), "denoises", False)) is loaded.denoises:
        return
    fills = f"{loaded.name} is a diffusion model, which fills in masks" if loaded.denoises else f"{loaded.name} is not"
    raise UserError(
        f"method={cfg.method['name']} came with model={cfg.model['name']}: {fills}. method=diffusion goes with "
        "diffusion models (model=llada_8b, dream_7b), and these with nothing else. Change one of the two."
    )


def report(cfg: RunConfig, path: Path) -> Outcome:
    """Summary, verdict, table and tracker, from the records alone."""
    manifest, samples = run_folder.read_manifest(path) or {}, run_folder.read_samples(path)
    stored = manifest.get("cost_curve")
    summary = metrics.summarise(
        samples,
        guarantee=manifest["guarantee"],
        agreement=manifest.get("agreement"),
        cost_curve=CostCurve.from_dict(stored) if stored else None,
        cost_over_layers=metrics.cost_over_layers(manifest),
        n_bootstrap=cfg.measure.bootstrap_samples,
        seed=cfg.seed,
    )
    for arm, part in (("method", summary), ("baseline", summary["baseline"])):
        part["quality"] |= manifest.get("quality", {}).get(arm, {})
    summary = _names(manifest) | summary
    found = audit.audit(samples, summary, manifest)
    verdict = Verdict(bool(found["valid"]), list(found["reasons"]), list(found["warnings"]))
    summary["verdict"] = asdict(verdict)
    run_folder.write_summary(path, summary)
    print(terminal.render(summary, path))
    instantiate.build_tracker(cfg.tracker).log(summary, manifest, path)
    return Outcome(path, summary, verdict)


# -------------------------------------------------------------------------------------------------------- measuring


def _measure(cfg: RunConfig, parts: Parts, folder: RunFolder) -> None:
    """Warm-up, cost curve, the loop, agreement. Each leaves what it found in the manifest."""
    instruments = Instruments(parts.loaded.lm.device, parts.floor_bytes)
    spent = Seconds()
    try:
        runner = Runner(
            parts.baseline,
            parts.method,
            parts.task,
            parts.examples,
            parts.loaded.tokenizer,
            folder,
            parts.settings,
            instruments,
            parts.task.spare,
            seconds=spent,
        )
        warm = [] if runner.complete else runner.warm_up()
        if doubt := _doubt(parts.method, warm):
            print(f"warning: {doubt}", file=sys.stderr)
            folder.update(doubt=doubt)
        if cfg.measure.cost_curve and not parts.loaded.denoises and "cost_curve" not in folder.manifest:
            with _clocked(spent, "cost_curve"):
                folder.update(cost_curve=_cost_curve(parts, warm).to_dict())
        captured, compiled = _graphs(parts), _compiled(parts)
        runner.measure()
        if captured:
            folder.update(graphs={"before": captured, "in_all": _graphs(parts)})
        if compiled:
            folder.update(compiled={"before": compiled, "in_all": _compiled(parts)})
        folder.update(memory=_memory(parts, folder.samples))
        if own := _own_bytes(parts.method):
            folder.update(own_bytes=own)
        if facts := _facts(parts.method):
            folder.update(method_facts=facts | _probe(parts, warm))
        folder.update(load_average={"start": folder.manifest["load_average"]["start"], "end": machine.load_average()})
        state = machine.gpu_state(parts.loaded.lm.device)
        folder.update(gpu_state={"start": folder.manifest["gpu_state"]["start"], "end": state})
        with _clocked(spent, "quality"):
            folder.update(**_quality(parts, folder.samples), quality_notes=parts.task.notes())
        if cfg.measure.agreement:
            with _clocked(spent, "agreement"):
                folder.update(agreement=_agreement(cfg, parts, folder.samples))
    finally:
        with suppress(RunFailed):  # the disk may be full: that message is on its way already
            _note_time(folder, spent)


def _graphs(parts: Parts) -> dict[str, float] | None:
    """Graphs made so far of the target's passes, and the time that took: those made in the run are in its times."""
    graphs = parts.loaded.lm.graphs
    return {"captured": graphs.captured, "seconds": round(graphs.seconds, 3)} if graphs is not None else None


def _compiled(parts: Parts) -> dict[str, float] | None:
    """Functions that torch.compile has made so far, and the time it took for those made when the target was loaded."""
    found = parts.loaded.lm.compiled
    return {"functions": found.counted, "seconds": round(found.seconds, 3)} if found is not None else None


def _doubt(method: Decoder, warm: Sequence[Sample]) -> str | None:
    """What a method with a loaded part finds strange about its own acceptance on the prompts of the warm-up."""
    ask = getattr(method, "doubt", None)
    return ask([metrics.kept_at(sample) for sample in warm if sample.arm == "method"]) if ask else None


def _memory(parts: Parts, samples: Sequence[Sample]) -> dict[str, int | None]:
    """Bytes of what both arms have in common, and of the process without it, from which a peak on a CPU is counted.

    The cache is that of the target, for as many rows as there were with the longest prompt and the most new tokens.
    """
    lm, measured = parts.loaded.lm, [s for s in samples if s.phase == "measure"]
    longest = max(s.n_prompt_tokens for s in measured) + parts.settings.limit
    return {
        "weights": lm.weight_bytes + lm.encoder_bytes,
        "cache": max(s.batch_size for s in measured) * longest * lm.token_bytes,
        "floor": parts.floor_bytes,
    }


def _own_bytes(method: Decoder) -> dict[str, int | None]:
    """Memory of the method's own parts by name, where it tells: a mapped datastore is in no peak until it is read."""
    return dict(getattr(method, "own_bytes", dict)())


def _facts(method: Decoder) -> dict[str, Any]:
    """What a method tells of its own work since it was made, the warm-up included: exits taken, heads multiplied."""
    return dict(getattr(method, "facts", dict)())


def _probe(parts: Parts, warm: Sequence[Sample]) -> dict[str, Any]:
    """What a method tells of a decode of the first prompts of the warm-up, outside of the measurement."""
    probe, first = getattr(parts.method, "probe", None), [s for s in warm if s.arm == "method" and s.batch == 0]
    if probe is None or not first:
        return {}
    device = parts.loaded.lm.device
    rows = [torch.tensor(sample.prompt_ids, device=device) for sample in first[: first[0].batch_size]]
    return dict(probe(rows, parts.settings.limit, torch.Generator(device).manual_seed(first[0].seed)))


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
    if (verifier := getattr(parts.method, "verifier", None)) is not None:
        found["verifier"] = agreement.check_own(verifier, samples, gap, greedy=greedy)
    return found


def _quality(parts: Parts, samples: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """Scores over all answers of an arm (first repeat), a corpus metric being no mean of its answers' scores.

    And how far the method's are from the baseline's, over what both answered.
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
    """Keep the manifest true about how the measurement ended."""
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, (KeyboardInterrupt, SystemExit))  # by the user, or by a cluster that goes on later
        status = "interrupted" if stopped else "failed"
        with suppress(RunFailed):
            folder.update(status=status, ended_at=_now(), error=redact.text(traceback.format_exc()))
        raise
    folder.update(status="finished", ended_at=_now())


# ------------------------------------------------------------------------------------------------- facts and names


def _settings(cfg: RunConfig, loaded: Any) -> Settings:
    end = getattr(loaded.tokenizer, "eos_token_id", None)
    return Settings(
        seed=cfg.seed,
        limit=cfg.max_new_tokens,
        context=min(loaded.lm.max_positions, cfg.max_context or loaded.lm.max_positions),
        apart=loaded.kind == "seq2seq",
        eos_ids=tuple(loaded.lm.eos_ids) or (() if end is None else (end,)),
        batch_size=cfg.batch_size,
        repeats=cfg.measure.repeats,
        warmup=cfg.measure.warmup,
        refill=cfg.measure.refill,
        refill_queue=cfg.measure.refill_queue,
    )


def _resolved(parts: Parts) -> dict[str, str | None]:
    """What the configuration leaves open and this machine decided: another machine's results are other results."""
    lm, facts = parts.loaded.lm, machine.facts(parts.loaded.lm.device)
    part = {"part": parts.prepared.sha256} if parts.prepared else {}  # without one the id stays what it always was
    trial = {"calibration": parts.trial.sha256} if parts.trial else {}
    return {
        **part,
        **trial,
        "model_revision": parts.loaded.revision,
        "data_revision": parts.task.revision["content"],
        "device": facts["gpu"]["name"] if facts["gpu"] else facts["cpu"],
        "threads": str(facts["threads"]),
        "dtype": str(lm.dtype).removeprefix("torch."),
    }


def _manifest(cfg: RunConfig, parts: Parts, choice: Choice | None = None) -> dict[str, Any]:
    """All facts that are known before the measurement."""
    loaded, settings = parts.loaded, parts.settings
    return redact.tree(
        {
            "started_at": _now(),
            "ended_at": None,
            "argv": redact.argv(["bench", *sys.argv[1:]]),
            "environment": redact.environment(os.environ),
            "method": cfg.method,
            **({"part": parts.prepared.facts()} if parts.prepared else {}),
            **({"calibration": choice.record} if choice else {}),
            "guarantee": parts.method.guarantee.value,
            "model": {
                "name": cfg.model["name"],
                "revision": loaded.revision,
                "sha256": loaded.sha256,
                "weight_bytes": loaded.lm.weight_bytes,
            },
            "dataset": {"name": cfg.dataset["name"], "revision": parts.task.revision},
            "dtype": str(loaded.lm.dtype).removeprefix("torch."),
            "linear": loaded.lm.linear_form,
            "sampling": asdict(cfg.sampling),
            "measure": asdict(cfg.measure),
            "eos_ids": list(settings.eos_ids),
            "seed": cfg.seed,
            "max_new_tokens": settings.limit,
            "context": settings.context,
            "batch_size": settings.batch_size,
            "n_prompts": len(parts.lengths),
            "n_pairs": len(parts.lengths) * settings.repeats,
            "hardware": machine.facts(loaded.lm.device),
            "load_average": {"start": machine.load_average(), "end": None},
            "gpu_utilisation": {"start": parts.gpu_busy},
            "gpu_state": {"start": machine.gpu_state(loaded.lm.device), "end": None},
            "versions": machine.versions(),
            "git": machine.git_state(),
        }
    )


def _names(manifest: dict[str, Any]) -> dict[str, Any]:
    """What identifies a run in its summary."""
    facts = manifest["hardware"]
    return {
        "schema_version": run_folder.SCHEMA_VERSION,
        "run_id": manifest["run_id"],
        "method": manifest["method"]["name"],
        "model": manifest["model"]["name"],
        "model_revision": manifest["model"]["revision"],
        "dataset": manifest["dataset"]["name"],
        "dataset_revision": manifest["dataset"]["revision"],
        "hardware": facts["gpu"]["name"] if facts["gpu"] else facts["cpu"],
        "dtype": manifest["dtype"],
        "threads": facts["threads"],
        "batch_size": manifest["batch_size"],
        **_refill(manifest),
        **_made_ahead(manifest),
        "sampling": manifest["sampling"],
        "max_new_tokens": manifest["max_new_tokens"],
        "harness_share": manifest.get("harness_share"),
        "memory": manifest.get("memory", {}),
        "own_bytes": manifest.get("own_bytes", {}),
        "quality_notes": manifest.get("quality_notes", {}),
        "quality_change": manifest.get("quality_change", {}),
        **({"calibration": manifest["calibration"]} if "calibration" in manifest else {}),
        **({"method_facts": _per_token(manifest)} if "method_facts" in manifest else {}),
    }


def _refill(manifest: dict[str, Any]) -> dict[str, Any]:
    """Nothing for rows in lockstep: runs of before there was anything else stand beside them."""
    measure = manifest["measure"]
    return {key: measure[key] for key in ("refill", "refill_queue")} if measure.get("refill") else {}


def _made_ahead(manifest: dict[str, Any]) -> dict[str, Any]:
    """Compiled functions and captured graphs; that a run was compiled is a name of its own, for it splits tables."""
    ahead = {key: manifest[key] for key in ("compiled", "graphs") if key in manifest}
    return {"made_ahead": ahead, **({"compile": True} if "compiled" in ahead else {})} if ahead else {}


def _per_token(manifest: dict[str, Any]) -> dict[str, Any]:
    """What a method told of its work, and what it counted per step also per token."""
    facts = manifest["method_facts"]
    if not (facts.get("steps") and facts.get("tokens")):
        return dict(facts)
    rows = min(manifest["batch_size"], manifest["n_prompts"])  # a step is one of all rows, and each bears its cost
    share = facts["steps"] * rows / facts["tokens"]
    return facts | {
        key.replace("_per_step", "_per_token"): value * share
        for key, value in facts.items()
        if key.endswith("_per_step")
    }


def _config_yaml(cfg: RunConfig) -> str:
    """The composed configuration without the machine's paths and without secrets."""
    public = {key: value for key, value in cfg.to_dict().items() if key != "paths"}
    return str(yaml.safe_dump(redact.tree(public), sort_keys=False, allow_unicode=True))


def _finished(path: Path) -> bool:
    return (run_folder.read_manifest(path) or {}).get("status") == "finished"


def _started_before(time: datetime, path: Path) -> bool:
    started = (run_folder.read_manifest(path) or {}).get("started_at")
    return started is None or datetime.fromisoformat(started) < time


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
