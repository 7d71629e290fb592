"""Word-level LSTM language models on a corpus of whitespace-separated tokens such as WikiText-2."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from thinwire_lab.inputs import reading
from thinwire_lab.problems.base import Options, Problem, held_out, made, spaced
from thinwire_lab.problems.text import Windows

EXPECTED = "a directory with train.txt and valid.txt, or test.txt, of whitespace-separated tokens in UTF-8"
LENGTH, WIDTH, LAYERS = 35, 128, 1
BATCH, HELD_OUT = 8, 96
UNKNOWN, END = "<unk>", "<eos>"


class WordLSTM(nn.Module):
    """Word ids (batch, time) int64 to logits of the word after each, (batch, time, words).

    No state is carried from one window to the next. `sparse`: whether the embedding's gradient is sparse.
    """

    def __init__(self, words: int, *, sparse: bool) -> None:
        """An embedding uniform within ±0.1, as is usual for such models."""
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH, sparse=sparse)
        self.lstm = nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True)
        self.head = nn.Linear(WIDTH, words)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)

    def forward(self, words: Tensor) -> Tensor:
        """See the class."""
        return self.head(self.lstm(self.embedding(words))[0])


def make(options: Options) -> Problem:
    """The problem with one weight for embedding and output layer."""
    return _make(options, "lstm", "word-level LSTM", _tied)


def make_sparse(options: Options) -> Problem:
    """The problem with separate weights; the embedding's gradients are row-sparse."""
    return _make(options, "lstm_sparse", "word-level LSTM with a sparse embedding", partial(WordLSTM, sparse=True))


def _tied(words: int) -> WordLSTM:
    model = WordLSTM(words, sparse=False)
    model.head.weight = model.embedding.weight
    return model


def _make(options: Options, name: str, title: str, network: Callable[[int], WordLSTM]) -> Problem:
    """The problem on the directory `options.data`; the vocabulary is that of its train.txt."""
    folder = options.path(EXPECTED)
    choices = [folder / name for name in ("valid.txt", "test.txt")]
    rest_path = next(filter(Path.is_file, choices), choices[0])
    words, rest_words = _words(folder / "train.txt"), _words(rest_path)
    ids = {word: index for index, word in enumerate(dict.fromkeys((UNKNOWN, END, *words)))}
    train = Windows(tokens=_encode(words, ids), length=LENGTH, source=str(folder / "train.txt"))
    rest = Windows(tokens=_encode(rest_words, ids), length=LENGTH, source=str(rest_path))
    return made(
        name,
        title,
        f"{len(words):,} tokens of {folder.name}, {len(ids):,} distinct",
        options=options,
        network=lambda: network(len(ids)),
        draw=partial(train.draw, count=BATCH),
        rest=held_out(spaced(len(rest), HELD_OUT), BATCH, rest.take),
    )


def _words(path: Path) -> list[str]:
    with reading(path, EXPECTED):
        text = path.read_text(encoding="utf-8")
    return (text.removesuffix("\n") + "\n").replace("\n", f" {END} ").split()


def _encode(words: list[str], ids: dict[str, int]) -> NDArray[np.int32]:
    return np.fromiter((ids.get(word, ids[UNKNOWN]) for word in words), np.int32, len(words))
