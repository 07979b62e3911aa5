"""Matrices stored `[in, out]`: the length of a bias gives them away, whatever their name.

A linear layer has as many biases as outputs. GPT-2's `Conv1D` is the common case.
"""

from __future__ import annotations

from dataclasses import replace

from mxfp4.converters.roles.view import Verdict, View


def correct_axis(view: View, verdict: Verdict) -> Verdict:
    """Axis 0 instead of 1 where a bias is as long as the second axis and not as the first."""
    if view.rank != 2 or verdict.axis != 1 or verdict.bank is not None:
        return verdict
    if _input_major(view):
        return replace(verdict, axis=0, evidence=f"{verdict.evidence}; stored [in, out]")
    return verdict


def _input_major(view: View) -> bool:
    rows, columns = view.shape
    if view.path in view.scene.mixed:
        return False
    if rows != columns:
        return view.scene.biases.get(view.path) == (columns,)
    return view.leaf.startswith("c_") and _neighbours_are_input_major(view)


def _neighbours_are_input_major(view: View) -> bool:
    """A square matrix is stored like the other `c_*` matrices of its layer."""
    for path, length in view.scene.biases.items():
        shape = view.scene.weights.get(path, ())
        if path[-1].startswith("c_") and len(shape) == 2 and shape[0] != shape[1]:
            return length == (shape[1],)
    return False
