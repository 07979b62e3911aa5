"""The version of the distribution, alone in a file so that packaging reads it without imports."""

__version__ = "0.1.0"
