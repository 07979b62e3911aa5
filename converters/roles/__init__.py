"""What every tensor of a checkpoint is for, from names, shapes and config alone."""

from mxfp4.converters.roles.classify import classify, facts_of
from mxfp4.converters.roles.types import ExpertBank, Kind, Role, TensorRole

__all__ = ["ExpertBank", "Kind", "Role", "TensorRole", "classify", "facts_of"]
