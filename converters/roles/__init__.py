"""What every tensor of a checkpoint is for, from names, shapes and config alone."""

from mxfp4.converters.roles.classify import Classified, classify, facts_of, classify_each
from mxfp4.converters.roles.types import ExpertBank, Kind, Role, TensorRole

__all__ = [
    "ExpertBank",
    "Kind",
    "Role",
    "Classified",
    "TensorRole",
    "classify",
    "facts_of",
    "classify_each",
]
