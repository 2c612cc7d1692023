"""The version, in the one place that packaging, files and the command read."""

__version__ = "0.1.0"
