"""Lists of tensors with their true roles, written as text."""

import pytest

from mxfp4.converters.decide import Action, decide
from mxfp4.converters.header import TensorInfo
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.converters.roles import Role, classify

NEVER = frozenset(
    {
        Role.ROUTER,
        Role.ROUTER_BIAS,
        Role.SHARED_EXPERT_GATE,
        Role.EMBEDDING,
        Role.LM_HEAD,
        Role.NORM,
        Role.CONV,
        Role.SSM_SMALL,
        Role.INDEXER,
    }
)
SIZES = {"H": 128, "I": 192, "E": 8, "V": 512, "D": 64, "S": 96, "W": 96, "N": 4}
LAYERS = 3


class Families:
    """Judges an architecture of three layers and eight experts.

    A line is `name  shape  role  axis`. `{l}` runs over the layers, `{e}` over the experts. Letters
    in shapes are sizes: H hidden, I inner, E experts, V vocabulary, D half of hidden, S shared
    inner, W tower width. A role ending in `!` is also quantized at level linear; `?` stands for any
    role.
    """

    def misjudged(self, config, text):
        """Tensors whose role, axis or action at level linear is not the stated one."""
        rows, roles, decisions = self._decide(config, text)
        wrong = []
        for name, shape, wanted, axis in rows:
            role, decision = roles[name], decisions[name]
            if wanted != "?" and (role.role != wanted.rstrip("!") or role.axis != axis):
                wrong.append((name, shape, role))
            if (decision.action is Action.QUANTIZE) != wanted.endswith("!"):
                wrong.append((name, shape, decision))
        return wrong

    def unprotected(self, text):
        """Tensors of roles that are never quantized, but are when there is no config."""
        rows, _, decisions = self._decide(None, text)
        return [
            name
            for name, _, wanted, _ in rows
            if wanted in NEVER and decisions[name].action is Action.QUANTIZE
        ]

    def _decide(self, config, text):
        rows = list(self._expand(text))
        tensors = [TensorInfo(name, "BF16", shape) for name, shape, _, _ in rows]
        roles = classify(tensors, config)
        return rows, roles, decide(tensors, roles, Recipe(level=Level.LINEAR))

    def _expand(self, text):
        for line in text.strip().splitlines():
            name, shape, role, axis = line.split()
            layers = range(LAYERS) if "{l}" in name else [0]
            experts = range(SIZES["E"]) if "{e}" in name else [0]
            for layer in layers:
                for expert in experts:
                    full = name.replace("{l}", str(layer)).replace("{e}", str(expert))
                    yield full, self._shape(shape), role, None if axis == "-" else int(axis)

    def _shape(self, text):
        """`EI,H` is (E * I, H) where E starts a run, `HHH` is three times H, digits are literal."""
        shape = []
        for part in text.split(","):
            if part.lstrip("?").isdigit():
                shape.append(int(part.lstrip("?")))
            elif part.startswith("E") and len(part) > 1:
                shape.append(SIZES["E"] * _sum(part[1:]))
            else:
                shape.append(_sum(part))
        return tuple(shape)


def _sum(letters):
    return sum(SIZES[letter] for letter in letters)


@pytest.fixture(scope="session")
def families():
    return Families()
