"""What can go wrong while building: every error names what failed, the numbers, and the next step."""

from __future__ import annotations


class EdgebuildError(Exception):
    """Root of the tree. `hint` is the next step for the reader, in one sentence."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} ({self.hint})" if self.hint else message


class ProfileError(EdgebuildError):
    """A profile that cannot be read: names file, line and what was expected."""

    exit_code = 3


class TrafficError(EdgebuildError):
    """A trace that cannot be read, or that lacks what a histogram needs."""

    exit_code = 4


class CheckpointError(EdgebuildError):
    """A checkpoint that is incomplete, inconsistent or of an unknown kind."""

    exit_code = 5


class DoesNotFit(EdgebuildError):
    """The plan needs more than the device has; the message says what to change."""

    exit_code = 6


class ExportError(EdgebuildError):
    """The model could not be turned into ONNX."""

    exit_code = 7


class EngineError(EdgebuildError):
    """The engine could not be built or checked."""

    exit_code = 8


class OutputError(EdgebuildError):
    """The artifact cannot be written where it was asked for: the place is taken, or the disk is full."""

    exit_code = 9


class TuningError(EdgebuildError):
    """A logbook that cannot be read or written, a tuning run without a baseline, or one that no settings survived."""

    exit_code = 11


class ReportError(EdgebuildError):
    """A report cannot be drawn: a measurement of something else, or a file that is not one."""

    exit_code = 12


class SimulationError(EdgebuildError):
    """A simulation or a plan without costs, or with those of something else."""

    exit_code = 13
