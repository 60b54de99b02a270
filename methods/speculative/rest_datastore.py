"""A searchable corpus of token ids: what follows an n-gram, wherever it occurs.

The suffixes of all documents are in lexicographic order (a suffix array: Manber and Myers 1993), so the occurrences of
an n-gram are one range of it, in the order of what follows. Three files:

    tokens.npy      u32, big-endian: the documents, each closed by SEPARATOR, and a margin of further SEPARATORs
    places.npy      i64: where the suffixes start, in their order; those that start at a SEPARATOR are the last
    datastore.json  version, vocabulary, counts, and size and sha256 of the two others; written last

Both arrays are mapped. Bytes of big-endian ids compare as the ids do, and i64 is what numpy follows without a copy, so
``numpy.searchsorted`` looks an n-gram up in the mapping itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Int64, UInt32

from methods.training.answers import HEADS_CORPUS, AnswerRecipe, known_answers, own_answers
from methods.training.interface import Example, Trainable, TrainingContext, require

VERSION = 1
HEADER, TOKENS, PLACES = "datastore.json", "tokens.npy", "places.npy"
SEPARATOR = 2**32 - 1  # no id of any vocabulary, and larger than all of them
MARGIN = 64  # SEPARATORs after the last document, so that a key or a continuation never leaves the file
LONGEST = MARGIN - 1  # most tokens of an n-gram, and of a continuation

_ID = np.dtype(">u4")
_CLOSING = np.array(SEPARATOR, _ID).tobytes()
_BLOCK = 1 << 20
_MAKE = "python -m bench train method=rest model=MODEL force=true makes a new one"


@dataclass(frozen=True, slots=True)
class Match:
    """The occurrences of the longest known ending of a text.

    Attributes:
        length: tokens of that ending.
        low, high: it occurs at ``places[low:high]``, each time followed by a token.
    """

    length: int
    low: int
    high: int


class Datastore:
    """Documents of token ids and the order of their suffixes.

    Attributes:
        tokens: ids as in the file.
        places: start of each suffix, in lexicographic order of the suffixes.
        vocab_size: ids are below it.
        folder: of the files; None: only in memory.
    """

    def __init__(
        self,
        tokens: UInt32[np.ndarray, "L"],
        places: Int64[np.ndarray, "P"],
        vocab_size: int,
        folder: Path | None = None,
    ) -> None:
        self.tokens, self.places, self.vocab_size, self.folder = tokens, places, vocab_size, folder

    @classmethod
    def build(cls, documents: Iterable[Sequence[int]], vocab_size: int) -> Datastore:
        """Sort the suffixes of some documents.

        Raises:
            ValueError: no tokens at all, an id outside the vocabulary, or no pydivsufsort.
        """
        tokens = joined(documents, vocab_size)
        return cls(tokens, suffixes(tokens), vocab_size)

    @classmethod
    def load(cls, folder: Path, vocab_size: int) -> Datastore:
        """Map the files that ``save`` wrote.

        Args:
            vocab_size: of the model that the ids are meant for.

        Raises:
            ValueError: no datastore, one of another version or vocabulary, or files that are not what was written.
        """
        header = _header(folder)
        if header["vocab_size"] != vocab_size:
            raise ValueError(
                f"The datastore {folder} must have the vocabulary of the model, {vocab_size} ids, got "
                f"{header['vocab_size']}. {_MAKE}."
            )
        for name, written in header["files"].items():
            _check_file(folder / name, written)
        tokens, places = (np.load(folder / name, mmap_mode="r") for name in (TOKENS, PLACES))
        return cls(tokens.view(np.ndarray), places.view(np.ndarray), vocab_size, folder)

    def save(self, folder: Path) -> None:
        """Write the files. The old header is removed first and the new one written last: without it there is no
        datastore.
        """
        folder.mkdir(parents=True, exist_ok=True)
        (folder / HEADER).unlink(missing_ok=True)
        arrays = {TOKENS: self.tokens, PLACES: self.places}
        for name, array in arrays.items():
            _write(folder / name, partial(np.save, arr=array))
        header = {
            "version": VERSION,
            "vocab_size": self.vocab_size,
            "tokens": self.n_tokens,
            "documents": self.n_documents,
            "files": {name: _facts(folder / name) for name in arrays},
        }
        text = json.dumps(header, indent=1) + "\n"
        _write(folder / HEADER, lambda stream: stream.write(text.encode()))

    @property
    def n_tokens(self) -> int:
        """Tokens of all documents, separators not counted."""
        return len(self.places) - self.n_documents

    @property
    def n_documents(self) -> int:
        return int(np.count_nonzero(self.tokens == SEPARATOR)) - MARGIN

    @property
    def mapped_bytes(self) -> int:
        """Size of both arrays."""
        return self.tokens.nbytes + self.places.nbytes

    def resident_bytes(self) -> int | None:
        """Bytes of the mapped files that this process holds in memory; None where the system does not report them."""
        if self.folder is None:
            return self.mapped_bytes
        import psutil

        ours = {str((self.folder / name).resolve()) for name in (TOKENS, PLACES)}
        try:
            return sum(entry.rss for entry in psutil.Process().memory_maps() if entry.path in ours)
        except (AttributeError, psutil.Error):
            return None

    def find(self, text: Sequence[int], longest: int, shortest: int = 1) -> Match | None:
        """The longest ending of a text that occurs in a document with a token after it.

        If an ending occurs, all shorter ones do, so each try halves the range of lengths.

        Args:
            longest, shortest: most and fewest tokens of an ending, 1 <= shortest <= longest <= ``LONGEST``.
        """
        keys = self._windows(longest + 1, "S")[: len(self.places)]
        ending = np.array(text[-longest:], _ID).tobytes()
        match = None
        known, possible = shortest - 1, min(len(text), longest)
        while known < possible:
            tried = (known + possible + 1) // 2
            wanted = ending[-tried * _ID.itemsize :]
            # Suffixes that continue the ending are between the ending itself and the ending at a document's end.
            low, high = keys.searchsorted(np.array([wanted, wanted + _CLOSING]), sorter=self.places).tolist()
            if low < high:
                match, known = Match(tried, low, high), tried
            else:
                possible = tried - 1
        return match

    def continuations(self, match: Match, count: int, most: int) -> UInt32[np.ndarray, "K count"]:
        """Tokens after the places of a match, in lexicographic order; of more than ``most``, evenly spaced ones.

        Returns:
            ``count`` ids each; from a SEPARATOR on they no longer belong to the document.
        """
        span = match.high - match.low
        index: slice | Int64[np.ndarray, "K"] = slice(match.low, match.high)
        if span > most:
            index = match.low + (2 * np.arange(most) + 1) * span // (2 * most)
        found = self._windows(count, "V")[self.places[index] + match.length]
        return found.view(_ID).reshape(len(found), count)

    def _windows(self, count: int, kind: Literal["S", "V"]) -> np.ndarray:
        """At every index the ``count`` ids from there on as one value, comparable text or opaque; a view."""
        size = _ID.itemsize
        return np.ndarray((len(self.tokens) - count + 1,), f"{kind}{size * count}", self.tokens, strides=(size,))


def joined(documents: Iterable[Sequence[int]], vocab_size: int) -> UInt32[np.ndarray, "L"]:
    """The documents one after the other, as in the file; empty ones are left out.

    Raises:
        ValueError: no tokens at all, or an id outside the vocabulary.
    """
    pieces = [np.asarray(document, np.int64) for document in documents if len(document)]
    if not pieces:
        raise ValueError("The corpus of a datastore must have documents, got no token. Name another corpus.")
    ids = np.concatenate(pieces)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise ValueError(
            f"The corpus must have ids below {vocab_size}, the size of the model's vocabulary, got {outside[0]}. "
            "Tokenise it with the tokenizer of the model."
        )
    text = np.full(len(ids) + len(pieces) + MARGIN, SEPARATOR, _ID)
    text[np.arange(len(ids)) + np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])] = ids
    return text


def suffixes(tokens: UInt32[np.ndarray, "L"]) -> Int64[np.ndarray, "P"]:
    """Start of every suffix of ``joined`` documents, the margin left out, in lexicographic order.

    The library sorts bytes and has a suffix for each: ids are replaced by their rank among those that occur, so that
    two bytes an id suffice for 65,535 of them.

    Raises:
        ValueError: pydivsufsort is not installed.
    """
    try:
        from pydivsufsort import divsufsort
    except ImportError as error:
        raise ValueError(
            f"A suffix array needs pydivsufsort, which cannot be imported ({error}). Install it: pip install "
            "pydivsufsort."
        ) from error
    text = tokens[: len(tokens) - MARGIN].astype(np.int64)
    is_token = text != SEPARATOR
    occurs = np.zeros(int(text[is_token].max()) + 2, bool)
    occurs[text[is_token]] = occurs[-1] = True  # the last one stands for the separator
    ranks = np.cumsum(occurs) - 1
    return divsufsort(ranks[np.where(is_token, text, len(occurs) - 1)].astype(np.uint32)).astype(np.int64)


# ------------------------------------------------------------------------------------------------------------- files


def _header(folder: Path) -> dict[str, Any]:
    file = folder / HEADER
    try:
        header = json.loads(file.read_text(encoding="utf-8"))
        version = header["version"]
    except OSError as error:
        raise ValueError(f"{folder} holds no datastore: {HEADER} cannot be read ({error}). {_MAKE}.") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} is damaged ({error!r}); it must be the header of a datastore. {_MAKE}.") from error
    if version != VERSION:
        raise ValueError(f"The datastore {folder} must have version {VERSION}, got {version}. {_MAKE}.")
    files = header.get("files")
    if not isinstance(header.get("vocab_size"), int) or not isinstance(files, dict) or set(files) != {TOKENS, PLACES}:
        raise ValueError(f"{file} is damaged; vocabulary or files are missing from it. {_MAKE}.")
    return dict(header)


def _check_file(path: Path, written: Any) -> None:
    try:
        same = _facts(path) == written
    except OSError as error:
        raise ValueError(f"{path} belongs to the datastore and cannot be read ({error}). {_MAKE}.") from error
    if not same:
        raise ValueError(f"{path} is damaged: size or sha256 are not those in {HEADER}. Copy it again, or {_MAKE}.")


def _facts(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _write(path: Path, fill: Callable[[Any], Any]) -> None:
    draft = path.with_name(f".{path.name}.tmp")
    with draft.open("wb") as stream:
        fill(stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(draft, path)


# ---------------------------------------------------------------------------------------------------------- training


@dataclass
class RestDatastore(Trainable):
    """Makes the datastore of answers to the prompts of a corpus.

    Args:
        documents: own: the target's answers, as draft heads learn from; corpus: those of the corpus; auto: the target's
            where they come with the project, else those of the corpus.
        prompts: each document is a prompt and its answer; else the answer alone.
        most: tokens of all documents, 12 bytes each; the last document that fits ends the datastore. 8 million are
            96 MB.
        answers: of the target, with ``documents`` own or auto.

    Raises:
        ValueError: a number out of range.
    """

    description = "a datastore of token ids with a suffix array"
    duration = "seconds per million tokens, nearly all of them the tokenizer's"
    corpus = HEADS_CORPUS

    documents: Literal["auto", "own", "corpus"] = "auto"
    prompts: bool = False
    most: int = 8_000_000
    answers: AnswerRecipe = field(default_factory=AnswerRecipe)

    def __post_init__(self) -> None:
        require("at least 1", most=self.most)

    @property
    def needs_answers(self) -> bool:
        """See ``Trainable``."""
        return self.documents == "corpus"

    def fit(self, context: TrainingContext) -> dict[str, Any]:
        """See ``Trainable``. An existing datastore of the same tokens is kept.

        Raises:
            ValueError: there are no answers.
        """
        vocab_size = context.target.vocab_size
        rows, source = self._rows(context)
        tokens = joined(_first(self._documents(context, rows), self.most), vocab_size)
        store = _kept(context.output, tokens, vocab_size)
        if store is None:
            context.report_progress("suffix array", 0, 1)
            store = Datastore(tokens, suffixes(tokens), vocab_size)
            store.save(context.output)
            context.report_progress("suffix array", 1, 1)
        facts = {"tokens": store.n_tokens, "documents": store.n_documents, "bytes": store.mapped_bytes}
        return {**facts, "answers": source}

    def _rows(self, context: TrainingContext) -> tuple[Sequence[Example], Literal["own", "corpus"]]:
        """Prompts and answers, and whose answers they are."""
        if self.documents == "own":
            return own_answers(context, self.answers).rows, "own"
        known = known_answers(context, self.answers) if self.documents == "auto" else []
        return (known, "own") if known else (context.examples, "corpus")

    def _documents(self, context: TrainingContext, rows: Sequence[Example]) -> Iterable[Sequence[int]]:
        for done, example in enumerate(rows, start=1):
            if example.answer:
                yield example.prompt + example.answer if self.prompts else example.answer
            context.report_progress("tokens", done, len(rows))


def _first(documents: Iterable[Sequence[int]], most: int) -> Iterator[Sequence[int]]:
    """As many as have ``most`` tokens together; of one that alone has more, its beginning."""
    left = most
    for document in documents:
        if len(document) > left:
            if left == most:
                yield document[:left]
            return
        left -= len(document)
        yield document


def _kept(folder: Path, tokens: UInt32[np.ndarray, "L"], vocab_size: int) -> Datastore | None:
    try:
        found = Datastore.load(folder, vocab_size)
    except ValueError:
        return None
    return found if np.array_equal(found.tokens, tokens) else None
