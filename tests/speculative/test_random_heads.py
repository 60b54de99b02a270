"""Published heads with random weights: read as any other, at the target's sizes, and timed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.config import compose
from bench.config.schema import PathsConfig
from bench.contract import checks
from bench.cost import command, records
from bench.cost.measure import run
from bench.measure import probes
from methods.autoregressive import Autoregressive
from methods.decoder import generate
from methods.engine.sampling import Sampling
from methods.speculative.dflash.decoder import DFlash, DSpark
from methods.speculative.eagle.decoder import Eagle
from methods.speculative.heads.hydra import HydraHeads
from methods.speculative.heads.medusa import Medusa
from methods.speculative.p_eagle.decoder import PEagle
from methods.speculative.published import formats, random_heads

KINDS: dict[str, Any] = {
    "medusa": lambda target: Medusa(target, Sampling(), checkpoint="random:medusa"),
    "hydra": lambda target: HydraHeads(target, Sampling(), checkpoint="random:hydra"),
    "eagle1": lambda target: Eagle(target, Sampling(), version=1, tree="chain", checkpoint="random:eagle1"),
    "eagle3": lambda target: Eagle(target, Sampling(), version=3, checkpoint="random:eagle3"),
    "p_eagle": lambda target: PEagle(target, Sampling(), checkpoint="random:p_eagle"),
    "dflash": lambda target: DFlash(target, Sampling(), checkpoint="random:dflash"),
    "dspark": lambda target: DSpark(target, Sampling(), checkpoint="random:dspark"),
}


@pytest.mark.parametrize("form", random_heads.FORMATS)
def test_a_file_of_random_weights_is_read_and_drafts(form: str) -> None:
    target = checks.tiny_target(layers=8)
    decoder = KINDS[form](target)
    prompts = [torch.arange(4, 12), torch.arange(4, 9)]
    assert generate(decoder, prompts, 12) == generate(Autoregressive(target, Sampling()), prompts, 12)
    assert sum(size or 0 for size in decoder.memory().values()) > 0
    found: Any = formats.read(f"random:{form}", target)
    assert found.notes == [], "names, shapes and configuration are those of a published file"


@pytest.mark.parametrize(
    ("form", "layers", "drafted", "taps"), [("p_eagle", 4, 5, 3), ("dflash", 5, 15, 5), ("dspark", 5, 7, 5)]
)
def test_networks_of_one_pass_have_the_published_sizes(form: str, layers: int, drafted: int, taps: int) -> None:
    target = checks.tiny_target(layers=8)
    found: Any = formats.read(f"random:{form}", target)
    assert (found.part.spec.draft_layers, len(found.part.spec.taps)) == (layers, taps)
    assert KINDS[form](target).drafter.nodes == drafted
    assert getattr(found.part.spec, "markov_rank", 0) == (256 if form == "dspark" else 0)


def test_a_target_of_few_layers_has_fewer_taps() -> None:
    decoder = KINDS["dflash"](checks.tiny_target(layers=4))
    assert len(decoder.drafter.hidden_layers) == 1


def test_a_format_that_is_not_known_is_refused() -> None:
    known = ", ".join(f"random:{form}" for form in KINDS)
    with pytest.raises(ValueError, match=f"one of {known}, a path or"):
        formats.read("random:eagle4", checks.tiny_target())


def test_its_drafts_are_timed_beside_the_passes_of_a_public_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command of the documentation, with a smaller target."""
    monkeypatch.setattr(probes, "ARRAY_BYTES", {"cpu": 1 << 16})
    words = ["method=eagle", "method.checkpoint=random:eagle3", "model=random", "model.like=smollm2", "model.layers=8"]
    more = ["dataset=demo", "hardware=cpu_fp32", "hardware.threads=1", "max_new_tokens=6", "model.hidden_size=72"]
    grid = ["nodes=[1,2]", "batches=[1]", "contexts=[8]", "repeats=1", "prompts=1", "matrix=16"]
    asked, overrides, _ = command.split([*words, *more, *grid, "model.vocab_size=300"])
    cfg = replace(compose.compose(overrides), paths=PathsConfig(results=str(tmp_path), cache=str(tmp_path)))
    (draft,) = records.read_summary(run(cfg, asked, method=True, fresh=False))["drafts"]
    assert draft["method"]["name"] == "eagle" and draft["passes"] >= 1 and draft["seconds"] > 0
