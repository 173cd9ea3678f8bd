"""Text and shards as rows of tokens: contents, splits, and one-line errors."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from ridethrough.train.corpus import DataError, Piece, Tokens, load_corpus


def test_a_window_spans_files_and_ends_each_with_the_separator(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").write_bytes(b"de")
    tokens = Tokens([Piece(str(tmp_path / "a"), 0, 3), Piece(str(tmp_path / "b"), 0, 2)], "uint8", 0)
    assert len(tokens) == 7
    assert bytes(tokens.window(0, 7).tolist()) == b"abc\0de\0"
    assert bytes(tokens.window(2, 3).tolist()) == b"c\0d"
    assert bytes(tokens.window(3, 1).tolist()) == b"\0"
    with pytest.raises(IndexError):
        tokens.window(5, 3)
    assert pickle.loads(pickle.dumps(tokens)).window(1, 4).tolist() == tokens.window(1, 4).tolist()


def test_the_standard_library_is_split_by_file() -> None:
    corpus = load_corpus(None)
    train, validation = ({p.path for p in t.pieces} for t in (corpus.train, corpus.validation))
    assert not train & validation
    assert len(corpus.train) > 4_000_000
    share = len(corpus.validation) / (len(corpus.train) + len(corpus.validation))
    assert 0.03 < share < 0.12
    assert all(path.endswith(".py") and "site-packages" not in path for path in train | validation)
    assert load_corpus(None).fingerprint == corpus.fingerprint


def test_one_file_is_split_by_position(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_bytes(bytes(range(1, 201)))
    corpus = load_corpus(str(tmp_path / "book.txt"))
    assert corpus.train.window(0, 190).tolist() == list(range(1, 191))
    assert corpus.validation.window(0, 11).tolist() == [*range(191, 201), 0]


def test_a_folder_holds_out_whole_files(tmp_path: Path) -> None:
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text("x" * 100)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    corpus = load_corpus(str(tmp_path))
    assert (len(corpus.train.pieces), len(corpus.validation.pieces)) == (38, 2)


def test_shards_are_mapped_with_their_dtype(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        np.arange(500, 600, dtype=np.uint16).tofile(tmp_path / f"{split}.bin")
    splits = {s: [{"file": f"{s}.bin", "tokens": 100}] for s in ("train", "validation")}
    (tmp_path / "index.json").write_text(json.dumps({"dtype": "uint16", "vocab_size": 1000, "splits": splits}))
    corpus = load_corpus(str(tmp_path))
    assert corpus.vocab_size == 1000
    assert corpus.train.window(98, 2).tolist() == [598, 599]
    np.arange(3, dtype=np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match=r"train.bin: 6 bytes, 200 expected"):
        load_corpus(str(tmp_path))


def test_each_unusable_path_is_one_line_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "zero.txt").touch()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "train-00000.bin").write_bytes(b"12")
    for path, words in {
        "missing": "no such file or folder",
        "empty": "no text in it",
        "zero.txt": "no text in it",
        "torn": "run `ridethrough data prepare` there again",
    }.items():
        with pytest.raises(DataError) as e:
            load_corpus(str(tmp_path / path))
        assert words in str(e.value)
        assert "\n" not in str(e.value)
