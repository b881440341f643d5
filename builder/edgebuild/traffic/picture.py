"""A histogram for the eye: bins on a logarithmic axis, bars for a terminal, a figure for a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgebuild.errors import TrafficError
from edgebuild.traffic.histogram import Counts, Histogram, percentile

SUFFIXES = (".png", ".svg", ".pdf")
_BLOCKS = " ▏▎▍▌▋▊▉█"


def log_bins(counts: Counts, per_octave: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Counts of lengths >= 1 in bins of equal width on a logarithmic axis, from the shortest to the longest length.

    Returns (edges, totals): bin i holds the lengths edges[i] <= length < edges[i + 1].
    """
    lengths = np.flatnonzero(counts)
    if not lengths.size:
        raise ValueError("no lengths to draw")
    first = int(np.floor(np.log2(max(1, int(lengths[0]))) * per_octave))
    last = int(np.floor(np.log2(int(lengths[-1])) * per_octave)) + 1
    edges = np.unique(np.ceil(2.0 ** (np.arange(first, last + 1) / per_octave) - 1e-9).astype(np.int64))
    edges[0] = min(edges[0], lengths[0])
    if edges[-1] <= lengths[-1]:
        edges = np.append(edges, lengths[-1] + 1)
    below = np.concatenate([[0], np.cumsum(counts)])  # below[n] = requests shorter than n
    at = below[np.minimum(edges, counts.size)]
    return edges, np.diff(at)


def bar(share: float, width: int) -> str:
    """A bar of `share` (0..1) of `width` characters, in eighths of a character; anything above 0 shows."""
    eighths = max(round(min(max(share, 0.0), 1.0) * width * 8), int(share > 0))
    return "█" * (eighths // 8) + (_BLOCKS[eighths % 8] if eighths % 8 else "")


def text_bars(counts: Counts, width: int = 40) -> list[str]:
    """One line a power of two: the range, a bar, the share of requests."""
    edges, totals = log_bins(counts, 1)
    most, everything = int(totals.max()), int(totals.sum())
    label = len(f"{int(edges[-1]) - 1:,}")
    return [
        f"{int(low):>{label},}–{int(high) - 1:<{label},} "
        f"{bar(total / most, width):<{width}} {_percent(total / everything)}"
        for low, high, total in zip(edges[:-1], edges[1:], totals.tolist(), strict=True)
    ]


def _percent(share: float) -> str:
    return " <0.1%" if 0 < share < 0.001 else f"{share:6.1%}"


def save_picture(histogram: Histogram, path: Path) -> None:
    """Draw prompt and output lengths into a file. Raises TrafficError for a file type that cannot be written."""
    if path.suffix.lower() not in SUFFIXES:
        raise TrafficError(f"{path}: a picture ends with {', '.join(SUFFIXES)}")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, title, counts, colour in (
        (panels[0], "Prompt tokens", histogram.prompt_counts, "#3b6fb6"),
        (panels[1], "Output tokens", histogram.output_counts, "#c2703d"),
    ):
        edges, totals = log_bins(counts, 6)
        share = 100.0 * totals / totals.sum()
        axes.bar(edges[:-1], share, width=np.diff(edges), align="edge", color=colour, edgecolor="white", linewidth=0.4)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{int(value):,}")
        axes.set_xlim(float(edges[0]), float(edges[-1]))
        axes.set_ylim(0, float(share.max()) * 1.34)
        for percent, height in ((50, 0.97), (90, 0.90), (99, 0.83)):
            length = percentile(counts, percent)
            axes.axvline(length, color="#444444", linewidth=0.8, linestyle="--")
            axes.annotate(
                f"p{percent} {length:,}",
                (length, height),
                xycoords=("data", "axes fraction"),
                xytext=(-3, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85},
            )
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("tokens (logarithmic)")
        axes.set_ylabel("% of requests in each bin")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", rotation=35, labelsize=8)
    figure.suptitle(f"{histogram.name}: {histogram.requests:,} requests", fontsize=12)
    try:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise TrafficError(f"{path}: {error.strerror or error}") from error
