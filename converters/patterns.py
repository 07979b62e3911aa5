"""Name patterns of recipes: exact names, globs and `re:` expressions, each of which has to hit.

A pattern is held against the tensor name and against its module name (without the last part).
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Sequence

from mxfp4.errors import RecipeError

_PARAMETERS = (".weight", ".bias", ".weight_packed", ".weight_scale", ".scale")
_GLOB = re.compile(r"[*?\[]")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_SIMILAR = 0.6


def module_name(tensor: str) -> str:
    """Name of the module that owns a tensor; a bare parameter counts as its own module."""
    head, dot, leaf = tensor.rpartition(".")
    return head if dot and dot + leaf in _PARAMETERS else tensor


class NamePatterns:
    """A list of patterns from one place (`origin`: keep, quantize)."""

    def __init__(self, patterns: Sequence[str], origin: str) -> None:
        """Compile the patterns; raises `RecipeError` for a broken expression."""
        self._patterns = tuple(patterns)
        self._origin = origin
        self._tests = [self._compile(pattern) for pattern in patterns]

    def match(self, names: Sequence[str]) -> dict[str, str]:
        """The first pattern that hits each name, for the names that are hit.

        Raises `RecipeError` for a pattern that hits nothing.
        """
        found: dict[str, str] = {}
        if not self._patterns:
            return found
        modules = [module_name(name) for name in names]
        for pattern, test in zip(self._patterns, self._tests, strict=True):
            hits = [
                name
                for name, module in zip(names, modules, strict=True)
                if test(module) or (module is not name and test(name))
            ]
            if not hits:
                raise self._no_match(pattern, modules)
            for name in hits:
                found.setdefault(name, pattern)
        return found

    def _compile(self, pattern: str) -> Callable[[str], object]:
        if pattern.startswith("re:"):
            try:
                return re.compile(pattern[3:]).match
            except re.error as error:
                raise RecipeError(
                    f"{self._origin}: {pattern!r} is no regular expression ({error})"
                ) from error
        if _GLOB.search(pattern):
            return re.compile(fnmatch.translate(pattern)).match
        return pattern.__eq__

    def _no_match(self, pattern: str, modules: Iterable[str]) -> RecipeError:
        candidates = sorted(set(modules))
        inside = [name for name in candidates if name.startswith(pattern + ".")]
        if inside:
            hint = f"it is a container of {len(inside):,} modules: write {pattern}.*"
        else:
            near = nearest_names(pattern, candidates)
            hint = "nearest names: " + ", ".join(near) if near else "no name is similar"
        return RecipeError(f"{self._origin}: {pattern!r} matches 0 tensors", hint=hint)


def nearest_names(pattern: str, names: Sequence[str], count: int = 3) -> list[str]:
    """Names that look like a pattern, most similar first.

    Names of one family differ in numbers only, so one of each is compared.
    """
    bare = re.sub(r"^re:|[\\*?^$()\[\]+|]", "", pattern).strip(".")
    families: dict[str, str] = {}
    for name in names:
        families.setdefault(_NUMBER.sub("#", name), name)
    wanted = _NUMBER.sub("#", bare)
    scored = sorted((-_similarity(wanted, family), family) for family in families)
    numbers = _NUMBER.findall(bare)
    known = set(names)
    return [
        _with_numbers(families[family], numbers, known)
        for score, family in scored[:count]
        if -score > _SIMILAR
    ]


def _similarity(pattern: str, family: str) -> float:
    """Likeness of the characters, plus the share of parts that occur in the family as they are."""
    ratio = difflib.SequenceMatcher(None, pattern, family, autojunk=False).ratio()
    parts = [part for part in pattern.split(".") if part and part != "#"]
    shared = set(parts) & set(family.split("."))
    return ratio + len(shared) / max(len(parts), 1)


def _with_numbers(name: str, numbers: Sequence[str], names: Collection[str]) -> str:
    """The member of a family with the numbers of the pattern, if there is one."""
    wanted = iter(numbers)
    exact = _NUMBER.sub(lambda found: next(wanted, found.group()), name)
    return exact if exact in names else name
