"""Whole decoder layers on a CPU in one call of the C++ kernels, see ``methods.engine.cpu_kernels``.

A decoding step on a CPU reads every weight once, and the rest (norms, rotary positions, cache writes, the softmax,
residuals) is small; but as torch operators these are forty calls a layer. Here one team of threads runs all layers.
Every sum runs in one order, so passes over one token and over many, batches of any size and trees give the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_uint8, c_void_p
from dataclasses import dataclass, field, replace
from time import perf_counter_ns
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from methods.engine.causal_layers import FeedForward, Layer, LayerNorm, RMSNorm, Rows
from methods.engine.cpu_kernels import KINDS, Matrix, NormNumbers, Packed, library, reading_groups
from methods.engine.guesses import GuessedRounds, PassGuesses
from methods.engine.kv_cache import Cache
from methods.engine.linear import KernelLinear, Linear, ScreenedLinear

LANES = 16  # a head must be a multiple of as many numbers
_ACTIVATIONS = {"SiLU": 0, "SiLUActivation": 0, "ReLU": 1, "GELUActivation": 2}  # by class, as the kernels number them

Norm = RMSNorm | LayerNorm
Measure = Literal["softmax", "saturation", "classifier", "table"]
_MEASURES: dict[Measure, int] = {
    "softmax": 0,
    "saturation": 1,
    "classifier": 2,
    "table": 3,
}  # as the kernels number them

_MATRICES = ("qkv", "out", "source_query", "source_out", "up", "down")
_NORMS = (
    *("before_attention", "after_attention", "before_source", "before_mlp", "after_mlp", "query", "key"),
    *("close_attention", "close_source", "close_mlp"),
)


class _Layer(Structure):
    _fields_ = [
        *((name, Matrix) for name in _MATRICES),
        *((name, NormNumbers) for name in _NORMS),
        *((name, c_int64) for name in ("norm_heads", "rotary", "activation", "gated")),
    ]


class ModelNumbers(Structure):
    """Layers and their sizes as the kernels are given them."""

    _fields_ = [
        ("layers", c_void_p),
        *((name, c_int64) for name in ("hidden", "heads", "kv_heads", "dim", "mlp", "beside")),
        ("scale", c_float),
        ("residual", c_float),
    ]


class _Pass(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("hidden", "beside", "result", "cos", "sin")),
        ("table", c_int64),
        ("rotary", c_int64),
        *((name, c_void_p) for name in ("reach", "lengths", "sources")),
        ("begin", c_int64),
        ("cache", c_void_p),
        *((name, c_int64) for name in ("batch", "nodes", "capacity", "earlier")),
        *((name, c_void_p) for name in ("layers", "places", "parts", "taps")),
        ("count", c_int64),
        ("work", c_void_p),
        ("threads", c_int64),
        ("exits", c_void_p),
        ("ending", c_void_p),
        ("rounds", c_void_p),
    ]


class _Exits(Structure):
    _fields_ = [
        ("run", c_int64),
        ("propagates", c_int64),
        ("stops", c_void_p),
        ("measure", c_int64),
        ("thresholds", c_void_p),
        ("norm", NormNumbers),
        ("maps", c_void_p),
        ("screen", Matrix),
        ("head", Matrix),
        ("weight", c_void_p),
        ("bias", c_float),
        *((name, c_void_p) for name in ("depths", "left", "logits", "scored", "confidence")),
        *((name, c_void_p) for name in ("columns", "deciding", "room")),
    ]


class _Ending(Structure):
    _fields_ = [
        ("norm", NormNumbers),
        ("map", Matrix),
        ("head", Matrix),
        ("full", Matrix),
        ("screened", c_int64),
        *((name, c_void_p) for name in ("normed", "logits", "best")),
    ]


class _Waiting(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("depth", "most")),
        *((name, c_void_p) for name in ("states", "count", "nodes")),
    ]


class _Rounds(Structure):
    written: list[int]  # by each row, before the last of them
    nodes: int  # of a pass, at most
    rotary: int  # dimensions that turn

    _fields_ = [
        *((name, c_void_p) for name in ("embedding", "positions")),
        ("count", c_int64),
        *((name, c_void_p) for name in ("cos", "sin")),
        ("factor", c_float),
        ("norm", NormNumbers),
        ("depths", c_void_p),
        ("most", c_int64),
        *((name, c_void_p) for name in ("lengths", "moves", "ends")),
        ("end_count", c_int64),
        *((name, c_void_p) for name in ("tokens", "times", "made", "waiting", "drawing", "guesses")),
    ]


class _Drawing(Structure):
    _fields_ = [("temperature", c_float), ("luck", c_void_p), ("probs", c_void_p)]


@dataclass(frozen=True)
class Embedded:
    """What a token becomes before the first layer, and how its queries and keys turn.

    Attributes:
        embedding: vectors of tokens.
        factor: of these.
        positions: vectors of places, that are added; None: there are none.
        norm: of the sum; None: there is none.
        turns: cosines and sines at all places; None: nothing turns.
    """

    embedding: Float[Tensor, "V D"]
    factor: float = 1.0
    positions: Float[Tensor, "P D"] | None = None
    norm: Norm | None = None
    turns: tuple[Float[Tensor, "1 P 1 r"], Float[Tensor, "1 P 1 r"]] | None = None


@dataclass(frozen=True)
class Drawing:
    """How rounds draw their tokens.

    Attributes:
        temperature: by which logits are divided.
        luck: per round and row a number from 0 to below 1, of 64 bit.
        probs: gets the distributions that are drawn from, as far as rounds are run, with room for at least as many
            rounds as ``luck``; contiguous.
    """

    temperature: float
    luck: Float[Tensor, "R B"]
    probs: Float[Tensor, "most B V"]

    def into(self) -> _Drawing:
        """As the kernels are given it."""
        assert self.probs.is_contiguous() and self.luck.is_contiguous() and self.luck.dtype == torch.float64
        return _Drawing(self.temperature, self.luck.data_ptr(), self.probs.data_ptr())


@dataclass(frozen=True)
class Ran:
    """Several rounds without drafts.

    Attributes:
        tokens: per round, what every row chose; of rows that stand still it does not matter. With guesses there are
            more of them than rounds.
        times: per round, nanoseconds from the call to its end.
        began_ns: ``time.perf_counter_ns()`` at the call.
        depths: with exits, per round and row the layers after which it left; 0: it did not, or stood still.
        columns: with exits, of the output matrix that were multiplied.
        deciding_ns: with exits, time from the states at exits to the decisions; 0 with a table.
        nodes: where states wait, per round those of a row that the layers above ran over; 0: they did not run.
        spent: with guesses, the costs of all passes, in those over one node.
        guessed: with guesses, what each pass made of them.
    """

    tokens: list[list[int]]
    times: list[int]
    began_ns: int
    depths: list[list[int]] = field(default_factory=list)
    columns: int = 0
    deciding_ns: int = 0
    nodes: list[int] = field(default_factory=list)
    spent: float = 0.0
    guessed: list[PassGuesses] = field(default_factory=list)

    @property
    def ends_ns(self) -> list[int | None]:
        """``Step.at_ns`` of each round; None for the last one, which ends with the call."""
        return [*(self.began_ns + time for time in self.times[:-1]), None]


class Waiting:
    """States at a shallow exit that the layers above it have not run over.

    Args:
        depth: of the exit.
        most: states of a row that wait, without that of the pass.
        width: numbers of a state, of type ``dtype``.

    Attributes:
        count: states of a row that wait now.
    """

    def __init__(self, depth: int, most: int, rows: int, width: int, dtype: torch.dtype) -> None:
        self.depth, self.most = depth, most
        self._states, self._count = torch.zeros(most + 1, rows, width, dtype=dtype), c_int64(0)

    @property
    def count(self) -> int:
        return self._count.value

    def into(self, nodes: ctypes.Array[c_int64]) -> _Waiting:
        """As the kernels are given it; ``nodes``: see ``Ran``."""
        places = self._states.data_ptr(), ctypes.addressof(self._count), ctypes.addressof(nodes)
        return _Waiting(self.depth, self.most, *places)


class Ending:
    """The final norm, if there is one, the map of an exit, if it has one, and the output matrix, for the kernels."""

    def __init__(self, norm: Norm | None, head: KernelLinear, exit_map: KernelLinear | None = None) -> None:
        self.norm, self.head, self.exit_map = norm, head, exit_map
        self._norm, self._kept = (NormNumbers(), []) if norm is None else norm_numbers(norm)
        self._map = Matrix() if exit_map is None else exit_map.panels.matrix
        self._full = (head.full.panels.matrix, head.count) if isinstance(head, ScreenedLinear) else (Matrix(), 0)

    def into(self, normed: Float[Tensor, "B M D"], logits: Float[Tensor, "B M V"], best: Int[Tensor, "B M"]) -> _Ending:
        """What the kernels do, and where their results go."""
        places = (result.data_ptr() for result in (normed, logits, best))
        return _Ending(self._norm, self._map, self.head.panels.matrix, *self._full, *places)


class Scored(NamedTuple):
    """A pass with the final norm, the map of an exit and the output matrix.

    Attributes:
        hidden: what the output matrix multiplies.
        logits: of the output matrix.
        best: the first of the largest logits of each node.
        seen: states after the layers wanted.
    """

    hidden: Float[Tensor, "B M D"]
    logits: Float[Tensor, "B M V"]
    best: Int[Tensor, "B M"]
    seen: dict[int, Float[Tensor, "B M D"]]


@dataclass(frozen=True)
class ExitRule:
    """When a row leaves a pass over one node per row.

    Attributes:
        stops: depths at which rows may leave, ascending.
        measure: of the confidence (``methods.early_exit.confidence``), or ``table``: each row has its depth.
        thresholds: per row, the confidence above which it leaves; of several rounds, one round after the other.
        maps: by depth, the product that a normed state passes before the output matrix.
        screen: the first rows of the output matrix, which the softmax asks before the whole.
        classifier: weight [D] and bias of the classifier.
        depths: per row, of the table.
        table: of several rounds, by token, in place of ``depths``.
        propagates: whether layers that a row did not run get keys and values of the state with which it left.
    """

    stops: Sequence[int]
    measure: Measure
    thresholds: Sequence[float] = ()
    maps: Mapping[int, KernelLinear] = field(default_factory=dict)
    screen: KernelLinear | None = None
    classifier: tuple[Float[Tensor, "D"], float] | None = None
    depths: Sequence[int] | None = None
    table: Int[Tensor, "V"] | None = None
    propagates: bool = True


@dataclass(frozen=True)
class Exited:
    """A pass whose rows left by a rule.

    Attributes:
        hidden: states of the rows that were run, after the layers that they ran.
        depths: per row, the layers after which it left; 0: it did not.
        logits: in 32 bit, of the rows in ``scored``.
        scored: which rows left by the logits of their exit.
        confidence: per row, of the softmax where it was asked last.
        columns: of the output matrix that were multiplied.
        deciding_ns: time from the states at exits to the decisions; 0 with a table.
    """

    hidden: Float[Tensor, "B 1 D"]
    depths: list[int]
    logits: Float[Tensor, "B V"]
    scored: list[bool]
    confidence: list[float]
    columns: int
    deciding_ns: int


class Portion(NamedTuple):
    """A layer to run, or some of its sub-layers."""

    layer: int
    attention: bool = True
    mlp: bool = True
    source: bool = True

    @property
    def bits(self) -> int:
        """The sub-layers as the kernels are given them."""
        return self.attention + 2 * self.source + 4 * self.mlp


@dataclass(frozen=True)
class Described:
    """A layer in the kernels' terms, by their names; what it lacks is left out.

    Attributes:
        matrices, norms: see ``Layer`` of the kernels.
        activation: of its feed-forward sub-layer.
        gated: ``up`` yields what is activated, and after it what that is multiplied with.
        norm_heads: norms of query and key act on each head.
        rotary: queries and keys turn.
    """

    matrices: Mapping[str, Linear]
    norms: Mapping[str, Rows | None]
    activation: Rows
    gated: bool = True
    norm_heads: bool = False
    rotary: bool = False

    @property
    def expressible(self) -> bool:
        """The kernels have its products, norms and activation."""
        return (
            all(norm is None or isinstance(norm, Norm) for norm in self.norms.values())
            and all(isinstance(product, KernelLinear) for product in self.matrices.values())
            and _activation(self.activation) is not None
        )


class _Leaving:
    """An exit rule for the kernels, and what they find, for one pass or for several rounds.

    Args:
        count: layers of the pass.
        run: those that are run, of these.
        first: layers that rows have run before.
    """

    def __init__(
        self,
        rule: ExitRule,
        norm: Norm,
        head: KernelLinear,
        rows: Sequence[bool],
        count: int,
        run: int,
        first: int = 0,
        rounds: int = 1,
    ) -> None:
        assert not isinstance(head, ScreenedLinear), "exits read all logits of one matrix"
        batch, width = len(rows), head.panels.matrix.inputs
        screen = Matrix() if rule.screen is None else rule.screen.panels.matrix
        self._maps = (Matrix * count)()
        for depth, product in rule.maps.items():
            if first < depth <= first + count:
                self._maps[depth - 1 - first] = product.panels.matrix
        self.left = (c_int32 * (batch * rounds))(*[-1 if is_run else 0 for is_run in rows] * rounds)
        self.scored, self._columns, self._deciding = (c_uint8 * batch)(), c_int64(0), c_int64(0)
        self._thresholds, self.confidence = (c_float * (batch * rounds))(*rule.thresholds), (c_float * batch)()
        self.logits = torch.empty(batch, head.panels.matrix.outputs if rule.measure == "softmax" else 0)
        self._room = torch.empty(batch, screen.outputs + 2 * width)
        self._stops = (c_uint8 * count)(*(first + portion + 1 in rule.stops for portion in range(count)))
        self._depths = None if rule.depths is None else (c_int32 * batch)(*(depth - first for depth in rule.depths))
        self._weight: Tensor | None
        self._weight, bias = rule.classifier or (None, 0.0)
        normed, self._kept = norm_numbers(norm)
        self.numbers = _Exits(
            run, rule.propagates, ctypes.addressof(self._stops), _MEASURES[rule.measure],
            ctypes.addressof(self._thresholds), normed, ctypes.addressof(self._maps), screen, head.panels.matrix,
            _place(self._weight), bias, None if self._depths is None else ctypes.addressof(self._depths),
            ctypes.addressof(self.left), self.logits.data_ptr(), ctypes.addressof(self.scored),
            ctypes.addressof(self.confidence), ctypes.addressof(self._columns), ctypes.addressof(self._deciding),
            self._room.data_ptr(),
        )  # fmt: skip

    @property
    def columns(self) -> int:
        return self._columns.value

    @property
    def deciding_ns(self) -> int:
        return self._deciding.value


class FusedLayers:
    """The layers of a model as one call runs them.

    Args:
        layers: all of the model, each of which is ``expressible``.
        scale: of attention scores.
        residual: factor of what a sub-layer adds.
        beside: numbers of a node that the first product of attention reads before those of the state.
    """

    def __init__(
        self, layers: Sequence[Described], heads: int, kv_heads: int, scale: float, residual: float, beside: int = 0
    ) -> None:
        found = library()
        assert found is not None, "no kernels"
        self._kept: list[Tensor] = []
        self._layers = (_Layer * len(layers))(*map(self._layer, layers))
        out, down = self._layers[0].out, self._layers[0].down
        sizes = (out.outputs, heads, kv_heads, out.inputs // heads, down.inputs, beside)
        self.model = ModelNumbers(ctypes.addressof(self._layers), *sizes, scale, residual)
        self._run: Callable[..., Any] = getattr(found, f"run_{KINDS[_panels(layers[0].matrices['out']).dtype]}")
        self._run.argtypes = [POINTER(ModelNumbers), POINTER(_Pass)]
        self._workspace: Callable[..., int] = found.workspace
        found.workspace.restype, found.workspace.argtypes = c_int64, [POINTER(ModelNumbers), *[c_int64] * 3]

    def _layer(self, layer: Described) -> _Layer:
        matrices = {name: _panels(product).matrix for name, product in layer.matrices.items()}
        norms = {name: self._norm(norm) for name, norm in layer.norms.items() if isinstance(norm, Norm)}
        kind = {"activation": _activation(layer.activation), "gated": layer.gated}
        return _Layer(**matrices, **norms, **kind, norm_heads=layer.norm_heads, rotary=layer.rotary)

    def _norm(self, norm: Norm) -> NormNumbers:
        described, numbers = norm_numbers(norm)
        self._kept += numbers
        return described

    @staticmethod
    def takes(nodes: int, fixed: bool) -> bool:
        """Whether the kernels run such a pass; ``fixed``: in its shapes, where the host may not know the lengths."""
        return not fixed

    def run(
        self,
        hidden: Float[Tensor, "B M D"],
        cos: Float[Tensor, "b M 1 r"] | None,
        sin: Float[Tensor, "b M 1 r"] | None,
        reach: Bool[Tensor, "B M G"] | None,
        cache: Cache,
        portions: Sequence[Portion],
        wanted: Collection[int] = (),
        *,
        earlier: int = 0,
        beside: Float[Tensor, "B M E"] | None = None,
        exits: _Exits | None = None,
        ending: _Ending | None = None,
        rounds: _Rounds | None = None,
    ) -> tuple[Float[Tensor, "B M D"], dict[int, Float[Tensor, "B M D"]]]:
        """States after some layers, and after those ``wanted``; keys and values go after the cache's lengths.

        Args:
            cos, sin: by which queries and keys turn; None: they do not.
            reach: which of the earlier nodes and of these each one sees; None: a chain.
            earlier: nodes that were run before and are not part of the cache's lengths.
            beside: what the first product of attention reads before the state, if the layers do.
            exits: where rows leave, see ``run_to_exits``.
            ending: what follows the layers, see ``run_to_logits``.
            rounds: of such passes, see ``run_rounds``.
        """
        hidden, beside = hidden.contiguous(), None if beside is None else beside.contiguous()
        batch, nodes, _ = hidden.shape
        result, threads, count = torch.empty_like(hidden), torch.get_num_threads(), len(portions)
        taps = {portion.layer: torch.empty_like(hidden) for portion in portions if portion.layer in wanted}
        slots = max(cache.written) + earlier + nodes if rounds is None else max(rounds.written) + rounds.nodes
        assert cache.begin + slots <= cache.capacity, f"{cache.begin + slots} slots in a cache of {cache.capacity}"
        slots = max(slots, *cache.sources) if cache.sources else slots
        rows = batch * (nodes if rounds is None else rounds.nodes)
        work = torch.empty(self._workspace(byref(self.model), rows, slots, threads))
        arrays = (
            (c_int32 * count)(*(portion.layer for portion in portions)),
            (c_int32 * count)(*(cache.place.get(part.layer, 0) for part in portions)),
            (c_uint8 * count)(*(part.bits for part in portions)),
            (c_void_p * count)(*(taps[part.layer].data_ptr() if part.layer in taps else None for part in portions)),
        )
        lengths = (c_int64 * batch)(*cache.written)
        turning = rounds.rotary if rounds is not None else 0 if cos is None else cos.shape[-1]
        seen = (c_int64 * batch)(*cache.sources) if cache.sources else None
        if rounds is not None:
            rounds.lengths = ctypes.addressof(lengths)
        described = _Pass(
            hidden.data_ptr(), _place(beside), result.data_ptr(), _place(cos), _place(sin),
            0 if cos is None or len(cos) == 1 else nodes * turning, turning,
            _place(reach), ctypes.addressof(lengths), None if seen is None else ctypes.addressof(seen), cache.begin,
            cache.store.data_ptr(), batch, nodes, cache.capacity, earlier,
            *(ctypes.addressof(array) for array in arrays), count,
            work.data_ptr(), threads, None if exits is None else ctypes.addressof(exits),
            None if ending is None else ctypes.addressof(ending),
            None if rounds is None else ctypes.addressof(rounds),
        )  # fmt: skip
        self._run(byref(self.model), byref(described))
        return result, taps

    def run_to_logits(
        self,
        hidden: Float[Tensor, "B M D"],
        cos: Float[Tensor, "b M 1 r"] | None,
        sin: Float[Tensor, "b M 1 r"] | None,
        reach: Bool[Tensor, "B M G"] | None,
        cache: Cache,
        portions: Sequence[Portion],
        after: Ending,
        wanted: Collection[int] = (),
    ) -> Scored:
        """``run``, and after it the final norm, a map, the output matrix and the best token of each node."""
        nodes, outputs = hidden.shape[:2], after.head.panels.matrix.outputs
        normed, logits = torch.empty_like(hidden), hidden.new_empty(*nodes, outputs)
        best = torch.empty(nodes, dtype=torch.long)
        ending = after.into(normed, logits, best)
        _, seen = self.run(hidden, cos, sin, reach, cache, portions, wanted, ending=ending)
        return Scored(normed, logits, best, seen)

    def run_rounds(
        self,
        roots: Sequence[int],
        cache: Cache,
        portions: Sequence[Portion],
        embedded: Embedded,
        after: Ending,
        most: int,
        moves: Sequence[bool],
        ends: Collection[int],
        rule: ExitRule | None = None,
        waiting: Waiting | None = None,
        drawing: Drawing | None = None,
        guessed: GuessedRounds | None = None,
    ) -> Ran:
        """Rounds without drafts: each commits the best token after what the one before committed, or draws one.

        The cache's lengths do not change.

        Args:
            roots: the last committed token of each row.
            most: rounds; there are fewer where a row that moves commits one of ``ends``, in the last of them.
            moves: which rows commit tokens; others stand still.
            rule: by which rows leave a round; None: they run all layers.
            waiting: rows that leave at its one exit defer the layers above, see ``methods.early_exit.free_loop``; None:
                those only get keys and values.
            drawing: how tokens are drawn, of rows that run all layers; None: they are the best.
            guessed: what passes of the only row judge beside a token, so that several tokens, at most ``most`` in all,
                come from one; None: nothing.
        """
        assert drawing is None or rule is waiting is None, "exits choose the best tokens"
        assert guessed is None or (len(roots) == 1 and rule is waiting is None), "guesses are for one row without exits"
        batch, width = len(roots), embedded.embedding.shape[1]
        norm, _kept = (NormNumbers(), []) if embedded.norm is None else norm_numbers(embedded.norm)
        tokens, times, made = (c_int64 * (batch * (1 + most)))(*roots), (c_int64 * most)(), c_int64(0)
        moving, last = (c_uint8 * batch)(*moves), (c_int64 * len(ends))(*ends)
        places, turns, nodes = embedded.positions, embedded.turns or (None, None), (c_int64 * most)()
        deferring = None if waiting is None else waiting.into(nodes)
        luck = None if drawing is None else drawing.into()
        guessing, held = (None, None) if guessed is None else guessed.guesses.into(guessed, most)
        rounds = _Rounds(
            embedded.embedding.data_ptr(), _place(places), 0 if places is None else len(places),
            *map(_place, turns), embedded.factor, norm, None if rule is None else _place(rule.table), most, None,
            ctypes.addressof(moving), ctypes.addressof(last), len(ends),
            ctypes.addressof(tokens), ctypes.addressof(times), ctypes.addressof(made),
            None if deferring is None else ctypes.addressof(deferring),
            None if luck is None else ctypes.addressof(luck),
            None if guessing is None else ctypes.addressof(guessing),
        )  # fmt: skip
        each = 1 if guessed is None else 1 + guessed.guesses.nodes
        rounds.nodes = each if waiting is None else 1 + waiting.most
        rounds.rotary = 0 if turns[0] is None else turns[0].shape[-1]
        rounds.written = [count + (most - 1) * is_moving for count, is_moving in zip(cache.written, moves, strict=True)]
        hidden = embedded.embedding.new_empty(batch, each, width)
        normed, logits = torch.empty_like(hidden), hidden.new_empty(batch, each, after.head.panels.matrix.outputs)
        best = torch.empty(batch, each, dtype=torch.long)
        ending = after.into(normed, logits, best)
        leaving = None
        if rule is not None:
            assert after.norm is not None, "exits need a norm before the output matrix"
            run = len(portions) if waiting is None else waiting.depth
            leaving = _Leaving(rule, after.norm, after.head, moves, len(portions), run, rounds=most)
        exits = None if leaving is None else leaving.numbers
        began = perf_counter_ns()
        self.run(hidden, None, None, None, cache, portions, exits=exits, ending=ending, rounds=rounds)

        def by_round(numbers: Sequence[int]) -> list[list[int]]:
            return [list(numbers[at : at + batch]) for at in range(0, batch * made.value, batch)]

        ran = Ran(by_round(tokens[batch:]), times[: made.value], began)
        if guessing is not None and held is not None:
            found = held.passes(guessing.passes)
            ran = replace(ran, times=times[: guessing.passes], spent=guessing.spent, guessed=found)
        if leaving is None:
            return ran
        depths = [[max(depth, 0) for depth in row] for row in by_round(list(leaving.left))]
        ran = replace(ran, depths=depths, columns=leaving.columns, deciding_ns=leaving.deciding_ns)
        return ran if waiting is None else replace(ran, nodes=nodes[: made.value])

    def run_to_exits(
        self,
        hidden: Float[Tensor, "B 1 D"],
        cos: Float[Tensor, "b 1 1 r"] | None,
        sin: Float[Tensor, "b 1 1 r"] | None,
        cache: Cache,
        portions: Sequence[Portion],
        rule: ExitRule,
        norm: Norm,
        head: KernelLinear,
        rows: Sequence[bool],
        first: int = 0,
        last: int | None = None,
    ) -> Exited:
        """Run layers until rows leave; the layers above only get keys and values of those that do.

        Args:
            portions: all layers that a row can take.
            norm, head: what follows the last layer.
            rows: which are run.
            first: layers that they have run before; ``hidden`` are the states after them.
            last: depth up to which they are run now; None: all.
        """
        run = (len(portions) if last is None else last) - first
        leaving = _Leaving(rule, norm, head, rows, len(portions) - first, run, first)
        result, _ = self.run(hidden, cos, sin, None, cache, portions[first:], exits=leaving.numbers)
        ran = [first + passed if passed > 0 else 0 for passed in leaving.left]
        found = [bool(flag) for flag in leaving.scored], list(leaving.confidence), leaving.columns, leaving.deciding_ns
        return Exited(result, ran, leaving.logits, *found)


class FusedEncoder:
    """The layers of an encoder, whose places see all tokens of their row.

    Args:
        layers: all of the encoder, each of which is ``expressible``.
        scale: of attention scores.
    """

    def __init__(self, layers: Sequence[Described], heads: int, scale: float) -> None:
        self._layers = FusedLayers(layers, heads, heads, scale, 1.0)
        self._portions, self._heads = [Portion(layer) for layer in range(len(layers))], heads

    def __call__(self, hidden: Float[Tensor, "B S D"], lengths: Sequence[int]) -> Float[Tensor, "B S D"]:
        """States after the last layer; of places behind the ``lengths`` of rows any.

        Rows of like lengths are run together, so that little padding is.
        """
        groups = reading_groups(lengths)
        if len(groups) == 1:
            return self._together(hidden, lengths)
        states = torch.zeros_like(hidden)
        for rows in groups:
            own = [lengths[row] for row in rows]
            states[rows, : max(own)] = self._together(hidden[rows, : max(own)], own)
        return states

    def _together(self, hidden: Float[Tensor, "B S D"], lengths: Sequence[int]) -> Float[Tensor, "B S D"]:
        batch, width, size = hidden.shape
        cache = Cache((0,), batch, width, self._heads, size // self._heads, dtype=hidden.dtype, device=hidden.device)
        cache.place = dict.fromkeys(range(len(self._portions)), 0)  # a layer reads what it wrote itself
        seen = torch.arange(width) < torch.tensor(lengths)[:, None]
        reach = seen[:, None].expand(-1, width, -1).contiguous()
        return self._layers.run(hidden, None, None, reach, cache, self._portions)[0]


def of_layers(layers: Sequence[Layer], head_dim: int, longest: int) -> list[Described] | None:
    """The layers of a decoder-only model as the kernels run them; None: they lack something of them.

    Args:
        longest: context, in tokens.
    """
    if head_dim % LANES or not all(_plain(layer, longest) for layer in layers):
        return None
    found = [described(layer) for layer in layers]
    return found if all(layer.expressible for layer in found) else None


def _plain(layer: Layer, longest: int) -> bool:
    """Whether a layer has no experts, and attention sees all tokens by a plain softmax."""
    attention = layer.attention
    sees_all = attention.window is None or attention.window >= longest
    return isinstance(layer.mlp, FeedForward) and sees_all and attention.soft_cap is None and attention.sinks is None


def described(layer: Layer) -> Described:
    """A layer without experts in the kernels' terms."""
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(mlp, FeedForward)
    matrices = {"qkv": attention.qkv, "out": attention.out, "up": mlp.gate_up, "down": mlp.down}
    norms = {
        "before_attention": attention.norm,
        "after_attention": attention.post_norm,
        "before_mlp": mlp.norm,
        "after_mlp": mlp.post_norm,
        "query": attention.query_norm,
        "key": attention.key_norm,
    }
    return Described(matrices, norms, mlp.activation, True, attention.norm_heads, attention.rotary)


def norm_numbers(norm: Norm) -> tuple[NormNumbers, list[Tensor]]:
    """A norm as the kernels are given it, and its numbers, which must be kept as long as that."""
    numbers = norm.wide
    return NormNumbers(numbers[0].data_ptr(), numbers[1].data_ptr() if numbers[1:] else None, norm.eps), numbers


def _activation(activation: Rows) -> int | None:
    """As the kernels number it; None: they have no such activation."""
    return _ACTIVATIONS.get(type(activation).__name__)


def _place(numbers: Tensor | None) -> int | None:
    return None if numbers is None else numbers.data_ptr()


def _panels(product: Linear) -> Packed:
    assert isinstance(product, KernelLinear)
    return product.panels
