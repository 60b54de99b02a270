"""The checks of types and shapes, on few calls of each function in each test: a checked call of a small function takes
several times as long as the call, and most calls of a test repeat the ones before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jaxtyping

FIRST = 8  # calls in each test that are checked; after them every call whose number is a power of two
_test = 0


def next_test() -> None:
    """Count the calls of every function from zero."""
    global _test
    _test += 1


def check_few_calls() -> None:
    """Let what the import hook of jaxtyping decorates from now on check few calls."""
    decorate = jaxtyping.jaxtyped

    def jaxtyped(decorated: Any = None, *, typechecker: Any) -> Any:
        if decorated is None:
            return functools.partial(jaxtyped, typechecker=typechecker)
        if not inspect.isclass(decorated):
            return _few_calls(decorated, decorate(decorated, typechecker=typechecker))
        init = decorated.__init__
        if not getattr(init, "checks_few_calls", False):
            decorate(decorated, typechecker=typechecker)  # it checks what a data class is made of
            if decorated.__init__ is not init:
                decorated.__init__ = _few_calls(init, decorated.__init__)
        return decorated

    jaxtyping.jaxtyped = jaxtyped


def _few_calls(function: Callable[..., Any], checked: Callable[..., Any]) -> Callable[..., Any]:
    calls = test = 0

    def chosen() -> Callable[..., Any]:
        nonlocal calls, test
        if jaxtyping.config.jaxtyping_disable:
            return function
        calls = calls + 1 if test == _test else 1
        test = _test
        return checked if calls <= FIRST or calls & (calls - 1) == 0 else function

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        return chosen()(*arguments, **options)

    @functools.wraps(function)
    def generate(*arguments: Any, **options: Any) -> Any:
        return (yield from chosen()(*arguments, **options))

    if inspect.isgeneratorfunction(function):  # other decorators look for it: torch.inference_mode
        call = generate
    call.checks_few_calls = True  # type: ignore[attr-defined]
    return call
