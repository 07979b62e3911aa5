"""What a check of an output found: differences, counts, and the error of what was quantized."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mxfp4.statistics import TensorStatistics


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference: where it is, and what is wrong."""

    place: str
    problem: str

    def to_json(self) -> dict[str, str]:
        """As JSON data."""
        return {"place": self.place, "problem": self.problem}


@dataclass
class Verification:
    """What was checked and what was found."""

    output: str
    source: str | None
    deep: bool
    checked: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    statistics: TensorStatistics = field(default_factory=TensorStatistics)
    modules: list[tuple[str, float]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def count(self, what: str, number: int = 1) -> None:
        """Add to the number of things checked."""
        self.checked[what] = self.checked.get(what, 0) + number

    def add(self, place: str, problem: str) -> None:
        """Record a difference."""
        self.findings.append(Finding(place, problem))

    def note_once(self, text: str) -> None:
        """Add a note that is not there yet."""
        if text not in self.notes:
            self.notes.append(text)

    def worst(self, count: int = 10) -> list[tuple[str, float]]:
        """Modules with the largest relative L2 error, worst first."""
        return sorted(self.modules, key=lambda item: (-item[1], item[0]))[:count]

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        error = self.statistics.to_json() if self.statistics.elements else None
        return {
            "output": self.output,
            "source": self.source,
            "deep": self.deep,
            "ok": self.ok,
            "checked": self.checked,
            "findings": [finding.to_json() for finding in self.findings],
            "notes": self.notes,
            "error": error,
            "worst_modules": [{"module": m, "relative_l2": e} for m, e in self.worst()],
        }
