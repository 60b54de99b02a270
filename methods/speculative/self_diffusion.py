"""Self-diffusion: one model drafts a whole block and verifies the one before, in the same pass.

The model was trained to write in two ways with the same weights (``methods.base_models.self_diffusion``): the token
after every token it reads, as ever, and the tokens after a run of masks, which stand for tokens that are not known yet.
A pass scores the root and the draft d_1 .. d_N, and N masks after each of these N + 1 nodes. The draft is judged as in
any speculative decoding. The masks after the last kept node are the next draft: the first of them stands for the token
that this node has just yielded, so mask i writes the token i + 1 places on. No pass is spent on drafting, and the text
is the model's own in causal mode: greedy exactly, sampled by the rule for drafts that are not drawn.

After TiDAR (Liu et al. 2025, arXiv 2511.08923, sec. 3): a block that is filled in by one step of diffusion, drafted for
every outcome of the verification in the pass that verifies. Masks as look-ahead tokens are older (Monea et al. 2023,
arXiv 2311.13581).

Published: TiDAR writes 7.45 tokens per pass at 1.5B and 8.25 at 8B, at 4.71 and 5.91 times the speed of the
autoregressive model. A pass has (N + 1)^2 nodes, which are free on a GPU that waits for its memory, and cost time on a
CPU.

Differences: a mask sees the masks before it in its block, not those after it, so that a pass is a token tree like any
other; masks are read at the place of the unknown token and write the next one, so one head serves both ways to write;
the draft is the likeliest token at every place.

    python -m bench train method=self_diffusion_teacher model=multi30k_4_4
    python -m bench method=self_diffusion model=multi30k_4_4_distilled_self_diffusion dataset=multi30k
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from methods.drafting import AuxiliaryNodes, Context, Draft, ragged
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.rows import of_rows
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.verification import default_rule
from methods.training.interface import require

BLOCK, MASK = "masked_block", "masked_block_token_id"  # in the config of a model: longest run of masks, and their id


class MaskDrafter:
    """Drafts what the target wrote after the masks of its last pass.

    Args:
        block: N, masks after each node, and most tokens of a draft.
        mask: their id.
    """

    hidden_layers: Sequence[int] = ()

    def __init__(self, block: int, mask: int) -> None:
        self._block, self._mask = block, mask
        self.nodes = block + (block + 1) * block
        self._lengths: list[int] = []  # of the texts at the last proposal

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        self._lengths = [len(prompt) for prompt in prompts]

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._lengths = of_rows(self._lengths, rows)

    def reset_rows(self, prompts: Mapping[int, list[int]]) -> None:
        for row, prompt in prompts.items():
            self._lengths[row] = len(prompt)

    def propose(self, context: Context) -> Draft:
        asked = context.auxiliary_tokens or [[] for _ in context.tokens]
        rows = [
            self._after(found, len(text) - before - 1)
            for found, text, before in zip(asked, context.tokens, self._lengths, strict=True)
        ]
        self._lengths = [len(text) for text in context.tokens]
        tokens = ragged(rows, context.root.device)
        parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand(tokens.shape)
        auxiliary = self._masks(tokens.shape[1], len(rows), tokens.device)
        return Draft(tokens, parents, sizes=[len(row) for row in rows], auxiliary=auxiliary)

    def _after(self, found: Sequence[int], accepted: int) -> list[int]:
        """What the masks after a node of the last pass wrote; nothing for a row that committed nothing in it."""
        return list(found[accepted * self._block : (accepted + 1) * self._block]) if accepted >= 0 else []

    def _masks(self, drafted: int, batch: int, device: torch.device) -> AuxiliaryNodes:
        """A run of masks after the root and after each of the ``drafted`` nodes."""
        parents = [
            node - 1 if place == 0 else drafted + node * self._block + place - 1
            for node in range(drafted + 1)
            for place in range(self._block)
        ]
        return AuxiliaryNodes(
            tokens=torch.full((batch, len(parents)), self._mask, device=device),
            parents=torch.tensor(parents, device=device).expand(batch, -1),
            levels=drafted + self._block,
            asked=len(parents),
        )


class SelfDiffusion(SpeculativeDecoder):
    """A model with a masked-block mode drafts for itself.

    Args:
        target: was trained for it.
        block: tokens of a draft; None: as many as it was trained for.

    Raises:
        ValueError: a model without that mode, or a block that is longer than its own.
    """

    continuous_batching = True
    paper = "Liu et al. 2025, arXiv 2511.08923"
    needs = "a model trained for it"

    def __init__(self, target: CausalLM, sampling: Sampling, block: int | None = None) -> None:
        trained, mask = (getattr(target.config, name, None) for name in (BLOCK, MASK))
        if trained is None or mask is None:
            raise ValueError(
                f"method=self_diffusion needs a model that was trained to fill in blocks of masks, got {target.name}. "
                "Make one: python -m bench train method=self_diffusion_teacher model=multi30k_4_4"
            )
        require("at least 1", "method", block=block)
        if block is not None and block > trained:
            raise ValueError(f"block must be at most {trained} for {target.name}, got {block}. Set method.block.")
        drafter = MaskDrafter(block or int(trained), int(mask))
        super().__init__(target, sampling, drafter, default_rule(sampling, "chain", drawn=False))
