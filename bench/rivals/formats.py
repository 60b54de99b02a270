"""Files that the benchmarks of vLLM and SGLang write, as ``Figures``.

Which tool wrote an entry is known by its keys, and what a version of the tool does not write is None:

- ``vllm bench serve``: ``--save-result``, with ``--save-detailed`` the times of each request. Its ``spec_decode_...``
  fields come from the metrics of a vLLM server; ``acceptance_rate`` is in percent.
- ``vllm bench latency``: ``--output-json``, seconds of one batch, again and again. It names neither the model nor the
  batch.
- ``vllm bench throughput``: ``--output-json``; its tokens are those of prompts and outputs together.
- ``sglang.bench_serving``: ``--output-file``, a line for each run, with ``--output-details`` the times of each request.
  Newer versions add ``server_info``, which names model and version.
- ``sglang.bench_one_batch_server``: ``--result-filename``, a line for each batch. Older versions have no ``last_ttft``,
  and their ``output_throughput`` includes the prompt; tokens per second are derived from the latency in both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.errors import UserError
from bench.records.rivals import Figures, Spread

SERVE, LATENCY, THROUGHPUT = "vllm bench serve", "vllm bench latency", "vllm bench throughput"
SGLANG_SERVE, SGLANG_BATCH = "sglang.bench_serving", "sglang.bench_one_batch_server"
TOOLS = (SERVE, LATENCY, THROUGHPUT, SGLANG_SERVE, SGLANG_BATCH)
MOST_BYTES, MOST_ENTRIES = 1 << 28, 1_000
_LEAST, _MOST = 1e-12, 1e15  # less is nothing that was measured, more seconds or tokens are damage
_SAME_TOKENS = 0.01  # tokens per second times seconds against the tokens
_ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "tgi": "TGI", "tensorrt-llm": "TensorRT-LLM", "trt": "TensorRT-LLM",
            "lmdeploy": "LMDeploy", "llama.cpp": "llama.cpp", "openai": "OpenAI endpoint"}  # fmt: skip
Times = tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """What one run of a benchmark wrote.

    Attributes:
        figures: of the whole run.
        times: TPOT of each request (None without a second token), or latency of each batch; empty without details.
        input_lens: of the requests in order, by which those of two files are known to be the same; empty if unknown.
    """

    figures: Figures
    times: Times = ()
    input_lens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Given:
    """Facts that some files do not say, from the command line.

    Attributes:
        model: the model's name.
        batch_size: requests of a batch.
        output_len: output tokens of each request.
    """

    model: str | None = None
    batch_size: int | None = None
    output_len: int | None = None


def read(file: Path, given: Given) -> list[Entry]:
    """The entries of a file.

    Raises:
        UserError: it is too large, no JSON, of another tool, or has numbers that cannot be.
    """
    found = [_Fields(file, place, content) for place, content in enumerate(_objects(file), start=1)]
    if len(found) > MOST_ENTRIES:
        raise UserError(f"{file} must have at most {MOST_ENTRIES:,} entries, got {len(found):,}. Split it.")
    return [_entry(each, given, alone=len(found) == 1) for each in found]


def _objects(file: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file: one, a list of them (``vllm bench sweep``), or one on each line."""
    if not file.is_file():
        raise UserError(f"{file} must be a file that a benchmark wrote, got {_kind(file)}. Name one.")
    if (size := file.stat().st_size) > MOST_BYTES:
        most = f"{MOST_BYTES >> 20} MiB"
        raise UserError(f"{file} must have at most {most}, got {size >> 20} MiB. Write it without the texts.")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{file} must be JSON, got bytes that are no text. Name another file.") from None
    if not text.strip():
        raise UserError(f"{file} must have an entry, got an empty file. Name one that a benchmark wrote.")
    try:
        whole_text = json.loads(text)
        found = whole_text if isinstance(whole_text, list) else [whole_text]
    except (ValueError, RecursionError) as whole:
        try:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        except (ValueError, RecursionError):
            raise UserError(
                f"{file} must be JSON, or a JSON object on each line, got: {_reason(whole)}. Name another file."
            ) from None
    for each in found:
        if not isinstance(each, dict):
            raise UserError(f"{file} must have JSON objects, got {_named(each)}. {_EXPECTED}")
    if not found:
        raise UserError(f"{file} must have an entry, got an empty list. Name a file that a benchmark wrote.")
    return found


def _kind(file: Path) -> str:
    return "a folder" if file.is_dir() else "something else" if file.exists() else "no file of this name"


