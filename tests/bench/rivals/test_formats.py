"""What is read from the files of five benchmarks, of recent and of older versions, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import cli
from bench.errors import UserError
from bench.records.rivals import Figures
from bench.rivals import formats
from bench.rivals.formats import Entry, Given
from tests.bench.rivals import files
from tests.bench.rivals.files import MODEL, written


def read(folder: Path, *contents: Any, given: Given = Given()) -> list[Entry]:  # noqa: B008
    return formats.read(written(folder, "result.json", *contents), given)


def figures(folder: Path, content: Any, given: Given = Given()) -> Figures:  # noqa: B008
    return read(folder, content, given=given)[0].figures


@pytest.mark.parametrize("detailed", [True, False])
def test_vllm_serve(tmp_path, detailed):
    content = files.vllm_serve(spec=True, detailed=detailed)
    (entry,) = read(tmp_path, content)
    found = entry.figures
    assert (found.tool, found.engine, found.model, found.name) == ("vllm bench serve", "vLLM", MODEL, "result.json")
    assert (found.requests, found.failed, found.concurrency, found.request_rate) == (30, 0, 4, "inf")
    assert (found.input_tokens, found.output_tokens) == (content["total_input_tokens"], 330)
    assert found.tokens_per_s == content["output_throughput"] and found.duration_s == 2.0
    for name in ("ttft", "tpot"):
        spread = getattr(found, f"{name}_s")
        stated = [content[f"{kind}_{name}_ms"] / 1e3 for kind in ("mean", "median", "p99")]
        assert [spread.mean, spread.median, spread.p99] == pytest.approx(stated)
    assert (found.accepted_length, found.acceptance_rate, found.acceptance_at) == (2.8, 0.6, (0.8, 0.6, 0.4))
    assert len(entry.times) == (30 if detailed else 0)


def test_vllm_serve_names_no_engine_behind_an_openai_endpoint(tmp_path):
    assert figures(tmp_path, files.vllm_serve()).engine == "OpenAI endpoint"
    assert figures(tmp_path, files.vllm_serve(backend="vllm")).engine == "vLLM"
    assert figures(tmp_path, files.vllm_serve(backend="sglang", version="0.5.18")).version == "0.5.18"


def test_older_vllm_serve(tmp_path):
    """Without backend, failed and speculation, as versions of early 2025."""
    content = files.vllm_serve(detailed=False)
    for name in ("backend", "failed", "max_concurrent_requests", "max_output_tokens_per_s", "rtfx", "request_goodput"):
        del content[name]
    found = figures(tmp_path, content | {"endpoint_type": "vllm", "request_rate": 4.0, "burstiness": 1.0})
    assert (found.engine, found.request_rate, found.accepted_length) == ("vLLM", 4.0, None)


def test_percentiles_that_were_not_asked_for_come_from_the_requests(tmp_path):
    content = files.vllm_serve()
    stated = figures(tmp_path, content)
    without = {name: value for name, value in content.items() if "tpot" not in name and "ttft" not in name}
    derived = figures(tmp_path, without | {"ttfts": content["ttfts"]})
    for name in ("ttft_s", "tpot_s"):
        a, b = getattr(stated, name), getattr(derived, name)
        assert (a.mean, a.median, a.p99) == pytest.approx((b.mean, b.median, b.p99))


def test_sglang_serve(tmp_path):
    content = files.sglang_serve()
    (entry,) = read(tmp_path, content)
    found = entry.figures
    assert (found.tool, found.engine, found.version) == ("sglang.bench_serving", "SGLang", "0.5.18")
    assert (found.model, found.dataset, found.accepted_length) == (MODEL, "random", 2.5)
    assert found.request_rate == "inf", "Infinity in the file"
    assert found.latency_s.p99 == 0.26 and found.tpot_s.mean == pytest.approx(content["mean_tpot_ms"] / 1e3)
    assert np.mean(entry.times) == pytest.approx(found.tpot_s.mean)


def test_older_sglang_serve_names_no_model(tmp_path):
    content = files.sglang_serve(old=True, detailed=False, accept_length=None)
    assert figures(tmp_path, content).model is None
    found = figures(tmp_path, content, Given(model="mine"))
    assert (found.model, found.version, found.accepted_length) == ("mine", None, None)


def test_details_of_sglang_may_be_in_an_object_of_their_own(tmp_path):
    content = files.sglang_serve()
    lists = {name: content.pop(name) for name in files.requests(1, 1.0)}
    content["total_output"] = content.pop("total_output_tokens")
    (entry,) = read(tmp_path, content | {"details": lists})
    assert len(entry.times) == 30 and entry.figures.output_tokens == 330


def test_vllm_latency(tmp_path):
    content = files.vllm_latency()
    (entry,) = read(tmp_path, content)
    assert (entry.figures.tool, entry.figures.model, entry.figures.tokens_per_s) == ("vllm bench latency", None, None)
    latency = entry.figures.latency_s
    assert [latency.median, latency.p99] == [content["percentiles"]["50"], content["percentiles"]["99"]]
    assert entry.times == tuple(content["latencies"])
    found = figures(tmp_path, content, Given("m", batch_size=8, output_len=128))
    assert found.output_tokens == 1024 and found.tokens_per_s == pytest.approx(1024 / content["avg_latency"])


def test_vllm_throughput_counts_prompts_as_well(tmp_path):
    found = figures(tmp_path, files.vllm_throughput())
    assert (found.tool, found.requests, found.total_tokens) == ("vllm bench throughput", 100, 16_000)
    assert (found.tokens_per_s, found.total_tokens_per_s) == (None, 1600.0)
    known = figures(tmp_path, files.vllm_throughput(), Given(output_len=128))
    assert (known.input_tokens, known.output_tokens, known.tokens_per_s) == (3_200, 12_800, 1280.0)


def test_sglang_one_batch(tmp_path):
    batch = files.one_batch(spec_accept_length=3.1, spec_accept_rate=0.7)
    entries = read(tmp_path, batch, files.one_batch(1, 0.66, old=True))
    found, older = (entry.figures for entry in entries)
    assert [found.name, older.name] == ["result.json:1", "result.json:2"]
    assert (found.tool, found.engine) == ("sglang.bench_one_batch_server", "SGLang")
    assert (found.batch_size, found.output_tokens, found.ttft_s.mean) == (8, 8 * 129, 0.04)
    assert found.tpot_s.mean == pytest.approx((1.32 - 0.04) / 128)
    assert found.tokens_per_s == pytest.approx(8 * 129 / 1.32), "and not the field of this name, without the prefill"
    assert (found.accepted_length, found.acceptance_rate) == (3.1, 0.7)
    assert older.tpot_s.mean is None and older.latency_s.mean == 0.66
    assert figures(tmp_path, files.one_batch()).accepted_length is None, "-1 in the file"


def test_several_entries(tmp_path):
    entries = read(tmp_path, files.vllm_serve(20), files.vllm_serve(30))
    assert [entry.figures.requests for entry in entries] == [20, 30]
    listed = written(tmp_path, "summary.json", json.dumps([files.vllm_serve(20), files.vllm_serve(30)], indent=1))
    assert [entry.figures.name for entry in formats.read(listed, Given())] == ["summary.json:1", "summary.json:2"]


# ------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "must have an entry, got an empty file"),
        ("  \n", "must have an entry, got an empty file"),
        ("[]", "must have an entry, got an empty list"),
        ("not json", "must be JSON, or a JSON object on each line"),
        ('{"a": 1', "must be JSON, or a JSON object on each line"),
        ("[" * 100_000, "must be JSON, or a JSON object on each line"),
        ("3", "must have JSON objects, got a number"),
        ("{}", "must be of a known benchmark, got an entry with no keys"),
        ({"prefill_latency": 1.0, "batch_size": 1}, "must be of a known benchmark, got an entry with batch_size"),
        (files.vllm_serve(completed=0), "must have finished requests, got none"),
        (files.vllm_serve(total_output_tokens=0), "must have output tokens, got none"),
        (files.vllm_serve(mean_tpot_ms=math.nan), "mean_tpot_ms in .* must be a finite number of at least 0, got nan"),
        (files.vllm_serve(mean_ttft_ms=-1.0), "mean_ttft_ms in .* must be a finite number of at least 0, got -1.0"),
        (files.vllm_serve(duration=math.inf), "duration in .* must be a finite number of at least 0, got inf"),
        (files.vllm_serve(duration=1e300), "duration in .* must be a finite number"),
        (files.vllm_serve(duration="2 s"), "duration in .* must be a finite number of at least 0, got 2 s"),
        (files.vllm_serve(completed=True), "completed in .* must be a finite number"),
        (files.vllm_serve(completed=2.5), "completed in .* must be a whole number, got 2.5"),
        (files.vllm_serve(ttfts=[-0.1] * 30), "ttfts in .* must be finite numbers of at least 0, got -0.1"),
        (files.vllm_serve(ttfts=[0.1] * 3), "itls in .* must be a list for each of 3 requests, got 30"),
        (files.vllm_serve(itls=[[math.nan]] * 30), "itls in .* must be finite numbers"),
        (files.vllm_serve(itls="x"), "itls in .* must be a list for each"),
        (files.vllm_serve(output_lens=[5] * 30), "total_output_tokens in .* must be the sum of output_lens, 150"),
        (files.vllm_serve(output_throughput=999.0), "output_throughput in .* must be total tokens / duration"),
        (files.vllm_serve(spec=True, spec_decode_acceptance_rate=101.0), "must be a number from 0 to 100"),
        (files.vllm_latency(avg_latency=9.0), "avg_latency in .* must be the mean of latencies"),
        (files.vllm_latency(latencies=[]), "must have latencies above 0, got none"),
        (files.vllm_throughput(elapsed_time=0.0), "must have requests, tokens and seconds above 0"),
        (files.one_batch(last_ttft=2.0), "last_ttft in .* must be below the latency, 1.32, got 2"),
        (files.one_batch(batch_size=0), "must have a batch, output tokens and seconds above 0"),
        (files.one_batch(acc_length=math.nan), "must be a finite number"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_wrong_files(tmp_path, content, said, capsys):
    file = written(tmp_path, "wrong.json", content)
    with pytest.raises(UserError, match=said):
        formats.read(file, Given())
    assert cli.main(["rivals", "import", str(file), f"paths.results={tmp_path}"]) == 2
    shown = capsys.readouterr()
    assert len(shown.err.strip().splitlines()) == 1 and not shown.out
    assert not (tmp_path / "rivals").exists()


def test_wrong_places(tmp_path):
    for place in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(UserError, match="must be a file that a benchmark wrote"):
            formats.read(place, Given())
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="bytes that are no text"):
        formats.read(tmp_path / "bytes.json", Given())
    with (tmp_path / "huge.json").open("wb") as huge:
        huge.truncate(formats.MOST_BYTES + 1)
    with pytest.raises(UserError, match="must have at most 256 MiB"):
        formats.read(tmp_path / "huge.json", Given())
    lines = written(tmp_path, "lines.jsonl", *[files.one_batch(old=True)] * (formats.MOST_ENTRIES + 1))
    with pytest.raises(UserError, match="at most 1,000 entries, got 1,001"):
        formats.read(lines, Given())


def test_given_facts_may_not_contradict_the_file(tmp_path):
    with pytest.raises(UserError, match="model=other is for files that do not name one, got Qwen/Qwen3-8B"):
        read(tmp_path, files.vllm_serve(), given=Given(model="other"))
    with pytest.raises(UserError, match="output_len must be below the 160.0 tokens of a request"):
        read(tmp_path, files.vllm_throughput(), given=Given(output_len=160))
