"""A cascade: a table of n-grams for the copy, counted from a datastore."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.contract import checks
from methods.autoregressive import Autoregressive
from methods.engine import cpu_kernels
from methods.engine.causal_lm import CausalLM
from methods.engine.checkpoint_files import MissingPart
from methods.engine.sampling import Sampling
from methods.speculative.cascade import Cascade
from methods.speculative.rest_datastore import Datastore
from methods.speculative.staged import Staged
from tests.helpers.rounded_targets import BY, rounded_target

GREEDY = Sampling()
pytestmark = pytest.mark.skipif(cpu_kernels.library() is None, reason="the kernels cannot be compiled here")


@pytest.fixture(scope="module", params=BY)
def target(request: pytest.FixtureRequest) -> CausalLM:
    return rounded_target(request.param, layers=4)


@pytest.fixture(scope="module")
def prompts(target: CausalLM) -> list[torch.Tensor]:
    return checks.prompts(target.vocab_size, (9, 3, 14))


@pytest.fixture(scope="module")
def folder(target: CausalLM, prompts: list[torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A datastore of what the target writes, three times each: rarer contexts are left out."""
    texts = checks.outputs(Autoregressive(target, GREEDY), prompts, 30)
    made = tmp_path_factory.mktemp("datastore")
    documents = [prompt.tolist() + text for prompt, text in zip(prompts, texts, strict=True)] * 3
    Datastore.build(documents, target.vocab_size).save(made)
    return made


def test_the_table_saves_passes_of_the_copy_and_texts_are_the_targets(
    target: CausalLM, prompts: list[torch.Tensor], folder: Path
) -> None:
    wanted = checks.outputs(Autoregressive(target, GREEDY), prompts, 30)
    cascade, alone = Cascade(target, GREEDY, checkpoint=folder), Staged(target, GREEDY)
    for decoder in (cascade, alone):
        assert [checks.outputs(decoder, [prompt], 30)[0] for prompt in prompts] == wanted
    assert checks.outputs(cascade, prompts, 30) == wanted
    if cascade.drafter.light.rounds_fused:
        saved = cascade.stats()["tokens_per_pass_of_the_copy"] / alone.stats()["tokens_per_pass_of_the_copy"]
        assert saved > 1.1, "the copy writes nearly what the target wrote"


def test_its_memory_has_the_table(target: CausalLM, folder: Path) -> None:
    used = Cascade(target, GREEDY, checkpoint=folder).memory()
    assert used["copy"] and used["ngram_table"]


def test_it_needs_a_datastore_and_guesses(target: CausalLM, folder: Path) -> None:
    with pytest.raises(MissingPart, match="rest has no datastore"):
        Cascade(target, GREEDY)
    for options in ({"lookup": False}, {"guesses": 0}):
        with pytest.raises(ValueError, match="cascade needs lookup=true and guesses >= 1"):
            Cascade(target, GREEDY, checkpoint=folder, **options)
