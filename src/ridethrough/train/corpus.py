"""Text files and token shards as one long row of tokens per split, memory-mapped.

Three kinds of source, told apart by what lies at the path:
- no path: the Python standard library's own sources, which every machine has (found through `sysconfig`);
- a text file or a folder of text files: a byte is a token, byte 0 ends each file, and the files themselves are mapped;
- a folder with `index.json`, written by `ridethrough data prepare`: shards of uint16 or uint32 token ids.

No torch here: the command line checks the data before any rank starts.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ridethrough.train.presets import BYTE_VOCAB

INDEX = "index.json"
SPLITS = ("train", "validation")
_VALIDATION_SHARE = 0.05
_TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".json", ".jsonl", ".csv", ".text"})
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "ensurepip"})


class DataError(ValueError):
    """The data cannot serve the job. The message is one line and says what to do."""


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of one file, counted in tokens of the file's dtype."""

    path: str
    start: int
    stop: int


class Tokens:
    """A read-only row of token ids that spans many files. Cheap to pickle: it carries paths, not contents.

    `separator` is put after each piece (text); None for shards, which hold their own ends of documents.
    """

    def __init__(self, pieces: list[Piece], dtype: str, separator: int | None) -> None:
        self.pieces, self.dtype, self.separator = pieces, dtype, separator
        extra = 0 if separator is None else 1
        self._starts = [0, *accumulate(p.stop - p.start + extra for p in pieces)]
        self._maps: dict[int, npt.NDArray[Any]] = {}

    def __len__(self) -> int:
        return self._starts[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}

    def window(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """Tokens [start, start + length) as int64; IndexError past the end, DataError if a file has shrunk."""
        if start < 0 or start + length > len(self):
            raise IndexError(f"window [{start}, {start + length}) of {len(self)} tokens")
        out = np.empty(length, dtype=np.int64)
        done, part = 0, bisect_right(self._starts, start) - 1
        while done < length:
            offset = start + done - self._starts[part]
            take = min(length - done, self._starts[part + 1] - self._starts[part] - offset)
            values = self._open(part)[offset : offset + take]
            out[done : done + len(values)] = values
            if len(values) < take and self.separator is not None:
                out[done + len(values)] = self.separator
            done, part = done + take, part + 1
        return out

    def _open(self, part: int) -> npt.NDArray[Any]:
        if part not in self._maps:
            piece = self.pieces[part]
            whole = np.memmap(piece.path, dtype=self.dtype, mode="r") if piece.stop else np.empty(0, self.dtype)
            if len(whole) < piece.stop:
                raise DataError(f"{piece.path} has {len(whole)} tokens, {piece.stop} expected: it changed while in use")
            self._maps[part] = whole[piece.start : piece.stop]
        return self._maps[part]


@dataclass(frozen=True)
class Corpus:
    """Both splits of one source. `fingerprint` is equal on two hosts only if names and sizes of all files are."""

    train: Tokens
    validation: Tokens
    vocab_size: int
    name: str
    fingerprint: str


def load_corpus(data: str | None) -> Corpus:
    """Open the source at `data` (None: the standard library). Reads names and sizes only, no contents.

    Raises DataError if the path is missing, holds no text or is a half-written folder of shards.
    """
    if data is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        return _text_corpus(root, text_files(root, frozenset({".py"})), "the Python standard library")
    path = Path(data)
    if not data or not path.exists():
        raise DataError(
            f"--data {data or repr(data)}: no such file or folder; "
            "leave --data out to train on the Python standard library"
        )
    if (path / INDEX).is_file():
        return _shard_corpus(path)
    if path.is_dir() and any(path.glob("*.bin")):
        raise DataError(f"--data {data}: token shards without {INDEX}; run `ridethrough data prepare` there again")
    files = [path] if path.is_file() else text_files(path)
    return _text_corpus(path if path.is_dir() else path.parent, files, str(path))


def text_files(root: Path, suffixes: frozenset[str] = _TEXT_SUFFIXES) -> list[Path]:
    """Files under `root` with one of the suffixes, in order, without hidden folders, tests and packages."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in _SKIPPED_FOLDERS and not f.startswith((".", "config-")))
        found += [Path(folder, f) for f in files if os.path.splitext(f)[1] in suffixes]
    return sorted(found)


def _text_corpus(root: Path, files: list[Path], name: str) -> Corpus:
    sizes = {f.relative_to(root).as_posix(): f.stat().st_size for f in files}
    sizes = {f: size for f, size in sizes.items() if size}
    if not sizes:
        kinds = ", ".join(sorted(_TEXT_SUFFIXES))
        raise DataError(f"--data {name}: no text in it; give a non-empty text file or a folder of such ({kinds})")
    if len(sizes) == 1:
        ((only, size),) = sizes.items()
        cut = size - max(1, int(size * _VALIDATION_SHARE))
        train, validation = [Piece(str(root / only), 0, cut)], [Piece(str(root / only), cut, size)]
    else:
        held_out = _held_out(sizes)
        train = [Piece(str(root / f), 0, n) for f, n in sizes.items() if f not in held_out]
        validation = [Piece(str(root / f), 0, n) for f, n in sizes.items() if f in held_out]
    digest = hashlib.sha256(json.dumps(sorted(sizes.items())).encode()).hexdigest()[:16]
    return Corpus(Tokens(train, "uint8", 0), Tokens(validation, "uint8", 0), BYTE_VOCAB, name, digest)


def _held_out(sizes: dict[str, int]) -> set[str]:
    """Files for validation: about 5 % of the bytes, by a hash of the name, so that a new file moves few others."""
    total, taken, chosen = sum(sizes.values()), 0, set()
    for name in sorted(sizes, key=lambda n: hashlib.sha256(n.encode()).digest()):
        if taken >= total * _VALIDATION_SHARE:
            break
        if taken + sizes[name] <= total * 2 * _VALIDATION_SHARE:
            chosen.add(name)
            taken += sizes[name]
    return chosen or {min(sizes, key=lambda n: (sizes[n], n))}


def _shard_corpus(folder: Path) -> Corpus:
    try:
        index = json.loads((folder / INDEX).read_text())
        dtype, vocab_size = str(index["dtype"]), int(index["vocab_size"])
        listed = {s: [(str(e["file"]), int(e["tokens"])) for e in index["splits"][s]] for s in SPLITS}
    except (ValueError, KeyError, TypeError) as e:
        raise DataError(
            f"{folder / INDEX} is not an index of token shards ({e!r}); run `ridethrough data prepare` again"
        ) from None
    for file, tokens in listed["train"] + listed["validation"]:
        size, want = (
            (folder / file).stat().st_size if (folder / file).exists() else -1,
            tokens * np.dtype(dtype).itemsize,
        )
        if size != want:
            raise DataError(f"{folder / file}: {size} bytes, {want} expected; run `ridethrough data prepare` again")
    split = {s: Tokens([Piece(str(folder / f), 0, n) for f, n in listed[s]], dtype, None) for s in SPLITS}
    digest = hashlib.sha256(json.dumps([dtype, listed], sort_keys=True).encode()).hexdigest()[:16]
    return Corpus(split["train"], split["validation"], vocab_size, str(folder), digest)
