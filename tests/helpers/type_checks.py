"""The checks of types and shapes, on few calls of each function in each test: a checked call of a small function takes
several times as long as the call, and most calls of a test repeat the ones before. What checks a function is made when
it is first needed: a function inside another one is another object at every call of that.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import jaxtyping

FIRST = 8  # calls in each test that are checked; after them every call whose number is a power of two
_test = 0


@dataclass(slots=True)
class _Calls:
    """Of a function, by its code, in the current test."""

    test: int = -1
    count: int = 0


_of_code: dict[CodeType, _Calls] = {}


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
            return _few_calls(decorated, lambda: decorate(decorated, typechecker=typechecker))
        init = decorated.__init__
        if not getattr(init, "checks_few_calls", False):
            decorate(decorated, typechecker=typechecker)  # it checks what a data class is made of
            if (checked := decorated.__init__) is not init:
                decorated.__init__ = _few_calls(init, lambda: checked)
        return decorated

    jaxtyping.jaxtyped = jaxtyped


def _few_calls(function: Callable[..., Any], make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    calls = _Calls() if code is None else _of_code.setdefault(code, _Calls())
    checked: Callable[..., Any] | None = None

    def chosen() -> Callable[..., Any]:
        nonlocal checked
        if jaxtyping.config.jaxtyping_disable:  # a compiled function would be compiled anew at each count
            return function
        if calls.test != _test:
            calls.test, calls.count = _test, 0
        calls.count = count = calls.count + 1
        if count > FIRST and count & (count - 1):
            return function
        if checked is None:
            checked = make()
        return checked

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
