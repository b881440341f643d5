"""Any torch module → an ONNX model in memory: traced, inlined, folded, stripped of machine traces.

Parameters may be fake (no memory behind them); the caller gives their initializers values before `simplify`.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import onnx_ir
import torch
from onnx_ir.passes import common as passes
from onnxscript import optimizer
from torch import nn

from edgebuild.errors import ExportError
from edgebuild.export.forms import Forms, functions, translation_table

OPSET = 24
_FOLD_LIMIT = 1024  # elements: constants are folded, weights are never read by the optimiser


def trace(module: nn.Module, arguments: tuple[Any, ...], dynamic_shapes: Any, forms: Forms) -> onnx_ir.Model:
    """torch.export, then torch.onnx with our operator forms. Raises ExportError when torch cannot express it."""
    try:
        with quiet():
            program = torch.export.export(
                module,
                arguments,
                dynamic_shapes=dynamic_shapes,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                custom_translation_table=translation_table(forms),
                optimize=False,
                verbose=False,
            )
    except Exception as error:  # torch raises many kinds here; each means the same to the user
        raise ExportError(
            f"torch could not export {type(module).__name__}: {error}",
            hint="this is a fault of edgebuild or of the installed torch; please report it with the config.json",
        ) from error
    if exported is None:
        raise ExportError(f"torch.onnx.export returned nothing for {type(module).__name__}")
    return exported.model


def simplify(model: onnx_ir.Model) -> None:
    """Inline functions, fold constants, drop what nobody reads, in place."""
    for function in functions(OPSET):
        model.functions.setdefault(function.identifier(), function)
    # onnxscript's optimize_ir also matches some 60 rewrite patterns against every node: half of an export's time, and
    # both engines do their own
    with quiet():
        passes.InlinePass()(model)
        optimizer.fold_constants_ir(model, input_size_limit=_FOLD_LIMIT, output_size_limit=_FOLD_LIMIT)
        onnx_ir.passes.Sequential(
            passes.RemoveUnusedNodesPass(),
            passes.RemoveUnusedFunctionsPass(),
            passes.RemoveUnusedOpsetsPass(),
            passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            passes.LiftSubgraphInitializersToMainGraphPass(),
            passes.DeduplicateInitializersPass(),
            passes.CommonSubexpressionEliminationPass(),
            passes.OutputFixPass(),
            passes.NameFixPass(),
        )(model)
    model.producer_name, model.producer_version = "edgebuild", None
    model.metadata_props.clear()
    for node in model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces with paths of the building machine
        node.doc_string = None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch's exporter warns about its own internals; none of it is for the user."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
