"""Whether our own code raised an error, so that its message is a sentence for users."""

from __future__ import annotations

from pathlib import Path

import megarlhf


def raised_here(error: BaseException) -> bool:
    """Whether our own code raised the error. torch's errors keep their traceback."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and Path(frame.tb_frame.f_code.co_filename).is_relative_to(Path(megarlhf.__file__).parent)
