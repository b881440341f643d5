"""torch module → ONNX opset 24 with external data.

The module is traced with fake parameters, so the tracer holds no weights; they stream from the checkpoint to the data
file one tensor at a time. Peak memory is the tracer's own plus the largest tensor.
"""

from edgebuild.export.decoder import ExportedGraph, TensorInfo, export_decoder
from edgebuild.export.forms import FORMS, Forms

__all__ = ["FORMS", "ExportedGraph", "Forms", "TensorInfo", "export_decoder"]
