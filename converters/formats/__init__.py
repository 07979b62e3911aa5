"""Output formats: what quantized matrices are called in the file, and what the config says.

One file per family, one entry of `FORMATS` per layout; the conversion loop knows none of their
names.
"""

from mxfp4.converters.formats.registry import DEFAULT_FORMAT, FORMATS, output_format
from mxfp4.converters.formats.types import ConfigEdit, Described, OutputFormat, Payload, Slot

__all__ = [
    "DEFAULT_FORMAT",
    "FORMATS",
    "ConfigEdit",
    "Described",
    "OutputFormat",
    "Payload",
    "Slot",
    "output_format",
]
