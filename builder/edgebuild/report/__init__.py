"""report.html: what was decided for this traffic and device, and why, on one page that needs nothing else."""

from edgebuild.report.build_facts import build_facts
from edgebuild.report.evidence import BUILD_FACTS, Evidence, gather
from edgebuild.report.page import Sources, read_sources, render_report

__all__ = ["BUILD_FACTS", "Evidence", "Sources", "build_facts", "gather", "read_sources", "render_report"]
