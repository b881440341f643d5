"""Traffic: what a trace says about prompt and output lengths, as a histogram."""

from __future__ import annotations

from edgebuild.traffic.histogram import Histogram, HistogramBuilder
from edgebuild.traffic.histogram_file import dump_histogram
from edgebuild.traffic.reader import KNOWN_FORMATS, read_traffic

__all__ = ["KNOWN_FORMATS", "Histogram", "HistogramBuilder", "dump_histogram", "read_traffic"]
