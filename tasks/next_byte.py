"""Bytes: the next byte of a text, in any file or folder; the end of the text is held out."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from tasks.base import Batch, Links, Predictor, Preset, Surprisal, Task
from tasks.bounds import MAX_SEQ_LEN, TextChangedError, check_range, option
from tasks.corpus import Corpus, open_corpus
from tasks.lazy import Tensor, torch
from tasks.ngrams import NGram
from tasks.shortcuts import predict_by_context

N_BYTES = 256
BYTE = 0
CONTEXT = 5
"""Bytes of the longest contexts."""
N, COUNTED = 5, 2**24
"""Of the n-grams whose bits are known, and the training bytes in which they are counted."""
NGRAM = f"interpolated {N}-gram"
SHOWN = {ord("\t"): "⇥", ord("\n"): "⏎", ord("\r"): "␍", ord(" "): "␣"}


@dataclass(frozen=True, kw_only=True)
class Bytes(Task):
    r"""Predict each next byte of a text.

    The text is the bytes of a file, or of a folder's text files in the order of their names with
    byte 0 between two (`tasks.corpus` says what is left out). Its last test_share is the split
    "test", the same share of what comes before it is "validation", and the rest is "train"; no row
    crosses a border. A row is T + 1 bytes from an offset that is uniform over its split: the first
    T are the inputs, the last T their targets. Bytes are not decoded, so a text need not be UTF-8.

    With T = 8 and a text of 96 bytes, row 0 of seed 0 is

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "cat.txt")
    ...     _ = path.write_text("the cat sat on the mat. " * 4)
    ...     batch = Bytes(path=str(path), seq_len=8, test_share=0.25).batch(size=1)
    ...     offset = batch.links["offset"].tolist()
    >>> bytes(batch.inputs[0].tolist()), bytes(batch.targets[0].tolist()), offset
    (b'the mat.', b'he mat. ', [[39]])

    Scored: every position. Chance: 1/256.

    Links, int64: offset [b 1], where the row begins in the text; query_pos [b t], every position.

    The option `digest` is filled in from the text and is part of a run's configuration: a run whose
    text has changed is refused. In a mixture of texts, digests are not compared.

    Raises:
        ValueError: for an option out of its bounds; for a path that has no text, too short a
            text, or one that the digest is not of, now or when rows are drawn.

    Source: rows at random offsets and the last tenth held out, as in char-level Shakespeare
    (Karpathy, nanoGPT).

    Departs: rows are drawn with replacement, and from bytes, not from the characters in use.
    """

    name: ClassVar[str] = "bytes"
    role_names: ClassVar[tuple[str, ...]] = ("byte", "padding")
    unit: ClassVar[str] = "byte"
    separates: ClassVar[str] = "perplexity on real text"
    grows: ClassVar[tuple[str, ...]] = ()
    why_fixed: ClassVar[str] = (
        "its answers are uncertain, so no accuracy tells when a length is learned"
    )
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset({"seq_len": 64}, "LOG.md, small presets"),
        "published": Preset(
            {"seq_len": 256, "test_share": 0.1},
            "Karpathy (nanoGPT), char-level Shakespeare; give the text as path",
        ),
    }
    stochastic: ClassVar[bool] = True

    seq_len: int = option(256, "bytes per row")
    vocab_size: int = field(init=False, default=N_BYTES)
    path: str | None = option(
        None, "a text file, or a folder of them", "the standard library's own sources"
    )
    test_share: float = option(0.1, "share of the text that is held out at its end")
    digest: str | None = option(None, "digest of the text that a run was trained on", "filled in")

    def validate(self) -> None:
        """Validate the options, make path a full path, and set digest to that of the text."""
        check_range("seq_len", self.seq_len, 1, MAX_SEQ_LEN)
        check_range("test_share", self.test_share, 0.001, 0.9)
        corpus = open_corpus(self.path)
        for split in self.splits:
            begin, end = self.find_span(corpus, split)
            if end - begin <= self.seq_len:
                raise ValueError(
                    f"path={self.path!r}: too short, {end - begin} of its {corpus.size} bytes are "
                    f"{split}, must be ≥ seq_len + 1 = {self.seq_len + 1}"
                )
        if self.digest not in (None, corpus.digest):
            raise TextChangedError(
                f"digest={self.digest}: path={self.path!r} has changed since the digest was taken"
            )
        object.__setattr__(self, "digest", corpus.digest)
        if self.path is not None:
            object.__setattr__(self, "path", corpus.root)

    @property
    def corpus(self) -> Corpus:
        """The text that rows are taken from.

        Raises:
            TextChangedError: if it has changed since the task was made, or is gone.
        """
        try:
            corpus = open_corpus(self.path)
        except ValueError as error:
            raise TextChangedError(str(error)) from error
        if corpus.digest != self.digest:
            raise TextChangedError(
                f"digest={self.digest}: path={self.path!r} has changed since the digest was taken"
            )
        return corpus

    def replace(self, **options: Any) -> "Task":
        """Return the task with other values of some options; another path has its own digest."""
        return super().replace(**({"digest": None} if "path" in options else {}) | options)

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`."""
        corpus = self.corpus
        begin, end = self.find_span(corpus, split)
        # 63 bits, as texts may be longer than the 2³¹ bytes that half a word can choose from.
        word = self.draw_words(split, numbers, seed, 1) & (2**63 - 1)
        offset = word % (end - begin - self.seq_len) + begin
        row = _read(corpus, offset, self.seq_len + 1)
        inputs = row[:, :-1].contiguous()

        def links() -> dict[str, Tensor]:
            position = torch.arange(self.seq_len, device=numbers.device)
            return {"offset": offset, "query_pos": position.expand_as(inputs)}

        return Batch(inputs, row[:, 1:], torch.full_like(inputs, BYTE), Links(links))

    def find_span(self, corpus: Corpus, split: str) -> tuple[int, int]:
        """Find where a split begins and ends."""
        test = corpus.size - int(corpus.size * self.test_share)
        validation = test - int(test * self.test_share)
        spans = {
            "train": (0, validation),
            "validation": (validation, test),
            "test": (test, corpus.size),
        }
        return spans[split]

    def oracle(self, batch: Batch) -> Tensor:
        """Return what the text has there, read at the offset in `links`.

        It is always right, as no model can be: rows do not determine the next byte, and the
        entropy of a text is unknown. Compare a model with the tables of `shortcuts` instead.
        """
        return _read(self.corpus, batch.links["offset"] + 1, batch.inputs.shape[1])

    @property
    def chance(self) -> float:
        """The accuracy of a guess among all bytes."""
        return 1 / N_BYTES

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without reading far.

        They answer with what was most frequent in 2¹⁹ training bytes: "unigram" overall, "bigram"
        after the same byte, "five bytes" after the same five, else after fewer. On the standard
        library about .28, .36 and .63. Positions say nothing, as offsets are uniform.
        """
        return {
            "unigram": predict_by_context(self, 0),
            "bigram": predict_by_context(self, 1),
            "five bytes": predict_by_context(self, CONTEXT),
        }

    def surprisals(self) -> dict[str, Surprisal]:
        """Return what the last four bytes tell: 2.1 bits a byte on the standard library."""
        return {NGRAM: lambda batch: _count_ngrams(self).measure_bits(batch)}

    def format_token(self, token: int) -> str:
        """Return the ASCII character, a sign for white space, or the byte in hexadecimal."""
        shown = chr(token) if 0x20 < token < 0x7F else f"x{token:02x}"
        return SHOWN.get(token, shown)


@lru_cache(maxsize=2)
def _count_ngrams(task: Bytes) -> NGram:
    """Count the n-grams of the training bytes, of the first `COUNTED` if there are more."""
    corpus = task.corpus
    begin, end = task.find_span(corpus, "train")
    text = corpus.read(np.array([begin]), min(end - begin, COUNTED))
    return NGram.count(torch.from_numpy(text[0]).long(), N, N_BYTES)


def _read(corpus: Corpus, offset: Tensor, length: int) -> Tensor:
    """Return the bytes from offset [b 1] on, int64 [b t]."""
    rows = corpus.read(offset[:, 0].cpu().numpy(), length)
    return torch.from_numpy(rows).to(offset.device).long()
