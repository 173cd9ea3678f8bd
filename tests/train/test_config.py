"""Every mistake is one line with a remedy, before torch is imported or anything is started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ridethrough.train.__main__ import main
from ridethrough.train.config import ConfigError, TrainConfig, check, parse
from ridethrough.train.corpus import load_corpus
from ridethrough.train.options import parse_args


def test_options_and_defaults(tmp_path: Path) -> None:
    config = parse_args(
        [
            "--preset",
            "small",
            "--steps",
            "7",
            "--compile",
            "--no-restore-rng",
            "--lr",
            "1e-4",
            "--checkpoint-mode",
            "sync",
        ]
    )
    assert (config.preset, config.steps, config.compile, config.restore_rng) == ("small", 7, True, False)
    assert (config.highest_lr(), config.checkpoint_mode) == (1e-4, "sync")
    assert parse_args([]) == TrainConfig()
    assert TrainConfig().checkpoints(tmp_path) == tmp_path / "checkpoints"
    assert TrainConfig().checkpoints(None) == Path.cwd() / "checkpoints"
    assert TrainConfig(checkpoint_dir="/x").checkpoints(tmp_path) == Path("/x")


def test_a_good_config_passes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    check(TrainConfig(checkpoint_dir=str(tmp_path / "a" / "b")), world_size=4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "huge"}, "--preset huge: unknown; one of tiny, small, 1b, llama3.1-8b"),
        ({"data": "/missing"}, "--data /missing: no such file or folder; leave --data out"),
        ({"seq_len": 4096}, "--seq-len 4096: this model reads at most 2048; give less"),
        ({"batch_size": 10_000_000}, "use fewer ranks, less --batch-size or --seq-len, or more --data"),
        ({"global_batch_size": 6}, "--global-batch-size 6 does not divide over 4 ranks; give a multiple of 4"),
        ({"checkpoint_dir": "/proc/nowhere"}, "--checkpoint-dir /proc/nowhere: /proc cannot be written"),
        ({"init_from": "/missing"}, "--init-from /missing: no config.json"),
        ({"steps": 0}, "--steps 0: input should be greater than or equal to 1"),
        ({"dtype": "fp8"}, "--dtype fp8: input should be 'fp32' or 'bf16'"),
        ({"step": 3}, "--step: no such option"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as e:
        check(parse(options), world_size=4)
    assert words in str(e.value)
    assert "\n" not in str(e.value)


def test_a_world_that_the_data_cannot_serve_is_named(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("x" * 3000)
    config = TrainConfig(data=str(tmp_path / "short.txt"), seq_len=10, batch_size=1)
    check(config, world_size=4)
    with pytest.raises(ConfigError, match=r"15 validation samples of 10 tokens, and one step of 64 ranks takes 64"):
        check(config, world_size=64)


def test_token_ids_past_the_vocabulary_are_refused(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        (tmp_path / f"{split}.bin").write_bytes(b"\0" * 20_000)
    splits = {s: [{"file": f"{s}.bin", "tokens": 10_000}] for s in ("train", "validation")}
    (tmp_path / "index.json").write_text(json.dumps({"dtype": "uint16", "vocab_size": 5000, "splits": splits}))
    assert load_corpus(str(tmp_path)).vocab_size == 5000
    with pytest.raises(ConfigError, match="has 5000 token ids, the model 256"):
        check(TrainConfig(data=str(tmp_path)), world_size=1)


@pytest.mark.parametrize("argv", [["--nonsense"], ["--steps"], ["--steps", "many"], ["--preset", "huge"]])
def test_the_command_exits_with_two_and_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(argv)
    assert e.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ridethrough train: ")
    assert err.count("\n") == 1


def test_checking_imports_no_torch() -> None:
    code = (
        "import sys; from ridethrough.train.options import parse_args; from ridethrough.train.config import check; "
        "check(parse_args([]), 2); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd="/tmp").returncode == 0
