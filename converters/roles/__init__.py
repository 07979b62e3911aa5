"""What every tensor of a checkpoint is for, from names, shapes and config alone."""

from mxfp4.converters.roles.classify import Classified, classify, classify_each, facts_of
from mxfp4.converters.roles.types import ExpertBank, Kind, Role, TensorRole

__all__ = [
    "Classified",
    "ExpertBank",
    "Kind",
    "Role",
    "TensorRole",
    "classify",
    "classify_each",
    "facts_of",
]
