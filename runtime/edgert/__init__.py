"""edgert runs an artifact that edgebuild made, and nothing else."""

__version__ = "0.1.0"
