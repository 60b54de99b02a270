"""transformers' generate with a static cache whose passes are compiled, on a CPU too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench.contract import checks
from methods.autoregressive import Autoregressive
from methods.engine.sampling import Sampling
from methods.external.transformers_generate import HFCompiled


def test_passes_over_one_token_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    target = checks.tiny_target()
    compiled: list[tuple[int, ...]] = []

    def compile(call: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        assert options["backend"] == "inductor" and options["mode"] == "default" and options["dynamic"] is False

        def counted(*arguments: Any, **named: Any) -> Any:
            compiled.append(tuple(named["input_ids"].shape))
            return call(*arguments, **named)

        return counted

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "g++")
    (prompt,) = checks.prompts(target.vocab_size, (6,))
    method = HFCompiled(target, Sampling(), cache_length=32)
    assert checks.outputs(method, [prompt], 7) == checks.outputs(Autoregressive(target, Sampling()), [prompt], 7)
    assert compiled == [(1, 1)] * 6, "all but the prompt's"


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import exc

    def none() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none)
    with pytest.raises(ValueError, match="method=hf_compiled needs a C\\+\\+ compiler on a CPU, got none"):
        HFCompiled(checks.tiny_target(), Sampling())
