"""Settings of ``python -m bench lossless``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bench.errors import UserError

OWN = "own"  # the rule that the method has

MOST_PROMPTS = 8  # fixed prompts of an experiment


@dataclass(frozen=True, slots=True)
class LosslessConfig:
    """Settings of an experiment.

    Attributes:
        draws: sample size per prompt, temperature and rule
        temperatures: at which tokens are drawn
        level: probability of a false alarm over all tests of exact rules together (Bonferroni)
        children: siblings of a node in the drafts of the tree rules (sampling, rounds)
        levels: of the drafts; levels + 1 tokens are compared (rounds)
        horizon: tokens of a continuation (joint)
        floor: continuations at least this likely are counted separately (joint)
        rule: in place of the method's own (joint): chain, block, tree_with_replacement, tree_without_replacement,
            deterministic_tree, or a known-wrong one: uncorrected_rejection, judged_behind_root, independent_paths
        prompts: how many of the four prompts are used (joint, rounds)
        openings: continue a few raw words in place of the chat prompts, which makes a draw cheap (joint)
        controls: run the known-wrong rules too, at the highest temperature (sampling, rounds)
    """

    draws: int = 1_000_000
    temperatures: tuple[float, ...] = (0.7, 1.0)
    level: float = 0.01
    children: int = 3
    levels: int = 2
    horizon: int = 3
    floor: float = 1e-3
    rule: str = OWN
    prompts: int = 4
    openings: bool = False
    controls: bool = True

    def __post_init__(self) -> None:
        for name, most in {"draws": None, "children": None, "horizon": None, "levels": 3, "prompts": 4}.items():
            value = getattr(self, name)
            if value < 1 or (most is not None and value > most):
                bounds = "at least 1" if most is None else f"between 1 and {most}"
                raise UserError(f"{name} must be {bounds}, got {value}. Set {name}=NUMBER.")
        if not self.temperatures or min(self.temperatures) <= 0:
            raise UserError(
                f"temperatures must be numbers above 0, got {list(self.temperatures)}. Use experiment=greedy for "
                "temperature 0."
            )
        for name in ("level", "floor"):
            if not 0 < (share := getattr(self, name)) < 1:
                raise UserError(f"{name} must be between 0 and 1, got {share}. Set {name}=NUMBER.")


@dataclass(frozen=True, slots=True)
class Choice:
    """Which experiment is run.

    Attributes:
        experiment: greedy, sampling, rounds or joint
    """

    experiment: Literal["greedy", "sampling", "rounds", "joint"]


@dataclass(frozen=True, slots=True)
class ServedConfig:
    """Settings of the certificate of a server.

    Attributes:
        url: base URL of an OpenAI-compatible server, as in http://localhost:8000/v1
        served_model: name of the model at the server; default: the only one it lists
        prompts: texts written greedily; first tokens follow the first four of these prompts
        n: first tokens drawn per prompt and draw
        temperature: of the first draw, and of all others
        top_p: nucleus of the second draw
        top_k: most likely tokens of the third draw
        level: probability of a false alarm over all tests together (Bonferroni)
        timeout_s: longest wait for one answer
    """

    url: str
    served_model: str | None = None
    prompts: int = 8
    n: int = 200
    temperature: float = 1.0
    top_p: float = 0.8
    top_k: int = 20
    level: float = 0.01
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"url must start with http:// or https://, got {self.url}. Set url=http://HOST:PORT/v1.")
        for name in ("prompts", "n", "top_k"):
            if (value := getattr(self, name)) < 1:
                raise UserError(f"{name} must be at least 1, got {value}. Set {name}=NUMBER.")
        if self.prompts > MOST_PROMPTS:
            raise UserError(f"prompts must be at most {MOST_PROMPTS}, got {self.prompts}. Set prompts=NUMBER.")
        for name in ("temperature", "timeout_s"):
            if (number := getattr(self, name)) <= 0:
                raise UserError(f"{name} must be above 0, got {number}. Set {name}=NUMBER.")
        for name in ("level", "top_p"):
            if not 0 < (share := getattr(self, name)) < 1:
                raise UserError(f"{name} must be between 0 and 1, got {share}. Set {name}=NUMBER.")
