"""What can go wrong at run time, as one tree: every error names what failed, the numbers, and the next step.

`exit_code` is what the command line returns for the class; 2 is kept for wrong usage, as argparse does.
"""

from __future__ import annotations


class EdgertError(Exception):
    """Root of the tree. `hint` is the next step for the reader, in one sentence."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} ({self.hint})" if self.hint else message


class ArtifactError(EdgertError):
    """The artifact is damaged, incomplete, made for something else, or was changed after it was built."""

    exit_code = 3


class UnfinishedArtifact(ArtifactError):
    """The artifact stopped after ONNX: its engine is to be built on the device."""


class ConfigError(EdgertError):
    """scheduler.yaml asks for something that this artifact cannot do."""

    exit_code = 4


class RequestError(EdgertError, ValueError):
    """One request is not servable: it fails alone, other streams go on."""

    exit_code = 5


class BackendError(EdgertError):
    """The inference backend is missing, cannot run this artifact on this device, or failed in a step."""

    exit_code = 6


class GoldenMismatch(ArtifactError):
    """The engine's numbers differ from the golden vectors recorded at build time."""

    exit_code = 7


class QueueFull(RequestError):
    """The waiting queue is at its bound; the same request may succeed later."""

    exit_code = 8


class MemoryShort(QueueFull):
    """Admission would touch the memory that is left to the system; the same request may succeed later."""


class KvWriteError(EdgertError):
    """Position, length and slot of a launch disagree with the host's record: a fault of this program, not the user."""

    exit_code = 9