def _named(value: Any) -> str:
    """What a value of JSON is."""
    kinds = {list: "a list", str: "a text", bool: "a truth value", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


def _reason(error: Exception) -> str:
    return "nesting that is too deep" if isinstance(error, RecursionError) else str(error).partition(";")[0]


_EXPECTED = f"Name a file of {', '.join(TOOLS[:-1])} or {TOOLS[-1]}."


# ------------------------------------------------------------------------------------------------- checked fields


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of an entry, checked as they are read; each reader takes the names of older and newer versions."""

    file: Path
    place: int
    content: Mapping[str, Any]

    def refused(self, names: Sequence[str], must: str, got: Any) -> UserError:
        where = f"{self.file}{f', entry {self.place},' if self.place > 1 else ''}"
        shown = got if isinstance(got, str) else repr(got)
        return UserError(
            f"{names[0]} in {where} must be {must}, got {shown[:60]}. Measure again, or name another file."
        )

    def find(self, *names: str) -> Any:
        return next((self.content[name] for name in names if self.content.get(name) is not None), None)

    def number(self, *names: str, most: float = _MOST) -> float | None:
        """At least 0."""
        value = self.find(*names)
        return None if value is None else _checked(value, lambda got: self.refused(names, _range(most), got), most)

    def positive(self, *names: str) -> float | None:
        """Above 0; None for 0, which the benchmarks write where there was nothing to measure."""
        value = self.number(*names)
        return value if value is not None and value > _LEAST else None

    def count(self, *names: str) -> int | None:
        value = self.number(*names)
        if value is not None and value != int(value):
            raise self.refused(names, "a whole number", value)
        return None if value is None else int(value)

    def text(self, *names: str) -> str | None:
        value = self.find(*names)
        return value if isinstance(value, str) and value else None

    def numbers(self, name: str, of: Mapping[str, Any] | None = None) -> list[float]:
        """A list of numbers of at least 0; empty where there is none."""
        value = (self.content if of is None else of).get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.refused([name], "a list of numbers", value)
        return [_checked(item, lambda got: self.refused([name], "finite numbers of at least 0", got)) for item in value]

    def spread(self, *metrics: str) -> Spread:
        """Milliseconds as the benchmarks of servers name them."""
        found = (self.positive(*(f"{kind}_{metric}_ms" for metric in metrics)) for kind in ("mean", "median", "p99"))
        return Spread(*(None if value is None else value / 1e3 for value in found))


def _range(most: float) -> str:
    return "a finite number of at least 0" if most == _MOST else f"a number from 0 to {most:g}"


def _checked(value: Any, refused: Callable[[Any], UserError], most: float = _MOST) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:  # false for NaN
        raise refused(value)
    return float(value)


# ---------------------------------------------------------------------------------------------------------- tools


def _entry(of: _Fields, given: Given, *, alone: bool) -> Entry:
    tool = _tool(of)
    name = of.file.name if alone else f"{of.file.name}:{of.place}"
    found = _READERS[tool](of, Figures(name, tool, "SGLang" if tool == SGLANG_BATCH else "vLLM"), given)
    figures = found.figures
    if figures.model and given.model and figures.model != given.model:
        raise UserError(f"model={given.model} is for files that do not name one, got {figures.model} in {of.file}.")
    return replace(found, figures=replace(figures, model=figures.model or given.model))


def _tool(of: _Fields) -> str:
    """Which benchmark wrote an entry.

    Raises:
        UserError: none that is known.
    """
    keys = set(of.content)
    served = {"request_throughput", "duration", "completed"} <= keys
    if served and ({"model_id", "num_prompts"} <= keys):
        return SERVE
    if served and "backend" in keys and keys & {"mean_e2e_latency_ms", "total_output_tokens_retokenized"}:
        return SGLANG_SERVE
    if {"avg_latency", "latencies"} <= keys:
        return LATENCY
    if {"elapsed_time", "num_requests", "total_num_tokens"} <= keys:
        return THROUGHPUT
    if {"run_name", "batch_size", "input_len", "output_len", "latency"} <= keys:
        return SGLANG_BATCH
    shown = ", ".join(sorted(keys)[:4]) or "no keys"
    raise UserError(f"{of.file} must be of a known benchmark, got an entry with {shown[:80]}. {_EXPECTED}")


def _serve(of: _Fields, known: Figures, given: Given) -> Entry:
    """``vllm bench serve`` and ``sglang.bench_serving``, whose figures have the same meaning."""
    vllm = known.tool == SERVE
    requests = of.count("completed")
    if not requests:
        raise UserError(f"{of.file} must have finished requests, got none. Look for its errors, and measure again.")
    output = of.count("total_output_tokens", "total_output")
    if not output:
        raise UserError(f"{of.file} must have output tokens, got none. Name a benchmark of generation.")
    speculated = of.positive("spec_decode_draft_tokens") is not None
    backend = of.text("backend", "endpoint_type") or ""
    server = of.content.get("server_info")
    server = server if isinstance(server, Mapping) else {}
    details = _requests(of)
    rate = of.number("spec_decode_acceptance_rate", most=100.0)
    found = replace(
        known,
        engine="vLLM" if speculated else _engine(backend),
        version=of.text("vllm_version", "engine_version", "version") or _text(server.get("version")),
        label=of.text("label", "tag"),
        model=of.text("model_id") or _text(server.get("model_path")),
        dataset=of.text("dataset_name"),
        requests=requests,
        failed=_failed(of, requests),
        concurrency=of.count("max_concurrency"),
        request_rate=_rate(of),
        input_tokens=of.count("total_input_tokens", "total_input"),
        output_tokens=output,
        duration_s=of.positive("duration"),
        tokens_per_s=of.positive("output_throughput"),
        total_tokens_per_s=of.positive("total_token_throughput", "total_throughput"),
        ttft_s=_or_derived(of.spread("ttft"), details.ttft_s),
        tpot_s=_or_derived(of.spread("tpot"), details.tpot_s),
        latency_s=of.spread("e2el") if vllm else of.spread("e2e_latency"),
        accepted_length=of.positive("spec_decode_acceptance_length", "accept_length"),
        acceptance_rate=None if rate is None or not speculated else rate / 100,
        acceptance_at=tuple(of.numbers("spec_decode_per_position_acceptance_rates")),
    )
    _check_tokens(of, found, details)
    return Entry(found, details.tpot_s, details.input_lens)


def _latency(of: _Fields, known: Figures, given: Given) -> Entry:
    mean, times = of.positive("avg_latency"), of.numbers("latencies")
    if not mean or not times or min(times) <= _LEAST:
        raise UserError(f"{of.file} must have latencies above 0, got none. Measure again.")
    if abs(mean / float(np.mean(times)) - 1) > _SAME_TOKENS:
        raise of.refused(["avg_latency"], f"the mean of latencies, {np.mean(times):.6g}", f"{mean:.6g}")
    output = given.output_len * given.batch_size if given.output_len and given.batch_size else None
    found = replace(
        known,
        requests=given.batch_size,
        batch_size=given.batch_size,
        output_tokens=output,
        duration_s=mean,
        tokens_per_s=output / mean if output else None,
        latency_s=Spread(mean, *map(float, np.percentile(times, (50, 99)))),
    )
    return Entry(found, tuple(times))


def _throughput(of: _Fields, known: Figures, given: Given) -> Entry:
    requests, total = of.count("num_requests"), of.count("total_num_tokens")
    seconds = of.positive("elapsed_time")
    if not requests or not total or not seconds:
        raise UserError(f"{of.file} must have requests, tokens and seconds above 0, got none. Measure again.")
    output = requests * given.output_len if given.output_len else None
    if output and output >= total:
        raise UserError(
            f"output_len must be below the {total / requests:.1f} tokens of a request in {of.file}, prompt and output "
            f"together, got {given.output_len}. Set output_len=N as in the benchmark."
        )
    found = replace(
        known,
        requests=requests,
        input_tokens=total - output if output else None,
        output_tokens=output,
        total_tokens=total,
        duration_s=seconds,
        tokens_per_s=output / seconds if output else None,
        total_tokens_per_s=total / seconds,
    )
    return Entry(found)


def _one_batch(of: _Fields, known: Figures, given: Given) -> Entry:
    size, length, seconds = of.count("batch_size"), of.count("output_len"), of.positive("latency")
    if not size or not length or not seconds:
        raise UserError(f"{of.file} must have a batch, output tokens and seconds above 0, got none. Measure again.")
    ttft = of.positive("last_ttft")
    if ttft and ttft >= seconds:
        raise of.refused(["last_ttft"], f"below the latency, {seconds:g}", f"{ttft:g}")
    tpot = (seconds - ttft) / (length - 1) if ttft and length > 1 else None
    prompt = (of.count("input_len") or 0) * size
    found = replace(
        known,
        label=of.text("run_name"),
        requests=size,
        batch_size=size,
        input_tokens=prompt or None,
        output_tokens=size * length,
        duration_s=seconds,
        tokens_per_s=size * length / seconds,
        ttft_s=Spread(ttft, ttft),
        tpot_s=Spread(tpot, tpot),
        latency_s=Spread(seconds, seconds),
        accepted_length=_accepted(of),
        acceptance_rate=of.number("spec_accept_rate", most=1.0),
    )
    return Entry(found)


_READERS: dict[str, Callable[[_Fields, Figures, Given], Entry]] = {
    SERVE: _serve,
    SGLANG_SERVE: _serve,
    LATENCY: _latency,
    THROUGHPUT: _throughput,
    SGLANG_BATCH: _one_batch,
}


def _accepted(of: _Fields) -> float | None:
    """SGLang writes -1 without speculation."""
    names = [name for name in ("spec_accept_length", "acc_length") if of.content.get(name) != -1]
    return of.positive(*names)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _engine(backend: str) -> str:
    """The engine behind an endpoint's type; an OpenAI endpoint may be of any engine."""
    return next((name for start, name in _ENGINES.items() if backend.startswith(start)), backend or "unknown")


def _rate(of: _Fields) -> float | str | None:
    """Requests per second; inf is a text in vLLM's files and a number in SGLang's."""
    if kind := of.text("ramp_up_strategy"):
        return f"{kind} from {of.number('ramp_up_start_rps'):g} to {of.number('ramp_up_end_rps'):g}"
    value = of.find("request_rate")
    if value is None or isinstance(value, str):
        return value
    return "inf" if value == math.inf else of.positive("request_rate")


def _failed(of: _Fields, completed: int) -> int:
    errors = _details(of).get("errors")
    listed = sum(map(bool, errors)) if isinstance(errors, list) else 0
    return of.count("failed") or listed


# ------------------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class _Requests:
    """What a detailed file says of each request, in order; empty without details."""

    ttft_s: Times = ()
    tpot_s: Times = ()
    input_lens: tuple[int, ...] = ()
    output_lens: tuple[int, ...] = ()


def _details(of: _Fields) -> Mapping[str, Any]:
    """Most versions have the lists of requests beside the other fields."""
    inner = of.content.get("details")
    return inner if isinstance(inner, Mapping) else of.content


def _requests(of: _Fields) -> _Requests:
    inner = _details(of)
    ttfts, lengths = of.numbers("ttfts", inner), of.numbers("output_lens", inner)
    gaps, prompts = inner.get("itls"), of.numbers("input_lens", inner)
    if not ttfts or not lengths or gaps is None:
        return _Requests()
    if not isinstance(gaps, list) or not len(ttfts) == len(lengths) == len(gaps):
        got = len(gaps) if isinstance(gaps, list) else gaps
        raise of.refused(["itls"], f"a list for each of {len(ttfts)} requests", got)
    decoding = [sum(of.numbers("itls", {"itls": each})) for each in gaps]
    whole = of.numbers("latencies", inner)
    if len(whole) == len(ttfts):  # the newest files; equal to the sum of the gaps but for the stream's last message
        decoding = [max(0.0, latency - first) for latency, first in zip(whole, ttfts, strict=True)]
    tpot = [
        seconds / (length - 1) if length > 1 and seconds > _LEAST else None
        for seconds, length in zip(decoding, lengths, strict=True)
    ]
    return _Requests(
        tuple(first or None for first in ttfts),
        tuple(tpot),
        tuple(map(int, prompts)) if len(prompts) == len(ttfts) else (),
        tuple(map(int, lengths)),
    )


def _or_derived(stated: Spread, times: Times) -> Spread:
    """The figures of the file; those that it was not asked to write from the requests."""
    known = [value for value in times if value is not None]
    if not known:
        return stated
    derived = (float(np.mean(known)), *map(float, np.percentile(known, (50, 99))))
    return Spread(*(a if a is not None else b for a, b in zip(_values(stated), derived, strict=True)))


def _values(spread: Spread) -> Iterator[float | None]:
    yield from (spread.mean, spread.median, spread.p99)


def _check_tokens(of: _Fields, found: Figures, details: _Requests) -> None:
    """Refuse a file whose totals contradict its rates or its requests."""
    output = found.output_tokens or 0
    if details.output_lens and sum(details.output_lens) != output:
        raise of.refused(["total_output_tokens"], f"the sum of output_lens, {sum(details.output_lens)}", output)
    if found.duration_s and found.tokens_per_s:
        expected = found.tokens_per_s * found.duration_s
        if abs(expected / output - 1) > _SAME_TOKENS:
            raise of.refused(["output_throughput"], f"total tokens / duration, {output / found.duration_s:.6g}",
                             f"{found.tokens_per_s:.6g}")  # fmt: skip
