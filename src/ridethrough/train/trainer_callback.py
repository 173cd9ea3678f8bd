"""The Hugging Face Trainer under `rt.run`:

    def train(run):
        trainer = Trainer(model=build(), args=args, train_dataset=data, callbacks=[trainer_callback(run)])
        trainer.train(resume_from_checkpoint=newest_checkpoint(args.output_dir))

    rt.run(train)

The Trainer keeps its own loop and its own checkpoints; each generation makes a new one and goes on from the newest. The
callback tells ridethrough where steps, validations and saves begin and end, and has a planned stop saved.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridethrough.restart import Run


def newest_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The newest `checkpoint-*` whose save has come to its end (`trainer_state.json` is written last); None if there is
    none yet. Every rank has to see the same folder."""
    whole = [state.parent for state in Path(output_dir).glob("checkpoint-*/trainer_state.json")]
    newest = max(whole, key=lambda folder: int(folder.name.rpartition("-")[2]), default=None)
    return None if newest is None else str(newest)


def trainer_callback(run: Run) -> Any:
    """A `transformers.TrainerCallback` for one generation. Every rank, main thread, before `Trainer.train`.

    A step ends, and a fault elsewhere or a planned stop is obeyed, after `on_step_end`; a stop is preceded by a save.
    """
    from transformers import TrainerCallback

    class RidethroughCallback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            run.on_leave(_forget_the_world)
            self._steps: Iterator[int] = run.steps(state.global_step, state.max_steps)
            self._phase: AbstractContextManager[None] | None = None
            if next(self._steps, None) is None:
                control.should_training_stop = True

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if next(self._steps, None) is None:
                control.should_save = control.should_save or run.stopped
                control.should_training_stop = True
            if control.should_evaluate:
                self._enter("eval")
            elif control.should_save:
                self._enter("save")

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._leave()
            if control.should_save:
                self._enter("save")

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._leave()

        def _enter(self, phase: str) -> None:
            self._phase = run.phase(phase)
            self._phase.__enter__()

        def _leave(self) -> None:
            if self._phase is not None:
                self._phase.__exit__(None, None, None)
                self._phase = None

    return RidethroughCallback()


def _forget_the_world() -> None:
    """Accelerate keeps ranks and devices in the process; the next generation may have others."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
