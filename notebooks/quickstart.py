# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # DecodeBench in five minutes
#
# Load a model, generate with several decoding methods, and measure which one is faster. Everything runs on a CPU with
# SmolLM2-135M-Instruct (`python -m bench fetch models smollm2`); where that is missing, a random model takes its place, whose
# text means nothing.

# %%
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # of tqdm, where there are no widgets

import decodebench  # noqa: E402

try:
    target = decodebench.load("smollm2", dtype="float32")
    METHODS = ["prompt_lookup", "suffix", "eagle"]
except decodebench.UserError as error:
    print(error)
    target = decodebench.load("random", dtype="float32")
    METHODS = ["prompt_lookup", "suffix"]
target

# %% [markdown]
# ## The same text in fewer steps
#
# EXACT methods draft several tokens and let the model verify them in one pass. The text is the model's own, in fewer passes;
# in 16 bit, two tokens that are equally likely up to rounding may be swapped, so that this notebook uses 32 bit.

# %%
QUESTION = "Explain in two sentences why the sky is blue."
plain = decodebench.generate(target, QUESTION, method="autoregressive", max_new_tokens=64)
print(plain)

# %%
for method in METHODS:
    found = decodebench.generate(target, QUESTION, method=method, max_new_tokens=64)
    print(f"{method:14} {found.steps:3} steps, {found.tokens_per_step:.2f} tokens/step, same text: {found.ids == plain.ids}")

# %% [markdown]
# All methods, what they promise, and what they need:

# %%
decodebench.methods().set_index("name")[["family", "guarantee", "needs"]]

# %% [markdown]
# ## Is it faster?
#
# Fewer steps are not always less time. `benchmark` decodes every prompt with the method and with the baseline, in random
# order, and gives the ratio of the times with a 95 % interval. A run that was disturbed by other programs is INVALID.

# %%
PROMPTS = [
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
    "Write a list of ten animals, each with its sound.",
    "Count from 1 to 20, and write a comma after each number.",
    "Translate into French: good morning, good evening, good night.",
    "Summarize in one sentence: Speculative decoding lets a small model propose tokens and a large model verify them.",
    [{"role": "system", "content": "Answer in one short sentence."}, {"role": "user", "content": "What is a prime number?"}],
]
runs = decodebench.benchmark(target, PROMPTS, method=METHODS, max_new_tokens=48, keep=False)
runs

# %% [markdown]
# One method in detail. Over so few prompts the interval is wide; `benchmark(target, "mtbench")` measures over a data set.

# %%
runs["prompt_lookup"]

# %%
runs["prompt_lookup"].to_dataframe()[["prompt", "identical", "speed-up", "tokens/step", "acceptance"]]

# %% [markdown]
# ## Your own model
#
# A model of transformers is measured as it is in memory. Here it is a tiny Llama that has learnt nothing.

# %%
import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(target.tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
own = decodebench.load(LlamaForCausalLM(config), target.tokenizer)
drafted = decodebench.generate(own, "Hello", method="suffix", max_new_tokens=32)
print(f"{own}: {len(drafted.ids)} tokens in {drafted.steps} steps")

# %% [markdown]
# More: `docs/python.md`, and the other notebooks, which read the records of the project.
