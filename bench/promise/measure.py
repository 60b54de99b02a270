"""Losses of every prompt at every threshold, in one pass over the prompts per threshold; then the resamplings."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bench.config import instantiate
from bench.config.schema import RunConfig
from bench.errors import UserError
from bench.measure import manifest, threshold_calibration
from bench.measure.run import BASELINE, build_method
from bench.measure.threshold_calibration import CalibrationSet, Writer
from bench.models.source import Loaded
from bench.promise import records
from bench.promise.records import Record
from bench.promise.resampling import resample
from bench.promise.settings import PromiseConfig
from methods.decoder import Calibrated, Calibrator, Decoder
from methods.early_exit.calibrator import RiskTarget
from methods.engine.sampling import Sampling


def measure(cfg: RunConfig, config: PromiseConfig, loaded: Loaded) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Decode all prompts at all thresholds and resample.

    Args:
        cfg: with a tolerance and ``against=risk``, see ``command.compose_run``.

    Returns:
        The result as plain JSON values; and by kind of loss [prompts, thresholds] in 32 bit, on which it rests.

    Raises:
        UserError: too few prompts for a tolerance.
    """
    method, part = build_method(cfg, loaded, {})
    assert isinstance(method, Calibrated) and method.calibrator is not None, "compose_run asks for a tolerance"
    settings = manifest.settings(cfg, loaded)
    drawn = threshold_calibration.draw(
        cfg, method, loaded, (), part, settings.context, most=config.prompts or sys.maxsize
    )
    assert drawn is not None
    calibration = round(config.calibration_share * len(drawn.rows))
    promised = [method.calibrator.promising(tolerance) for tolerance in config.tolerances]
    _require(promised, calibration, config)
    baseline = instantiate.build_decoder(BASELINE, loaded.lm, cfg.sampling)
    writer = Writer(loaded, settings.limit, settings.eos_ids, settings.batch_size)
    losses, layers = _losses(drawn, config, method, baseline, writer)
    metrics = {against: threshold_calibration.metric_of(_target(drawn, against), loaded.kind) for against in losses}
    facts = {
        "corpus": drawn.facts,
        "thresholds": list(method.calibrator.thresholds),
        "layers": layers,
        "mean_losses": {against: table.mean(axis=0, dtype=np.float64).tolist() for against, table in losses.items()},
        "losses_sha256": records.digest(losses),
        **_resampled(losses, layers, promised, calibration, config.resamplings, cfg.seed, metrics),
    }
    return facts, losses


def measure_again(record: Record, config: PromiseConfig) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Resample the losses of an earlier record.

    Returns:
        See ``measure``.

    Raises:
        UserError: losses that the record does not have, or too few prompts for a tolerance.
    """
    stored, result, settings = records.read_losses(record.folder), record.result, record.manifest["config"]
    if missing := set(config.losses) - set(stored):
        raise UserError(f"The record has losses of {', '.join(stored)}, got losses={','.join(sorted(missing))}.")
    losses: dict[str, np.ndarray] = {against: stored[against] for against in config.losses}
    first = RiskTarget(**settings["method"]["calibration"]).over(result["thresholds"], Sampling())
    assert first is not None, "compose_run asks for a tolerance"
    calibration = round(config.calibration_share * result["corpus"]["prompts"])
    promised: list[Calibrator] = [first.promising(tolerance) for tolerance in config.tolerances]
    _require(promised, calibration, config)
    metrics = {promise["against"]: promise["metric"] for promise in result["promises"]}
    seed = settings.get("seed", 0)
    found = _resampled(losses, result["layers"], promised, calibration, config.resamplings, seed, metrics)
    means = {against: result["mean_losses"][against] for against in losses}
    return {**result, "mean_losses": means, "losses_sha256": records.digest(losses), **found}, losses


def _resampled(
    losses: Mapping[str, np.ndarray],
    layers: Sequence[float],
    promised: Sequence[Calibrator],
    calibration: int,
    draws: int,
    seed: int,
    metrics: Mapping[str, str | None],
) -> dict[str, Any]:
    promises = [
        {"against": against, "metric": metrics[against]}
        | resample(table, layers, each, calibration=calibration, draws=draws, seed=seed)
        for against, table in losses.items()
        for each in promised
    ]
    return {"promises": promises, "passed": not any(promise["kept"] is False for promise in promises)}


def _require(promised: list[Calibrator], calibration: int, config: PromiseConfig) -> None:
    if short := [each for each in promised if each.fewest > calibration]:
        worst = max(short, key=lambda each: each.fewest)
        raise UserError(
            f"A tolerance of {worst.tolerance:g} needs at least {worst.fewest} calibration prompts, got {calibration}. "
            f"Use a larger corpus (method.calibration.corpus=NAME or FILE.jsonl), calibration_share above "
            f"{config.calibration_share:g}, or larger tolerances."
        )


def _target(drawn: CalibrationSet, against: str) -> Any:
    target = drawn.calibrator.risk_target
    return replace(target, against=against, metric=target.metric if against == "risk" else None)


def _losses(
    drawn: CalibrationSet, config: PromiseConfig, method: Decoder, baseline: Decoder, writer: Writer
) -> tuple[dict[str, np.ndarray], list[float]]:
    """By kind, the losses of all prompts at all thresholds; and the share of the layers at each threshold."""
    assert isinstance(method, Calibrated)
    full = writer.write(baseline, drawn.rows, "full model")
    lost = {
        against: threshold_calibration.loss_of(_target(drawn, against), drawn.references, full, writer)
        for against in config.losses
    }
    columns: dict[str, list[list[float]]] = {against: [] for against in lost}
    layers = []
    for threshold in drawn.calibrator.thresholds:
        method.set_threshold(threshold)
        texts = writer.write(method, drawn.rows, f"threshold {threshold:.3g}")
        layers.append(_share_of_layers(method, writer.loaded.lm.n_layers))
        for against, each in lost.items():
            columns[against].append(each(texts))
    return {against: np.array(table, dtype=np.float32).T for against, table in columns.items()}, layers


def _share_of_layers(method: Decoder, layers: int) -> float:
    """Of the layers that the texts' tokens took, each token by itself, whatever its batch ran."""
    counts = {int(depth): count for depth, count in method.stats().get("exits", {}).items()}
    tokens = sum(counts.values())
    return sum(depth * count for depth, count in counts.items()) / (tokens * layers) if tokens else 1.0
