"""The past of a causal convolution, or of an n-gram: the last columns before the rows that are not committed yet.

A window [B, past + q, width] is the kept past and this step's rows behind it. After n committed rows the new past is
its columns n .. n + past − 1, which reach into the old past where n is small; n = 0 gives the old past back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgebuild.models.parts import Step


def keep(window: Tensor, step: Step, past: int) -> Tensor:
    """Of a window, the columns [B, R + past − 1, width] that hold the past for every outcome of this step."""
    reach = torch.arange(past - 1, device=window.device) + step.offsets[-1:] + 1
    return rows(window, step.forced, torch.cat((step.offsets, reach)), 1)


def commit(kept: Tensor, accepted: Tensor, past: int) -> Tensor:
    """The past [B, past, width] once `accepted` [B] rows behind the forced ones count."""
    return rows(kept, accepted, torch.arange(past, device=kept.device), 1)


def rows(x: Tensor, first: Tensor, offsets: Tensor, dim: int) -> Tensor:
    """Entries first[b] + offsets of `dim`, those past its end replaced by the last one."""
    places = (first[:, None] + offsets).clamp(max=x.shape[dim] - 1)
    shape = [1] * x.ndim
    shape[0], shape[dim] = -1, offsets.shape[0]
    sizes = [-1 if axis in (0, dim) else size for axis, size in enumerate(x.shape)]
    return x.gather(dim, places.view(shape).expand(sizes))
