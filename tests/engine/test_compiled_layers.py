"""torch.compile: the same logits and texts, made before anything is measured; refused where it cannot work."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
import torch._dynamo
import torch._inductor.config

from bench import cli, errors
from bench.config import compose, identity
from bench.config.schema import PathsConfig
from bench.contract import checks
from bench.measure.run import run
from bench.report import collect, terminal
from methods.autoregressive import Autoregressive
from methods.engine.causal_lm import CausalLM
from methods.engine.compiled_layers import Compiled
from methods.engine.cuda_graphs import GraphedLM
from methods.engine.sampling import Sampling
from methods.speculative.prompt_lookup import PromptLookup
from methods.speculative.token_recycling import TokenRecycling
from tests.engine.test_causal_lm import tiny
from tests.engine.test_cuda_graphs import PROMPTS, decode

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
WORDS = ["model=random", "hardware=cpu_fp32", "hardware.threads=1", "measure.bootstrap_samples=100"]


@pytest.fixture(scope="module", autouse=True)
def unchecked() -> Iterator[None]:
    """Without the wrappers that check shapes in tests only: torch.compile would compile them, too."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def compiled() -> Iterator[tuple[Any, Compiled]]:
    target = checks.tiny_target()
    yield target, Compiled(target)
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def ours(compiled: tuple[Any, Compiled]) -> Any:
    return compiled[0]


@needs_compiler
def test_windows_sinks_and_experts_are_those_of_the_layers_as_written() -> None:
    plain, lm = (CausalLM.from_hf(tiny("gpt_oss", sliding_window=5)) for _ in range(2))
    Compiled(lm)
    try:
        found = []
        for model in (plain, lm):
            cache = model.new_cache(2, 16)
            model.prefill([torch.arange(3, 12), torch.tensor([7, 50])], cache)
            found.append(model.forward(torch.tensor([[4, 9, 5], [6, 8, 3]]), None, cache).logits)
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    finally:
        torch._dynamo.reset()


@needs_compiler
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "ragged"])
def test_logits_and_texts_are_those_of_the_layers_as_written(ours: Any, prompts: list[list[int]]) -> None:
    plain, rows = checks.tiny_target(), len(prompts)
    tokens, parents = torch.arange(rows * 5).view(rows, 5) + 1, torch.tensor([[-1, -1, 0, 2]]).expand(rows, -1)
    outputs = []
    for target in (ours, plain):
        cache = target.new_cache(rows, 60)
        first = target.prefill([torch.tensor(prompt) for prompt in prompts], cache)
        outputs.append([first.logits, target.forward(tokens, parents, cache, levels=3).logits])
        outputs[-1].append(target.forward(tokens[:, :1], None, cache).logits)
    for ours_, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(ours_, theirs)
    for make in (Autoregressive, lambda target, sampling: TokenRecycling(target, sampling, tree="small")):
        assert decode(make(ours, Sampling()), prompts) == decode(make(plain, Sampling()), prompts)


@needs_compiler
def test_everything_is_compiled_when_the_model_is_loaded(compiled: tuple[Any, Compiled]) -> None:
    """Whatever the batch, the draft, the layer or the view."""
    ours, made = compiled
    before = made.counted
    assert 0 < before <= 10 and made.seconds > 0
    decode(Autoregressive(ours.skip(attention=[1]), Sampling()), PROMPTS)
    decode(TokenRecycling(ours, Sampling(), tree="small"), PROMPTS[:2])
    assert made.counted == before


@needs_compiler
def test_a_compiled_run_is_told_from_others(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "".join(json.dumps({"question_id": i, "category": "chat", "turns": [f"Say {i}."]}) + "\n" for i in range(2))
    )
    quick = ["measure.cost_curve=false", f"dataset.path={file}", "dataset=jsonl", "max_new_tokens=8"]
    paths = PathsConfig(results=str(tmp_path / "results"), cache=str(tmp_path / "cache"))
    cfg = replace(compose.compose(["method=prompt_lookup", *WORDS, *quick]), paths=paths)
    assert "compile" not in identity.strip(cfg.to_dict()).get("hardware", {}), "the id of a run without it is unchanged"
    outcome = run(replace(cfg, hardware=replace(cfg.hardware, compile=True)))
    made = outcome.summary["made_ahead"]["compiled"]
    assert made["before"] == made["in_all"] and made["before"]["seconds"] >= 0
    assert outcome.summary["agreement"]["exact"] == 1.0
    text = terminal.render(outcome.summary, outcome.path)
    assert ", compiled" in text and "compiled functions in " in text and "while measuring" not in text
    plain = run(cfg).summary
    assert "compile" not in plain and len(collect.groups([plain, outcome.summary])) == 2


def test_without_a_compiler_it_is_refused_in_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "no-such-compiler"))
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    assert cli.main(["method=prompt_lookup", "dataset=demo", *WORDS, "hardware.compile=true"]) == errors.BAD_INPUT
    *_, said = capsys.readouterr().err.splitlines()
    assert said.startswith("hardware.compile must be false where torch.compile fails, got true (")
    assert "needs a C++ compiler" in said
    torch._dynamo.reset()


def test_encoder_decoders_are_refused() -> None:
    from bench.models.loading import compile_layers
    from methods.engine.seq2seq_lm import Seq2SeqLM
    from tests.engine import test_seq2seq_lm

    with pytest.raises(ValueError, match=r"got bart, an encoder-decoder\. Set hardware\.compile=false"):
        compile_layers(Seq2SeqLM.from_hf(test_seq2seq_lm.tiny("bart")))


@pytest.mark.gpu
@pytest.mark.parametrize("make", [Autoregressive, PromptLookup])
def test_graphs_capture_compiled_layers(make: Any) -> None:
    wanted = decode(make(checks.tiny_target(), Sampling()), PROMPTS)
    target = CausalLM.from_hf(checks.tiny_target().hf.cuda())  # type: ignore[union-attr,arg-type]
    Compiled(target)
    target = GraphedLM.of(target)
    prompts = [torch.tensor(prompt, device="cuda") for prompt in PROMPTS]
    for _ in range(2):  # captured, then replayed
        rows: list[list[int]] = [[] for _ in prompts]
        for step in make(target, Sampling()).decode(prompts, 40, torch.Generator("cuda").manual_seed(0)):
            for row, new in zip(rows, step.tokens, strict=True):
                row.extend(new)
        assert [row[:40] for row in rows] == wanted
    assert target.graphs.captured > 0
