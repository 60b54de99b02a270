"""``python -m bench check-method NAME``: run the checks of ``bench.contract`` on a decoder, one line each.

The target is the tiny random one of ``checks``, in 64 bit. The method is one of conf/method, or a class that an
installed package registers under the entry point group ``decodebench.methods``. A trained method needs a checkpoint
for the tiny target (``method.checkpoint=FOLDER``); without one, call the functions from a test.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import entry_points
from typing import Any, Literal

import yaml

from bench.config import compose, instantiate
from bench.config.schema import SamplingConfig
from bench.config.typecheck import did_you_mean
from bench.contract import checks
from bench.errors import UserError
from methods.decoder import Decoder, Guarantee, PrefixCaching
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling

SAMPLINGS = (Sampling(1.0), Sampling(0.7, top_k=5), Sampling(1.3, top_p=0.8))
_LONGEST = 300  # characters of a message: the ids of two texts can be long


@dataclass(frozen=True, slots=True)
class Check:
    """The result for one invariant; ``skip``: it does not apply to this decoder."""

    state: Literal["ok", "FAIL", "skip"]
    what: str
    text: str

    def line(self) -> str:
        return f"{self.state:5} {self.what:31} {self.text}".rstrip()


def check_method(name: str, overrides: Sequence[str] = ()) -> Iterator[Check]:
    """Check a method against its guarantee, one invariant after another.

    Args:
        name: a choice of conf/method, or the name of an entry point.
        overrides: ``method.key=value``; every draft model is a tiny random one.

    Raises:
        UserError: no such method, or it cannot be built on the tiny target.
    """
    group = find(name, overrides)
    instantiate.method_class(group)
    instantiate.arguments(group, "method")
    make = _maker(group)
    try:
        decoder = make(_target(), Sampling())
    except UserError as error:
        raise _not_built(name, error) from error
    return (_run(what, text, look) for what, text, look in _invariants(make, decoder))


def find(name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The ``method`` group of a name; a YAML file, which has the arguments, before an entry point.

    Raises:
        UserError: no such method, or a word that is not a setting of it.
    """
    if strange := [word for word in overrides if not word.lstrip("+").startswith("method.") or "=" not in word]:
        raise UserError(f"check-method takes settings of the method, method.key=value, got '{strange[0]}'.")
    registered = {point.name: point.value.replace(":", ".") for point in entry_points(group=instantiate.ENTRY_POINTS)}
    choices = compose.every_group()["method"]
    if name in choices:
        return compose.compose([f"method={name}", *overrides]).method
    if name in registered:
        return {"name": name, "_target_": registered[name]} | dict(map(_setting, overrides))
    raise UserError(
        f"Unknown method '{name}'.{did_you_mean(name, [*choices, *registered])} It must be one of conf/method "
        f"(python -m bench list methods) or an entry point of the group '{instantiate.ENTRY_POINTS}' (installed: "
        f"{', '.join(registered) or 'none'})."
    )


def _setting(word: str) -> tuple[str, Any]:
    key, value = word.lstrip("+").removeprefix("method.").split("=", 1)
    return key, yaml.safe_load(value)


@cache
def _target() -> CausalLM:
    return checks.tiny_target()


@cache
def _small_vocabulary() -> CausalLM:
    """With so few ids that all continuations of three tokens can be enumerated."""
    return checks.tiny_target(vocab_size=8, seed=3)


def _maker(group: dict[str, Any]) -> checks.Make:
    def make(target: CausalLM, sampling: Sampling) -> Decoder:
        wanted = SamplingConfig(sampling.temperature, sampling.top_k, sampling.top_p)
        return instantiate.build_decoder(
            group, target, wanted, lambda _: checks.tiny_target(target.vocab_size, 2, seed=5)
        )

    return make


def _not_built(name: str, error: UserError) -> UserError:
    target = _target()
    return UserError(
        f"Method '{name}' cannot be built on the target of the check, a random model of {target.n_layers} layers and "
        f"{target.vocab_size} ids: {error} Set method.key=value to fit it, or call the functions of bench.contract "
        "with your own target."
    )


# ------------------------------------------------------------------------------------------------------- invariants

Look = Callable[[], object] | str  # a check, or why there is none
Invariant = tuple[str, str, Look]  # name, requirement, check


def _invariants(make: checks.Make, decoder: Decoder) -> Iterator[Invariant]:
    yield "guarantee", "is declared", partial(checks.check_guarantee, decoder)
    batched = decoder.max_batch != 1
    draws = _refusal(make) is None
    made = make if draws else lambda target, _: make(target, Sampling())
    yield "counters", "add up in every step", partial(checks.check_counters, make, _target(), batch=batched)
    yield "no leak", "a prompt gives the same after another one", partial(checks.check_no_leak, made, _target())
    alone = partial(checks.check_batch, make, _target()) if batched else "takes one row at a time (max_batch = 1)"
    yield "batch", "each row of a batch is what its prompt gives alone", alone
    caches = isinstance(decoder, PrefixCaching)
    kept = partial(checks.check_prefix_cache, make, _target()) if caches else "it keeps no text"
    yield "prefix cache", "a kept text does not change the next one", kept
    yield from _promises(make, decoder)


def _promises(make: checks.Make, decoder: Decoder) -> Iterator[Invariant]:
    exact = decoder.guarantee is Guarantee.EXACT
    relaxed = None if exact else "only EXACT promises it"
    greedy = partial(checks.check_greedy_identity, make, _target())
    yield "greedy text", "is the target's own, token by token", relaxed or greedy
    if reason := relaxed or _refusal(make) or _too_few_rows(decoder):
        yield "sampled distribution", "is the target's own", reason
        return
    for sampling in SAMPLINGS:
        look = partial(checks.check_sampling, make, _small_vocabulary(), sampling)
        yield f"distribution at {_named(sampling)}", "is the target's own", look


def _refusal(make: checks.Make) -> str | None:
    """Why a method does not sample, or None."""
    try:
        make(_target(), SAMPLINGS[0])
    except UserError as error:
        return f"refuses to sample: {error}"
    return None


def _too_few_rows(decoder: Decoder) -> str | None:
    most = decoder.max_batch
    return None if most is None else f"takes {most} row(s) at a time, the check draws thousands at once"


def _named(sampling: Sampling) -> str:
    parts = [f"T={sampling.temperature:g}"]
    parts += [f"top-k {sampling.top_k}"] if sampling.top_k else []
    return " ".join(parts + ([f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []))


def _run(what: str, demanded: str, look: Look) -> Check:
    if isinstance(look, str):
        return Check("skip", what, look)
    try:
        look()
    except Exception as error:  # of a third-party decoder: a failed check
        if os.environ.get("DECODEBENCH_TRACEBACK", "0") not in ("", "0"):
            traceback.print_exc()
        return Check("FAIL", what, _message(error))
    return Check("ok", what, demanded)


def _message(error: Exception) -> str:
    """One line: the text of an assertion, or kind and text of another error."""
    text = " ".join(str(error).split())
    whole = text if isinstance(error, AssertionError) and text else f"{type(error).__name__}: {text}"
    return whole if len(whole) <= _LONGEST else whole[:_LONGEST] + " ..."
