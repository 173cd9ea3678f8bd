"""Options of the reference job and every check that can be made before a process starts.

No torch here: the command line calls `check` in the launcher, so that a mistake costs one line and no start-up.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ridethrough.train.corpus import Corpus, DataError, load_corpus
from ridethrough.train.hf_config import WeightsError, check_weights, read_config
from ridethrough.train.presets import LEARNING_RATES, PRESETS, ModelConfig


class ConfigError(ValueError):
    """An option cannot be used. The message is one line and says what to do; the command line exits with 2."""


class TrainConfig(BaseModel):
    """One run of the reference job. Sizes are counts; `batch_size` is per rank.

    The global batch, samples per optimizer step over all ranks, is batch_size * world size. With `global_batch_size`
    it is fixed instead and each rank takes its part, so that a job may change its world size and see the same samples.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    preset: str = Field("tiny", description="model shape: " + ", ".join(PRESETS))
    num_layers: int | None = Field(None, ge=1, description="blocks, instead of the preset's")
    init_from: str | None = Field(None, description="folder of a Hugging Face Llama: shapes and first weights")
    data: str | None = Field(
        None, description="text file, folder of text, or folder of token shards; default: the standard library"
    )
    seq_len: int = Field(128, ge=1, description="tokens per sample")
    batch_size: int = Field(2, ge=1, description="samples per rank and step")
    global_batch_size: int | None = Field(None, ge=1, description="samples per step over all ranks, at any world size")
    steps: int = Field(200, ge=1, description="optimizer steps in all")
    lr: float | None = Field(None, gt=0, description="highest learning rate; default: the preset's")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="last learning rate as a part of the highest")
    warmup: int = Field(20, ge=0, description="steps of linear warm-up, before the cosine")
    weight_decay: float = Field(0.1, ge=0, description="AdamW's, on matrices only")
    clip: float = Field(1.0, ge=0, description="largest gradient norm; 0 = no clipping")
    dropout: float = Field(0.0, ge=0, lt=1, description="on attention and residuals; 0 as published")
    seed: int = Field(0, ge=0, description="of weights, order of samples, dropout")
    eval_every: int = Field(50, ge=0, description="steps between validations; 0 = only at the end")
    eval_batches: int = Field(4, ge=0, description="batches per rank of one validation; 0 = no validation at all")
    checkpoint_dir: str | None = Field(None, description="default: checkpoints/ in the run's folder, or here")
    checkpoint_every: int = Field(25, ge=0, description="steps between saves; 0 = only the last")
    checkpoint_mode: Literal["sync", "async"] = Field("async", description="whether training waits for the write")
    memory: str = Field("auto", description="snapshots in memory: auto (every step), off, or every so many steps")
    keep: int = Field(3, ge=1, description="checkpoints to keep")
    loader_workers: int = Field(0, ge=0, description="loader processes per rank; the samples are the same for any")
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="of the computation; shards and reductions stay fp32")
    compile: bool = Field(False, description="torch.compile each block")
    activation_checkpointing: bool = Field(False, description="keep only each block's input for the backward pass")
    restore_rng: bool = Field(True, description="random streams are part of the state; off only to show they must be")
    log_every: int = Field(10, ge=0, description="steps between lines on standard output of rank 0; 0 = none")

    def model(self) -> ModelConfig:
        """The shape that is trained: the preset's or the one of `init_from`, with `num_layers` put in."""
        if self.preset not in PRESETS:
            raise ConfigError(f"--preset {self.preset}: unknown; one of {', '.join(PRESETS)}")
        shape = PRESETS[self.preset]
        if self.init_from is not None:
            stored = read_config(self.init_from)
            if "preset" in self.model_fields_set:
                _same_shape(self.preset, shape, self.init_from, stored)
            if self.num_layers is not None and self.num_layers > stored.num_layers:
                raise ConfigError(
                    f"--num-layers {self.num_layers}: {self.init_from} has {stored.num_layers}; give no more"
                )
            shape = stored
        return shape if self.num_layers is None else dataclasses.replace(shape, num_layers=self.num_layers)

    def memory_every(self) -> Literal["auto", "off"] | int:
        """`memory` as the checkpointer takes it."""
        if self.memory == "auto" or self.memory == "off":
            return self.memory  # type: ignore[return-value]
        if not self.memory.isdigit() or int(self.memory) < 1:
            raise ConfigError(f'--memory {self.memory}: give "auto", "off", or a number of steps from 1 on')
        return int(self.memory)

    def highest_lr(self) -> float:
        """`lr`, else 2e-5 for weights that are trained already, else the preset's."""
        if self.lr is not None:
            return self.lr
        return 2e-5 if self.init_from is not None else LEARNING_RATES[self.preset]

    def rank_batch_size(self, world_size: int) -> int:
        """Samples per rank and step in a world of this size."""
        if self.global_batch_size is None:
            return self.batch_size
        if self.global_batch_size % world_size:
            raise ConfigError(
                f"--global-batch-size {self.global_batch_size} does not divide over {world_size} ranks; "
                f"give a multiple of {world_size}"
            )
        return self.global_batch_size // world_size

    def checkpoints(self, run_dir: Path | None) -> Path:
        """Where checkpoints go: `checkpoint_dir`, else `checkpoints` in the run's folder, else in this folder."""
        if self.checkpoint_dir is not None:
            return Path(self.checkpoint_dir).absolute()
        return (run_dir or Path.cwd()) / "checkpoints"


