"""Multi-token prediction: the module that a model ships drafts for it.

Gloeckle et al. 2024, arXiv 2404.19737, train models to predict several tokens at once; DeepSeek-V3 (arXiv 2412.19437,
sec. 2.2) keeps the causal chain, by a module of one layer after the model, and drafts with it (sec. 5.4.3):

    h'_i = P [norm(Emb(t_{i+1})); norm(h_i)],  h1_i = Layer(h'_1 .. h'_i),  p(t_{i+2}) = Out(norm(h1_i))

with the model's own embedding and output matrix, and h_i its last state (eq. 21 to 23). For a longer draft the module
is applied again, to its own normed state and the token it drafted. Nothing is trained: the module is read from the
files of the model (``published/mtp.py``). That works for models whose layers the engine has proven: GLM-4.5 and its
kin (``glm4_moe``). DeepSeek-V3 (latent attention) and Qwen3-Next (linear attention) are refused when they are loaded.

Published: DeepSeek-V3 accepts 85 to 90 % of second tokens, 1.8 times the tokens per second. Differences: batched,
ragged rows. From the second drafted token on, vLLM gives the module its state before the norm, SGLang and transformers
the one after it, as here. The embedding of the second token of a text, which vLLM sets to zero, is read.

Command: ``python -m bench method=mtp model=hf model.name=zai-org/GLM-4.5-Air dataset=mtbench hardware=cuda_bf16``
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from methods.drafting import Context, Draft
from methods.engine.causal_layers import RMSNorm
from methods.engine.causal_lm import CausalLM
from methods.engine.host_copies import from_host
from methods.engine.linear import make_linear
from methods.engine.sampling import Sampling
from methods.speculative.added_layers import AddedLayer, StateReader
from methods.speculative.draft_layers import MOST_UNREAD
from methods.speculative.draft_model import ChainDrafter
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.published.formats import check_plausible
from methods.speculative.published.mtp import MtpWeights, read_mtp
from methods.speculative.verification import default_rule


class MtpModule:
    """The module ready for decoding."""

    def __init__(self, target: CausalLM, weights: MtpWeights) -> None:
        eps = float(target.config.rms_norm_eps)
        self._target = target
        self._token_norm, self._state_norm, self._last_norm = (
            RMSNorm(weights.tensors[f"{name}.weight"], eps) for name in ("enorm", "hnorm", "shared_head.norm")
        )
        self._mix = make_linear([weights.tensors["eh_proj.weight"]], [None])
        self.layer = AddedLayer(target, weights.layer)
        self.nbytes = self.layer.nbytes + self._mix.nbytes

    def enter(self, states: Float[Tensor, "B W D"], tokens: Int[Tensor, "B W"]) -> Float[Tensor, "B W D"]:
        """What the layer reads at places with these states, and these tokens after them."""
        pairs = torch.cat([self._token_norm(self._target.embed(tokens)), self._state_norm(states)], -1)
        return self._mix(pairs.flatten(0, 1)).view(states.shape)

    def leave(self, states: Float[Tensor, "B D"]) -> Float[Tensor, "B D"]:
        """What the output matrix multiplies, and what the module reads next."""
        return self._last_norm(states)


class MtpDrafter(ChainDrafter):
    """Reads the committed tokens with the target's states, then drafts with the module's own."""

    def __init__(self, target: CausalLM, module: MtpModule, gamma: int, confidence: float) -> None:
        super().__init__(gamma, confidence)
        self._target, self._module = target, module
        self.hidden_layers = (target.n_layers - 1,)  # a prefill then returns the states of all places
        self._reader: StateReader | None = None
        self._state: Tensor | None = None

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        capacity = StateReader.capacity(prompts, limit, self.nodes)
        self._reader = StateReader(self._module.layer, len(prompts), capacity)

    def resume(self, last: Context, prompts: list[list[int]], limit: int, kept: int) -> int:
        """See ``methods.drafting.ResumingDrafter``."""
        before = self._known
        before.note(last)
        self._read(last)
        self.reset(prompts, limit)
        return self._known.continue_from(before, kept - 1)  # after the last one, the token may be another

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._known.keep_rows(rows)

    def propose(self, context: Context) -> Draft:
        self._known.note(context)
        draft = super().propose(context)
        self._known.cache.truncate([len(row) - 1 for row in context.tokens])  # what was drafted is not committed
        return draft

    def skip(self, context: Context) -> None:
        """Keep the states of the last pass; read them once in a while."""
        self._known.note(context)
        if len(self._known.unread) > MOST_UNREAD:
            self._read(context)

    @property
    def _known(self) -> StateReader:
        assert self._reader is not None, "reset comes first"
        return self._reader

    def _catch_up(self, context: Context) -> Float[Tensor, "B V"]:
        return self._logits(self._read(context))

    def _next(self, token: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        assert self._state is not None
        read = self._module.enter(self._state[:, None], token[:, None])
        return self._logits(self._known.advance(read, [1] * len(token)))

    def _read(self, context: Context) -> Float[Tensor, "B D"]:
        reader = self._known
        counts, states = reader.unread.take()
        pending = [row[length + 1 :] for row, length in zip(context.tokens, reader.cache.lengths, strict=True)]
        rows = [new + [0] * (max(counts) - len(new)) for new in pending]
        tokens = from_host(rows, self._target.device)
        return reader.advance(self._module.enter(states[0], tokens), counts)

    def _logits(self, states: Float[Tensor, "B D"]) -> Float[Tensor, "B V"]:
        self._state = self._module.leave(states)
        return self._target.head(self._state)


class MultiTokenPrediction(SpeculativeDecoder):
    """Drafts of up to ``gamma`` tokens by the module that the target ships.

    Args:
        gamma: most tokens drafted per round; the module was trained for one.
        confidence: a draft ends where the module's most likely token is less likely than this in every row; 0: never.
        block: at a temperature, judge a draft as a block (Sun et al. 2024, arXiv 2403.10444).

    Raises:
        ValueError: the target ships no module that is read, or an option out of range.
    """

    paper = "Gloeckle et al. 2024, arXiv 2404.19737; DeepSeek-AI 2024, arXiv 2412.19437"
    model_kind = "causal"
    needs = "a module in the model"
    min_warmup = 3

    def __init__(
        self, target: CausalLM, sampling: Sampling, gamma: int = 1, confidence: float = 0.0, block: bool = False
    ) -> None:
        if gamma < 1 or not 0.0 <= confidence < 1.0:
            raise ValueError(
                f"mtp needs gamma >= 1 and 0 <= confidence < 1, got gamma={gamma}, confidence={confidence}. For no "
                "draft at all use method=autoregressive."
            )
        module = MtpModule(target, read_mtp(target))
        rule = default_rule(sampling, "chain", drawn=True, block=block)
        super().__init__(target, sampling, MtpDrafter(target, module, gamma, confidence), rule)
        self._bytes = module.nbytes

    def memory(self) -> dict[str, int | None]:
        """Memory beside the target's."""
        return {"mtp_module": self._bytes}

    def acceptance_warning(self, rates: Sequence[Sequence[float]]) -> str | None:
        """A warning where the module drafts implausibly badly."""
        return check_plausible(f"The module of {self.target.name}", rates)
