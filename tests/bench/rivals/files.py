"""Files in the shape that the benchmarks of vLLM and SGLang write, small and with times that are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

MODEL = "Qwen/Qwen3-8B"
SPEC = {
    "spec_decode_acceptance_rate": 60.0,
    "spec_decode_acceptance_length": 2.8,
    "spec_decode_num_drafts": 100,
    "spec_decode_draft_tokens": 300,
    "spec_decode_accepted_tokens": 180,
    "spec_decode_per_position_acceptance_rates": [0.8, 0.6, 0.4],
}
Content = dict[str, Any]


def requests(n: int, tpot_s: float, *, length: int = 11, seed: int = 0) -> Content:
    """The lists of n requests, whose gaps are around ``tpot_s``."""
    rng = np.random.default_rng(seed)
    gaps = [(tpot_s * rng.uniform(0.8, 1.2, length - 1)).tolist() for _ in range(n)]
    return {
        "input_lens": [20 + number for number in range(n)],
        "output_lens": [length] * n,
        "ttfts": (0.05 * rng.uniform(0.9, 1.1, n)).tolist(),
        "itls": gaps,
        "generated_texts": ["x"] * n,
        "errors": [""] * n,
    }


def summary(lists: Content, names: tuple[str, ...] = ("ttft", "tpot")) -> Content:
    """What the benchmarks derive from the lists."""
    tpots = [sum(gaps) / (length - 1) for gaps, length in zip(lists["itls"], lists["output_lens"], strict=True)]
    values = {"ttft": lists["ttfts"], "tpot": tpots}
    return {
        f"{name}_ms": 1e3 * float(figure(values[metric]))
        for metric in names
        for name, figure in (
            (f"mean_{metric}", np.mean),
            (f"median_{metric}", np.median),
            (f"std_{metric}", np.std),
            (f"p99_{metric}", lambda found: np.percentile(found, 99)),
        )
    }


def vllm_serve(n: int = 30, tpot_s: float = 0.02, *, detailed: bool = True, spec: bool = False, **more: Any) -> Content:
    """``vllm bench serve --save-result``, with ``--save-detailed`` or without."""
    lists = requests(n, tpot_s)
    output, seconds = sum(lists["output_lens"]), 100 * tpot_s
    found = {
        "date": "20261101-120000",
        "endpoint_type": "openai",
        "backend": "openai",
        "label": None,
        "model_id": MODEL,
        "tokenizer_id": MODEL,
        "num_prompts": n,
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": 4,
        "duration": seconds,
        "completed": n,
        "failed": 0,
        "total_input_tokens": sum(lists["input_lens"]),
        "total_output_tokens": output,
        "request_throughput": n / seconds,
        "request_goodput": None,
        "output_throughput": output / seconds,
        "total_token_throughput": (output + sum(lists["input_lens"])) / seconds,
        **(lists if detailed else {}),
        "max_output_tokens_per_s": 40.0,
        "max_concurrent_requests": 4,
        "rtfx": 0.0,
        **(SPEC if spec else {}),
        **summary(lists),
    }
    return found | more


def sglang_serve(
    n: int = 30, tpot_s: float = 0.02, *, detailed: bool = True, old: bool = False, **more: Any
) -> Content:
    """``sglang.bench_serving --output-file``, with ``--output-details`` or without, of a recent or an older version."""
    lists = requests(n, tpot_s)
    output, seconds = sum(lists["output_lens"]), 100 * tpot_s
    found = {
        **({} if old else {"tag": None}),
        "backend": "sglang",
        "dataset_name": "random",
        "request_rate": float("inf"),
        "max_concurrency": 4,
        "sharegpt_output_len": None,
        "random_input_len": 32,
        "random_output_len": 11,
        "random_range_ratio": 0.0,
        **({} if old else {"server_info": {"model_path": MODEL, "version": "0.5.18", "internal_states": [{}]}}),
        "duration": seconds,
        "completed": n,
        "total_input_tokens": sum(lists["input_lens"]),
        "total_output_tokens": output,
        "total_output_tokens_retokenized": output,
        "request_throughput": n / seconds,
        "input_throughput": sum(lists["input_lens"]) / seconds,
        "output_throughput": output / seconds,
        "mean_e2e_latency_ms": 250.0,
        "median_e2e_latency_ms": 249.0,
        "std_e2e_latency_ms": 3.0,
        "p99_e2e_latency_ms": 260.0,
        **summary(lists),
        "concurrency": 3.9,
        "accept_length": 2.5,
        **(lists if detailed else {}),
    }
    return found | more


def vllm_latency(seconds: float = 1.0, n: int = 30, **more: Any) -> Content:
    """``vllm bench latency --output-json``."""
    times = (seconds * np.random.default_rng(1).uniform(0.95, 1.05, n)).tolist()
    cuts = (10, 25, 50, 75, 90, 99)
    found = {
        "avg_latency": float(np.mean(times)),
        "std_latency": float(np.std(times)),
        "latencies": times,
        "percentiles": {str(cut): float(np.percentile(times, cut)) for cut in cuts},
    }
    return found | more


def vllm_throughput(seconds: float = 10.0, **more: Any) -> Content:
    """``vllm bench throughput --output-json``."""
    found = {
        "elapsed_time": seconds,
        "num_requests": 100,
        "total_num_tokens": 16_000,
        "requests_per_second": 100 / seconds,
        "tokens_per_second": 16_000 / seconds,
    }
    return found | more


def one_batch(size: int = 8, latency: float = 1.32, *, old: bool = False, **more: Any) -> Content:
    """A line of ``sglang.bench_one_batch_server --result-filename``, of a recent or an older version."""
    found = {"run_name": "default", "batch_size": size, "input_len": 64, "output_len": 129, "latency": latency}
    if old:
        return found | {"output_throughput": 781.82, "overall_throughput": 1169.7} | more
    newer = {
        "input_throughput": 12800.0,
        "output_throughput": 806.25,
        "overall_throughput": 1169.7,
        "last_ttft": 0.04,
        "last_gen_throughput": 800.0,
        "acc_length": -1.0,
        "cache_hit_rate": 0.0,
        "spec_accept_length": None,
        "spec_accept_rate": None,
        "spec_accepted_drafts": None,
        "spec_proposed_drafts": None,
        "spec_verify_ct": None,
        "latency_breakdown": None,
        "cached_tokens": None,
        "cached_tokens_details": None,
    }
    return found | newer | more


def written(folder: Path, name: str, *contents: Content | str) -> Path:
    """A file with the objects, one on each line."""
    file = folder / name
    lines = (content if isinstance(content, str) else json.dumps(content) for content in contents)
    file.write_text("\n".join(lines), encoding="utf-8")
    return file
