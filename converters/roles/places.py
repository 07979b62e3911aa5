"""Where a tensor stands: in the text trunk, in a tower, between them, or in a prediction block."""

from __future__ import annotations

from enum import StrEnum

from mxfp4.converters.roles import words
from mxfp4.converters.roles.names import Family


class Place(StrEnum):
    """Part of the model, read off the segments before the layer (all of them outside a stack)."""

    TRUNK = "trunk"
    TOWER = "tower"
    SPEECH = "speech"
    PROJECTOR = "projector"
    MTP = "mtp"


def place_of(family: Family) -> tuple[Place, str]:
    """Place and the segment that decided it.

    The last telling segment wins, so that `thinker.visual` is a tower and
    `vision_model.language_model` is not; nothing leaves a prediction block or a speech head again.
    """
    place, reason = Place.TRUNK, ""
    names = family.prefix if family.layer_at is not None else family.path
    for position, segment in enumerate(names):
        found = _word(segment, last=position == len(names) - 1 and family.layer_at is None)
        if found is None:
            continue
        if place in (Place.MTP, Place.SPEECH):
            break
        if place is Place.PROJECTOR and found is Place.TOWER:
            continue
        place, reason = found, segment
    return place, reason


def _word(segment: str, *, last: bool) -> Place | None:
    if segment in words.LANGUAGE:
        return Place.TRUNK
    if words.MTP.fullmatch(segment):
        return Place.MTP
    if last and (words.HEAD.fullmatch(segment) or words.NORM.fullmatch(segment)):
        return None
    if words.PROJECTOR.fullmatch(segment):
        return Place.PROJECTOR
    if words.SPEECH_OUTPUT.fullmatch(segment):
        return Place.SPEECH
    if words.TOWER.fullmatch(segment):
        return Place.TOWER
    return None
