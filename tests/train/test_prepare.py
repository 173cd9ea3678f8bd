"""Shards made here and read back by the corpus; one-line errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ridethrough.train import prepare as room
from ridethrough.train.corpus import DataError, load_corpus
from ridethrough.train.prepare import PrepareError, bytes_tokenizer, prepare


@pytest.fixture
def invoke() -> object:
    app = typer.Typer()
    app.command()(room.command)
    return lambda *argv: CliRunner().invoke(app, [str(a) for a in argv])


def test_documents_become_shards_that_read_back(tmp_path: Path) -> None:
    documents = [f"document {i}" for i in range(10)]
    index = prepare(documents, bytes_tokenizer(), tmp_path / "out", validation_every=5, shard_tokens=40)
    assert index["documents"] == 10
    assert [s["tokens"] for s in index["splits"]["train"]] == [44, 44]
    corpus = load_corpus(str(tmp_path / "out"))
    whole = bytes(corpus.train.window(0, len(corpus.train)).tolist())
    assert whole == b"".join(d.encode() + b"\0" for i, d in enumerate(documents) if i not in (4, 9))
    assert bytes(corpus.validation.window(0, len(corpus.validation)).tolist()) == b"document 4\0document 9\0"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(PrepareError, match="nothing was overwritten"):
        prepare(["a", "b"], bytes_tokenizer(), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_a_preparation_that_failed_is_not_taken_for_data(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match="1 documents are too few"):
        prepare(["a"], bytes_tokenizer(), tmp_path / "out", validation_every=2)
    with pytest.raises(DataError, match="again"):
        load_corpus(str(tmp_path / "out"))


def test_text_from_the_command_line(tmp_path: Path, invoke: object) -> None:
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text("hello")
    result = invoke("--text", tmp_path, "--out", tmp_path / "out", "--validation-every", 4)  # type: ignore[operator]
    assert result.exit_code == 0
    assert "4 documents, 18 train tokens, 6 validation tokens" in result.output


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--out", "x"], "give either --text or --dataset"),
        (["--out", "x", "--text", "/missing"], "--text /missing: no such file or folder"),
    ],
)
def test_bad_options(argv: list[str], words: str, invoke: object) -> None:
    result = invoke(*argv)  # type: ignore[operator]
    assert result.exit_code == 2
    assert result.stderr.strip().endswith(words)
    assert result.stderr.count("\n") == 1


def test_the_extra_is_named_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        PrepareError, match=r"needs the extra hf: pip install 'ridethrough\[hf\]'; or use --text FOLDER"
    ):
        next(room.hugging_face_documents("allenai/c4", "en", "train", "text"))
    with pytest.raises(PrepareError, match=r"needs the extra hf.*or use --tokenizer bytes"):
        room.hugging_face_tokenizer("meta-llama/Llama-3.1-8B")


def test_a_hugging_face_data_set_and_tokenizer(tmp_path: Path, invoke: object) -> None:
    """Both local, since tests reach no hub; the code path is the one that the hub's take."""
    pytest.importorskip("datasets", reason="needs the extra hf: pip install 'ridethrough[hf]'")
    pytest.importorskip("transformers", reason="needs the extra hf: pip install 'ridethrough[hf]'")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<end>": 0, "<unknown>": 1, "red": 2, "green": 3, "blue": 4}
    model = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>", unk_token="<unknown>").save_pretrained(
        tmp_path / "tokenizer"
    )
    (tmp_path / "set").mkdir()
    rows = [{"text": "red blue", "url": "a"}, {"text": "green pink", "url": "b"}, {"text": "never taken", "url": "c"}]
    (tmp_path / "set" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["--dataset", tmp_path / "set", "--tokenizer", tmp_path / "tokenizer", "--out", tmp_path / "out"]
    result = invoke(*options, "--samples", 2, "--validation-every", 2)  # type: ignore[operator]
    assert result.exit_code == 0, result.output
    corpus = load_corpus(str(tmp_path / "out"))
    assert corpus.vocab_size == 5
    assert corpus.train.window(0, 3).tolist() == [2, 4, 0]
    assert corpus.validation.window(0, 3).tolist() == [3, 1, 0]
    result = invoke(*options[:-1], tmp_path / "other", "--column", "body")  # type: ignore[operator]
    assert result.exit_code == 2
    assert "--column body: not in" in result.stderr
