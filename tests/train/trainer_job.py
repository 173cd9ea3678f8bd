"""Run as a worker: `trainer_job.py OUT STEPS` trains a tiny GPT-2 with the Hugging Face Trainer under `rt.run`."""

import json
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ridethrough as rt
from ridethrough.train.trainer_callback import newest_checkpoint, trainer_callback

OUT, STEPS = Path(sys.argv[1]), int(sys.argv[2])


def train(run: rt.Run) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (256, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    args = TrainingArguments(
        output_dir=str(OUT / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        save_steps=4,
        eval_strategy="steps",
        eval_steps=6,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    trainer = Trainer(
        model=model, args=args, train_dataset=data, eval_dataset=data[:4], callbacks=[trainer_callback(run)]
    )
    resumed = newest_checkpoint(args.output_dir)
    trainer.train(resume_from_checkpoint=resumed)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
    end = {"generation": run.generation, "resumed": resumed, "step": trainer.state.global_step}
    (OUT / f"end-{run.rank}.json").write_text(json.dumps({**end, "sum": weights.sum().item()}))


rt.run(train)
