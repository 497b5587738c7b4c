"""TensorBoard as a view: event files in the run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.tracking.sink import Item, Opened


class TensorBoardSink:
    """Event files below `folder`. A later attempt adds a file that takes the place of what an
    earlier one had written past last_step."""

    label = "TensorBoard"

    def __init__(self, folder: Path, *, last_step: int) -> None:
        self._folder = folder
        self._last_step = last_step
        self._writer: Any = None

    def open(self) -> Opened:
        from torch.utils.tensorboard import SummaryWriter

        begun = any(self._folder.glob("events.*"))
        self._writer = SummaryWriter(
            str(self._folder), purge_step=self._last_step + 1 if begun else None
        )
        said = f"TensorBoard: tensorboard --logdir {self._folder}"
        return Opened(after=self._last_step if begun else 0, said=said)

    def send(self, items: Sequence[Item]) -> None:
        for item in items:
            for name, value in item.values.items():
                self._writer.add_scalar(name, value, item.step)
            for number, (prompt, text) in enumerate(item.texts):
                self._writer.add_text(f"sample {number}", f"{prompt!r} goes on {text!r}", item.step)

    def close(self, *, done: bool) -> None:
        self._writer.close()

    def kill(self) -> None:
        pass  # a thread that waits for a disk cannot be ended; the process's end ends it
