"""edgebuild compiles a language model ahead of time for one device and one kind of traffic."""

__version__ = "0.1.0"
