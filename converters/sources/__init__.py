"""What the stored tensors of a checkpoint mean: weights with their companions, however stored."""

from mxfp4.converters.sources.detect import SourceTensors, read_sources
from mxfp4.converters.sources.storages import PACKED, STORAGES
from mxfp4.converters.sources.types import Part, Source, Storage

__all__ = ["PACKED", "STORAGES", "Part", "Source", "SourceTensors", "Storage", "read_sources"]
