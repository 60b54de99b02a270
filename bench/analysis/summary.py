"""What summary.json says of a run, derived from its manifest and samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.analysis import audit, calibration, metrics, pairs, ranking
from bench.analysis.audit import AuditResult
from bench.analysis.cost_curve import CostSurface
from bench.analysis.degeneration import degeneration
from bench.analysis.device_time import clock_range, device_time
from bench.records import run_folder


@dataclass(frozen=True, slots=True)
class Summary:
    """The content of summary.json, the verdict in it, and the manifest it was derived from."""

    content: dict[str, Any]
    verdict: AuditResult
    manifest: dict[str, Any]


def summarise(path: Path) -> Summary:
    """Sum up a run folder. Writes and prints nothing."""
    manifest, samples = run_folder.read_manifest(path) or {}, run_folder.read_samples(path)
    stored = manifest.get("cost_curve")
    rates = metrics.summarise(
        samples,
        guarantee=manifest["guarantee"],
        agreement=manifest.get("agreement"),
        cost_curve=CostSurface.from_manifest(stored) if stored else None,
        cost_over_layers=metrics.cost_over_layers(manifest),
        one_pass=metrics.one_pass(manifest),
        n_bootstrap=manifest["measure"]["bootstrap_samples"],
        seed=manifest["seed"],
    )
    for arm, part in (("method", rates), ("baseline", rates["baseline"])):
        part["quality"] |= manifest.get("quality", {}).get(arm, {})
    for arm, part in (("method", rates), ("baseline", rates["baseline"])):
        if block := manifest.get("energy", {}).get(arm):
            part["energy_j_per_token"] = block["joules"] / block["tokens"]
    content = _names(manifest) | rates | {"degeneration": degeneration(samples)}
    if found := device_time(samples, manifest):
        content["device_time"] = found
    if choice := manifest.get("calibration"):
        content["calibration"] = choice | {"measured": calibration.measured(samples, choice)}
    verdict = audit.audit(samples, content, manifest)
    content["verdict"] = asdict(verdict) | {"result": verdict.result}
    alike = pairs.similarity([sample for sample in samples if sample.phase == "measure"])
    content["ranking"] = asdict(ranking.ranking(content, None if alike is None else 1 - alike))
    return Summary(content, verdict, manifest)


def _names(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What identifies a run, and what its manifest adds to the rates."""
    facts, measure = manifest["hardware"], manifest["measure"]
    ahead = {key: manifest[key] for key in ("compiled", "graphs") if key in manifest}
    return {
        "schema_version": run_folder.SCHEMA_VERSION,
        "run_id": manifest["run_id"],
        "method": manifest["method"]["name"],
        "model": model_name(manifest["model"]),
        "model_revision": manifest["model"]["revision"],
        "dataset": data_set(manifest["dataset"]),
        "dataset_revision": manifest["dataset"]["revision"],
        "hardware": run_folder.device_name(facts),
        "dtype": manifest["dtype"],
        "threads": facts["threads"],
        "batch_size": manifest["batch_size"],
        **({key: measure[key] for key in ("refill", "refill_queue")} if measure.get("refill") else {}),
        **({"sort_by_length": True} if measure.get("sort_by_length") else {}),
        **({"prefix_cache": True} if measure.get("prefix_cache") else {}),
        **({"ignore_eos": True} if measure.get("ignore_eos") else {}),
        **({"made_ahead": ahead} if ahead else {}),
        **({"graphs_left": True} if manifest.get("graphs_left") else {}),
        **({"compile": True} if "compiled" in ahead else {}),  # a name of its own: compiled runs have their own tables
        **({"kernels": manifest["kernels"]} if "kernels" in manifest else {}),
        "sampling": manifest["sampling"],
        "max_new_tokens": manifest["max_new_tokens"],
        "harness_share": manifest.get("harness_share"),
        "memory": manifest.get("memory", {}),
        "own_bytes": manifest.get("own_bytes", {}),
        "quality_notes": manifest.get("quality_notes", {}),
        "quality_change": manifest.get("quality_change", {}),
        **({"energy_block": manifest["energy"]} if "energy" in manifest else {}),
        **({"clocks": clock_range(manifest["clocks"])} if manifest.get("clocks") else {}),
        **({"profile": manifest["profile"]} if "profile" in manifest else {}),
        **({"method_facts": _per_token(manifest)} if "method_facts" in manifest else {}),
    }


def model_name(model: Mapping[str, Any]) -> str:
    """Name of the model; other weights, or more devices, make another one, in every table and heading."""
    weights, devices = model.get("weights", "full"), model.get("parallel", 1)
    parts = [f"{weights} weights"] * (weights != "full") + [f"on {devices} devices"] * (devices > 1)
    return ", ".join([str(model["name"]), *parts])


def data_set(dataset: Mapping[str, Any]) -> str:
    """Name of the data set; prompts that were filled to a length are another one, in every table and heading."""
    fill = (dataset["revision"] or {}).get("fill")
    return f"{dataset['name']}, synthetic fill to {fill['tokens']:,} tokens" if fill else str(dataset["name"])


def _per_token(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The method's own statistics; what it counted per step, also per token."""
    facts = dict(manifest["method_facts"])
    if not (facts.get("steps") and facts.get("tokens")):
        return facts
    together = min(manifest["batch_size"], manifest["n_prompts"])
    rows = facts.get("rows", facts["steps"] * together)  # over all steps; each row of a step bears its cost
    share = rows / facts["tokens"]
    per_step = [key for key in facts if key.endswith("_per_step")]
    return facts | {key.replace("_per_step", "_per_token"): facts[key] * share for key in per_step}