def parse(values: dict[str, Any]) -> TrainConfig:
    """Build a config; ConfigError, one line with every wrong field, instead of pydantic's report."""
    try:
        return TrainConfig(**values)
    except ValidationError as e:
        raise ConfigError("; ".join(_sentence(error) for error in e.errors())) from None


def _sentence(error: Any) -> str:
    flag = "--" + "-".join(str(part) for part in error["loc"]).replace("_", "-")
    if error["type"] == "extra_forbidden":
        return f"{flag}: no such option; `ridethrough train --options` lists them"
    return f"{flag} {error['input']}: {error['msg'][0].lower()}{error['msg'][1:]}"


def check(config: TrainConfig, world_size: int, run_dir: Path | None = None) -> None:
    """Everything that can be known before a rank starts. Starts nothing and leaves nothing behind.

    Raises ConfigError: unknown preset, unusable data, a world or a batch that the data cannot serve, vocabulary that
    does not fit, weights that are missing or of another shape, checkpoint folder that cannot be written.
    """
    try:
        shape = config.model()
        config.memory_every()
        if config.init_from is not None:
            check_weights(config.init_from, shape)
        corpus = load_corpus(config.data)
    except (DataError, WeightsError) as e:
        raise ConfigError(str(e)) from None
    if config.seq_len > shape.max_seq_len:
        raise ConfigError(f"--seq-len {config.seq_len}: this model reads at most {shape.max_seq_len}; give less")
    if corpus.vocab_size > shape.vocab_size:
        raise ConfigError(
            f"{corpus.name} has {corpus.vocab_size} token ids, the model {shape.vocab_size}; "
            "choose a preset with a larger vocabulary, or prepare the data with its tokenizer"
        )
    _check_amount(config, corpus, world_size)
    _check_writable(config.checkpoints(run_dir))


def _check_amount(config: TrainConfig, corpus: Corpus, world_size: int) -> None:
    batch = config.rank_batch_size(world_size)
    needs = {"training": (corpus.train, True), "validation": (corpus.validation, config.eval_batches > 0)}
    for split, (tokens, used) in needs.items():
        have = max(0, (len(tokens) - 1) // config.seq_len)
        if used and have < batch * world_size:
            raise ConfigError(
                f"{corpus.name} has {have} {split} samples of {config.seq_len} tokens, and one step of {world_size} "
                f"ranks takes {batch * world_size}: use fewer ranks, less --batch-size or --seq-len, or more --data"
            )


def _check_writable(folder: Path) -> None:
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as e:
        reason = os.strerror(e.errno) if e.errno else str(e)
        raise ConfigError(f"--checkpoint-dir {folder}: {existing} cannot be written ({reason}); give another") from None


def _same_shape(preset: str, wanted: ModelConfig, folder: str, stored: ModelConfig) -> None:
    for field in dataclasses.fields(ModelConfig):
        a, b = getattr(wanted, field.name), getattr(stored, field.name)
        if a != b:
            raise ConfigError(
                f"--preset {preset} has {field.name} {a}, --init-from {folder} has {b}; "
                "leave --preset out to take the folder's shape"
            )
