"""External data of an ONNX file: tensors are streamed from the checkpoint one at a time, then only referenced.

Knows alignment and offsets; knows nothing of models.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import onnx_ir
import torch
from torch import Tensor

_ALIGNMENT = 4096  # a page, so that the runtime can map tensors
_DTYPES = {
    torch.float32: onnx_ir.DataType.FLOAT,
    torch.float16: onnx_ir.DataType.FLOAT16,
    torch.bfloat16: onnx_ir.DataType.BFLOAT16,
}


class WeightFile:
    """Appends tensors to one file and hands out references to them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_written = 0
        self._file = path.open("wb")

    def append(self, name: str, tensor: Tensor) -> onnx_ir.ExternalTensor:
        """Write `tensor` (contiguous, in its own dtype) at the next aligned offset."""
        self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
        offset = self._file.tell()
        data = tensor.detach().contiguous().view(torch.uint8).numpy()
        self._file.write(data.data)
        self.bytes_written += data.nbytes
        return onnx_ir.ExternalTensor(
            self.path.name,
            offset,
            data.nbytes,
            _DTYPES[tensor.dtype],
            shape=onnx_ir.Shape(tuple(tensor.shape)),
            name=name,
            base_dir=str(self.path.parent),
        )

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
