"""Make memory-mapped token shards once, before training: `ridethrough data prepare --out FOLDER ...`.

    --dataset allenai/c4 --subset en --samples 100000 --tokenizer meta-llama/Llama-3.1-8B     # needs the extra hf
    --text FOLDER --tokenizer bytes                                                          # needs nothing

A folder holds `train-00000.bin`, ..., `validation-00000.bin`, ... (token ids, little-endian) and `index.json`, which is
written last: a folder without it was not finished, and `corpus.py` refuses it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import typer

from ridethrough.train.corpus import INDEX, SPLITS, text_files
from ridethrough.train.presets import BYTE_VOCAB

_TELL_EVERY_S = 2.0
_EXTRA = "needs the extra hf: pip install 'ridethrough[hf]'"


class PrepareError(ValueError):
    """The shards cannot be made. The message is one line and says what to do; the command line exits with 2."""


@dataclass(frozen=True)
class Tokenizer:
    """`encode` gives the ids of one document; `end` is put after it."""

    name: str
    encode: Callable[[str], list[int]]
    end: int
    vocab_size: int


def bytes_tokenizer() -> Tokenizer:
    """A byte is a token and byte 0 ends a document: what the presets `tiny` and `small` read."""
    return Tokenizer("bytes", lambda text: list(text.encode()), 0, BYTE_VOCAB)


def hugging_face_tokenizer(name: str) -> Tokenizer:
    """A tokenizer by its name on the hub or its folder. PrepareError if it or the extra is not there."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise PrepareError(f"--tokenizer {name} {_EXTRA}; or use --tokenizer bytes") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as e:
        reason = str(e).strip().splitlines()[0]
        raise PrepareError(
            f"--tokenizer {name}: {reason}; give a folder or a name that this machine can reach"
        ) from None
    if tokenizer.eos_token_id is None:
        raise PrepareError(f"--tokenizer {name}: it has no end-of-text token; choose another")
    return Tokenizer(
        name,
        lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
        tokenizer.eos_token_id,
        len(tokenizer),
    )


def text_documents(path: str) -> Iterator[str]:
    """One document per text file below `path`, or the file itself, read as UTF-8 with bad bytes replaced."""
    root = Path(path)
    files = [root] if root.is_file() else text_files(root)
    if not files:
        raise PrepareError(f"--text {path}: no text in it; give a text file or a folder of such")
    for file in files:
        yield file.read_text(encoding="utf-8", errors="replace")


