"""Proof that an ignore list says what it should: both ways, under both ways of matching.

Testing half a million names against every pattern is slow and not needed: for patterns of the
plain form that we write, names that differ only in numbers no pattern mentions are the same name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

from mxfp4.converters.roles.names import spell, split_name
from mxfp4.errors import RecipeError

_START = r"re:.*\b"
_PLAIN = re.compile(r"re:\.\*\\b(?:\w|-|\\[.-]|\\d\+|\(\?:\d+(?:\|\d+)*\)|(?<=\\\.)\.\*)+\$")

_MENTIONED = re.compile(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])")


class Matcher:
    """Compiled patterns: `re:` expressions and exact names.

    `mentioned` holds the numbers that plain patterns can tell from others (the 1 of `w1` is not
    one of them, an index never touches a letter); None if a pattern is not plain, so that every
    name has to be tested by itself.
    """

    def __init__(self, patterns: Collection[str]) -> None:
        """Compile the patterns; a broken expression raises `re.error`."""
        self.patterns = tuple(patterns)
        self._exact = {item for item in self.patterns if not item.startswith("re:")}
        self._expressions = [
            (item, re.compile(item[3:])) for item in self.patterns if item.startswith("re:")
        ]
        plain = all(_PLAIN.fullmatch(item) for item, _ in self._expressions) and not self._exact
        numbers = {
            found
            for item in self.patterns
            for found in _MENTIONED.findall(item.removeprefix(_START))
        }
        self.mentioned = frozenset(numbers) if plain else None
        free = (str(number) for number in range(len(numbers) + 1))
        self.placeholder = next(number for number in free if number not in numbers)

    def hits(self, name: str) -> bool:
        """Whether a pattern hits a name from its start."""
        return name in self._exact or any(rule.match(name) for _, rule in self._expressions)

    def disagreement(self, name: str) -> str | None:
        """A pattern that hits a name under one way of matching only."""
        for item, rule in self._expressions:
            if bool(rule.match(name)) != bool(rule.fullmatch(name)):
                return item
        return None


class NameSet:
    """Module names by family, with the index tuples of each (see `roles.names`)."""

    def __init__(self, names: Iterable[str]) -> None:
        """Parse and group the names."""
        self.families: dict[str, set[tuple[str, ...]]] = defaultdict(set)
        for name in names:
            text, indices = split_name(name)
            self.families[text].add(indices)
        self._numbers: dict[str, set[str]] = {}

    def __contains__(self, name: str) -> bool:
        """Whether this is one of the names."""
        text, indices = split_name(name)
        return indices in self.families.get(text, ())

    def add_members(self, family: str, members: Iterable[tuple[str, ...]]) -> None:
        """Add names that have been parsed already."""
        self.families[family].update(members)

    def numbers(self, family: str) -> set[str]:
        """All numbers in the names of a family, whatever their place."""
        if family not in self._numbers:
            members = self.families[family]
            self._numbers[family] = {number for indices in members for number in indices}
        return self._numbers[family]

    def representatives(self, matcher: Matcher, family: str | None = None) -> Iterator[str]:
        """Names that stand for all names (of one family) as far as the matcher can tell."""
        for text in self.families if family is None else (family,):
            members: Iterable[tuple[str, ...]] = self.families[text]
            mentioned, free = matcher.mentioned, matcher.placeholder
            if mentioned is not None and (
                not mentioned or self.numbers(text).isdisjoint(mentioned)
            ):
                members = [(free,) * text.count("#")]
            elif mentioned is not None:
                members = {
                    tuple(number if number in mentioned else free for number in indices)
                    for indices in members
                }
            yield from spell(text, members)


def check_ignore(
    patterns: Collection[str],
    quantized_modules: Iterable[str] | NameSet,
    kept_modules: Iterable[str] | NameSet,
) -> None:
    """Raise `RecipeError` if a kept module is not hit, a quantized one is, or the result depends
    on whether an engine matches whole names."""
    matcher = Matcher(patterns)
    for wanted, modules in ((False, quantized_modules), (True, kept_modules)):
        names = modules if isinstance(modules, NameSet) else NameSet(modules)
        for name in names.representatives(matcher):
            split = matcher.disagreement(name)
            if split is not None:
                raise RecipeError(
                    f"the ignore pattern {split!r} hits only the beginning of the name",
                    tensor=name,
                    hint="end the pattern with $ or .*",
                )
            if matcher.hits(name) is not wanted:
                state = "left unquantized, but no ignore pattern hits it"
                if not wanted:
                    state = "stored packed, but an ignore pattern hits it"
                raise RecipeError(f"the module is {state}", tensor=name)
