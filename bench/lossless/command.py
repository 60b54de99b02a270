"""``python -m bench lossless experiment=greedy|sampling|rounds|joint method=... model=... draws=...``"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from datetime import datetime, timezone
from pathlib import Path

from bench.config import compose, options
from bench.config.schema import RunConfig
from bench.config.typecheck import did_you_mean
from bench.errors import INVALID, OK, UserError
from bench.lossless.settings import Choice, LosslessConfig, ServedConfig

_SUMMARY = """\
Tests on any exact method and model whether its output is the target's own.

Experiments:
  greedy     the target alone and the method at temperature 0 over the same prompts, token by token
  sampling   the first token of four prompts by every verification rule that fits; known-wrong rules must be detected
  rounds     the first tokens (levels + 1) of rounds over drafts of several levels, against their exact joint
             distribution; needs sampling.top_k, and a method that draws its drafts
  joint      short continuations by the whole decoder, against the target's exact joint distribution
Instead, url=http://HOST:PORT/v1 tests a server (vLLM, SGLang, llama.cpp, ...) against the target: its texts at
temperature 0, its first tokens, and whether top_p and top_k hold.

method, model, sampling, hardware, seed, max_new_tokens and batch_size are as in python -m bench.
Exit code 3: an exact rule failed, or a wrong one was not detected."""
_EXAMPLES = (
    "python -m bench lossless experiment=greedy method=prompt_lookup",
    "python -m bench lossless experiment=sampling method=speculative_sampling draws=100000",
    "python -m bench lossless experiment=rounds method=speculative_sampling sampling.top_k=4 draws=200000",
    "python -m bench lossless experiment=joint method=medusa openings=true sampling.top_k=3 draws=20000 batch_size=64",
    "python -m bench lossless url=http://localhost:8000/v1 model=smollm2 hardware=cpu_fp32",
)


def help_text() -> str:
    return options.help_text(
        "lossless experiment=NAME|url=URL [key=value ...]",
        _SUMMARY,
        _EXAMPLES,
        {"Options": LosslessConfig, "Options with url": ServedConfig},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one experiment; returns the exit code."""
    return options.command(_main, help_text, argv)


def _main(words: list[str]) -> int:
    if any(word.startswith("url=") for word in words):
        from bench.lossless import certificate

        return certificate.run(words)
    experiment, config, overrides = split(words)
    return run(experiment, config, compose.compose(overrides))


def split(words: Sequence[str]) -> tuple[str, LosslessConfig, list[str]]:
    """The experiment, its settings, and the words that configure the run.

    Raises:
        UserError: no experiment, an unknown one, or a wrong value.
    """
    if not any(word.startswith("experiment=") for word in words):
        raise UserError(
            "experiment is needed. Choose one: experiment=greedy|sampling|rounds|joint "
            "(python -m bench lossless --help)"
        )
    choice, others = options.parse(Choice, words)
    config, overrides = options.parse(LosslessConfig, others)
    known = {*compose.groups(), *(field.name for field in fields(RunConfig))}
    for word in overrides:
        key = word.lstrip("+~").partition("=")[0]
        if key.split(".")[0] not in known and did_you_mean(key, options.keys(LosslessConfig)):
            options.refuse([word], "lossless", ("experiment", *options.keys(LosslessConfig)))
        if key.split(".")[0] == "dataset":
            raise UserError(f"{word} has no effect: the prompts of an experiment are fixed. Leave it out.")
    return choice.experiment, config, overrides


def run(experiment: str, config: LosslessConfig, cfg: RunConfig) -> int:
    """Load, experiment, record, print; returns the exit code."""
    from bench.config import instantiate
    from bench.lossless import experiments, report
    from bench.measure import preconditions
    from bench.models import loading
    from bench.utils import machine
    from bench.utils.memory import keep_freed_memory

    instantiate.check(cfg)
    preconditions.require(preconditions.check(cfg))
    keep_freed_memory()
    machine.set_threads(cfg.hardware.threads)
    loaded = loading.load(cfg.model, asdict(cfg.hardware), cfg.paths, keep_hf=instantiate.needs_hf(cfg.method))
    work = {
        "greedy": experiments.greedy_identity,
        "sampling": experiments.first_token_sampling,
        "rounds": experiments.round_sampling,
        "joint": experiments.joint_sampling,
    }[experiment]
    begin = datetime.now(timezone.utc)
    result = work(cfg, config, loaded)
    seconds = (datetime.now(timezone.utc) - begin).total_seconds()
    folder = Path(cfg.paths.results) / "lossless" / report.folder_name(experiment, cfg, config, loaded)
    report.write(folder, experiment, cfg, config, loaded, result, begin, seconds)
    print(report.render(experiment, result, folder, cfg))
    return OK if result["passed"] else INVALID
