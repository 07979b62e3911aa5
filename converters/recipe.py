"""What the user asks for: a level, patterns to keep or quantize, and the numeric rule.

A recipe is a frozen value; from a YAML file or from the command line it is the same object, and an
unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from mxfp4.converters.roles import Role
from mxfp4.errors import RecipeError
from mxfp4.spec import ScaleRule, TieRule

_Choice = TypeVar("_Choice", bound=StrEnum)


class Level(StrEnum):
    """How much of the model is quantized; each level contains the one before."""

    EXPERTS = "experts"
    MOE = "moe"
    LINEAR = "linear"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A conversion as asked.

    `level` None means experts for a mixture of experts and linear for a dense model. `keep` and
    `quantize` are patterns over module or tensor names: an exact name, a glob (`*.mlp.*`), or
    `re:` and a regular expression that has to match from the start; `keep` wins. `force_roles`
    names roles that may be quantized although they are protected.
    """

    level: Level | None = None
    keep: tuple[str, ...] = ()
    quantize: tuple[str, ...] = ()
    force_roles: frozenset[Role] = frozenset()
    rule: ScaleRule = ScaleRule.EVEN
    ties: TieRule = TieRule.EVEN

    @classmethod
    def load(cls, path: Path) -> Recipe:
        """Read a YAML recipe.

        Raises `RecipeError` for a file that is not a mapping, for unknown keys and for values of
        the wrong kind.
        """
        import yaml

        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise RecipeError(f"cannot read the recipe ({error})", file=path.name) from error
        if data is None:
            data = {}
        if not isinstance(data, dict):
            raise RecipeError("a recipe is a mapping of keys to values", file=path.name)
        return cls.from_mapping(data, file=path.name)

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], *, file: str = "") -> Recipe:
        """A recipe from parsed YAML or JSON; raises `RecipeError` as `load` does."""
        known = [field.name for field in fields(cls)]
        for key in data:
            if key not in known:
                raise _unknown("key", str(key), known, file)
        return cls(
            level=None if data.get("level") is None else _member(Level, data, "level", file),
            keep=_patterns(data, "keep", file),
            quantize=_patterns(data, "quantize", file),
            force_roles=parse_forced(data.get("force_roles") or {}, file=file),
            rule=_member(ScaleRule, data, "rule", file) if "rule" in data else ScaleRule.EVEN,
            ties=_member(TieRule, data, "ties", file) if "ties" in data else TieRule.EVEN,
        )

    def to_json(self) -> dict[str, Any]:
        """The recipe as plain JSON values; `from_mapping` reads it back."""
        return {
            "level": None if self.level is None else str(self.level),
            "keep": list(self.keep),
            "quantize": list(self.quantize),
            "force_roles": {str(role): "quantize" for role in sorted(self.force_roles)},
            "rule": str(self.rule),
            "ties": str(self.ties),
        }


def parse_forced(forced: object, *, file: str = "") -> frozenset[Role]:
    """Roles from `{"router": "quantize"}` or from `["router=quantize"]`."""
    if isinstance(forced, Mapping):
        pairs = [(str(key), str(value)) for key, value in forced.items()]
    elif isinstance(forced, (list, tuple)) and all(isinstance(item, str) for item in forced):
        pairs = [(role, action) for role, _, action in (item.partition("=") for item in forced)]
    else:
        raise RecipeError("force_roles maps a role to 'quantize'", file=file)
    roles = set()
    for role, action in pairs:
        if role not in set(Role):
            raise _unknown("role", role, list(Role), file)
        if action != "quantize":
            raise RecipeError(
                f"force_roles: {role} is {action!r}",
                hint=f"the only thing to force is quantization: {role}=quantize",
                file=file,
            )
        roles.add(Role(role))
    return frozenset(roles)


def _patterns(data: Mapping[str, Any], key: str, file: str) -> tuple[str, ...]:
    value = data.get(key) or []
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise RecipeError(f"{key} is a list of patterns, not {value!r}", file=file)
    return tuple(value)


def _member(kind: type[_Choice], data: Mapping[str, Any], key: str, file: str) -> _Choice:
    value = data[key]
    if value not in set(kind):
        raise _unknown(key, str(value), list(kind), file)
    return kind(value)


def _unknown(what: str, seen: str, known: list[Any], file: str) -> RecipeError:
    names = [str(name) for name in known]
    near = difflib.get_close_matches(seen, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return RecipeError(
        f"unknown {what} {seen!r}", hint=hint + "known: " + ", ".join(names), file=file
    )