def hugging_face_documents(name: str, subset: str | None, split: str, column: str) -> Iterator[str]:
    """The rows of a data set of the hub or of a local folder, streamed. PrepareError if it cannot be read."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise PrepareError(f"--dataset {name} {_EXTRA}; or use --text FOLDER") from None
    try:
        for row in load_dataset(name, subset, split=split, streaming=True):
            if column not in row:
                raise PrepareError(f"--column {column}: not in {name}; it has {', '.join(row)}")
            yield row[column]
    except PrepareError:
        raise
    except Exception as e:  # the library raises its own, HTTP's and the file system's
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise PrepareError(f"--dataset {name}: {reason}; check the name and the network, or use --text FOLDER") from e


def prepare(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    out: Path,
    *,
    samples: int | None = None,
    validation_every: int = 100,
    shard_tokens: int = 100_000_000,
    source: str = "",
) -> dict[str, Any]:
    """Write shards and the index; the index is returned. Every `validation_every`-th document is held out.

    Raises PrepareError if `out` is not empty, or if there are too few documents for both splits. What was written
    before an error stays for inspection, without an index.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PrepareError(f"--out {out}: not an empty folder; nothing was overwritten, give another or remove it")
    out.mkdir(parents=True, exist_ok=True)
    dtype = next(t for t in ("uint8", "uint16", "uint32") if tokenizer.vocab_size <= np.iinfo(t).max + 1)
    writers = {split: _ShardWriter(out, split, dtype, shard_tokens) for split in SPLITS}
    count = 0
    try:
        for document in islice(documents, samples):
            split = "validation" if count % validation_every == validation_every - 1 else "train"
            writers[split].add([*tokenizer.encode(document), tokenizer.end])
            count += 1
    finally:
        for writer in writers.values():
            writer.close()
    if not all(writer.shards for writer in writers.values()):
        raise PrepareError(
            f"{count} documents are too few to hold out every {validation_every}th; lower --validation-every"
        )
    index = {
        "schema": 1,
        "source": source,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "end": tokenizer.end,
        "dtype": dtype,
        "documents": count,
        "splits": {split: writer.shards for split, writer in writers.items()},
    }
    unfinished = out / f"{INDEX}.tmp"
    with open(unfinished, "w") as f:
        json.dump(index, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    os.replace(unfinished, out / INDEX)
    return index


class _ShardWriter:
    """Appends documents to numbered files of at least shard_tokens each (the last may be shorter)."""

    def __init__(self, out: Path, split: str, dtype: str, shard_tokens: int) -> None:
        self.out, self.split, self.dtype, self.shard_tokens = out, split, dtype, shard_tokens
        self.shards: list[dict[str, Any]] = []
        self._file: IO[bytes] | None = None

    def add(self, ids: list[int]) -> None:
        if self._file is None:
            name = f"{self.split}-{len(self.shards):05d}.bin"
            self._file = open(self.out / name, "wb")  # noqa: SIM115  (closed when full)
            self.shards.append({"file": name, "tokens": 0})
        self._file.write(np.asarray(ids, dtype=self.dtype).tobytes())
        self.shards[-1]["tokens"] += len(ids)
        if self.shards[-1]["tokens"] >= self.shard_tokens:
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def _told(documents: Iterable[str]) -> Iterator[str]:
    """The same documents; how many there were so far goes to standard error every few seconds."""
    told_s = time.monotonic()
    for count, document in enumerate(documents):
        if time.monotonic() - told_s > _TELL_EVERY_S:
            told_s = time.monotonic()
            typer.echo(f"{count:,} documents", err=True)
        yield document


def command(
    out: str = typer.Option(..., "--out", help="empty or new folder for the shards"),
    text: str | None = typer.Option(None, "--text", help="text file or folder of text"),
    dataset: str | None = typer.Option(None, "--dataset", help="Hugging Face data set, for example allenai/c4"),
    subset: str | None = typer.Option(None, "--subset", help="its configuration, for example en"),
    split: str = typer.Option("train", "--split", help="its split"),
    column: str = typer.Option("text", "--column", help="its column of text"),
    tokenizer: str = typer.Option("bytes", "--tokenizer", help="`bytes`, or a Hugging Face tokenizer's name or folder"),
    samples: int = typer.Option(100_000, "--samples", min=2, help="documents to take at most"),
    validation_every: int = typer.Option(100, "--validation-every", min=2, help="hold out each so many-th document"),
    shard_tokens: int = typer.Option(100_000_000, "--shard-tokens", min=1, help="tokens per file"),
) -> None:
    """Turn text or a Hugging Face data set into token shards that `ridethrough train --data FOLDER` maps.

    Examples:

        ridethrough data prepare --text books/ --out tokens/
        ridethrough data prepare --dataset allenai/c4 --subset en --tokenizer meta-llama/Llama-3.1-8B --out c4/
    """
    try:
        if (text is None) == (dataset is None):
            raise PrepareError("give either --text or --dataset")
        if text is not None and not Path(text).exists():
            raise PrepareError(f"--text {text}: no such file or folder")
        chosen = bytes_tokenizer() if tokenizer == "bytes" else hugging_face_tokenizer(tokenizer)
        documents = text_documents(text) if text else hugging_face_documents(str(dataset), subset, split, column)
        index = prepare(
            _told(documents),
            chosen,
            Path(out),
            samples=samples,
            validation_every=validation_every,
            shard_tokens=shard_tokens,
            source=str(text or dataset),
        )
    except (PrepareError, OSError) as e:
        typer.echo(f"ridethrough data prepare: {e}", err=True)
        raise typer.Exit(2) from None
    tokens = {name: sum(shard["tokens"] for shard in shards) for name, shards in index["splits"].items()}
    counts = ", ".join(f"{count} {name} tokens" for name, count in tokens.items())
    typer.echo(f"{out}: {index['documents']} documents, {counts}")
