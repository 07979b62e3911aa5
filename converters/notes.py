"""What people should know about a plan: everything that is not simply as asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mxfp4.converters.plan import Plan, Treatment
from mxfp4.converters.roles import Role
from mxfp4.converters.sources import STORAGES


def plan_warnings(plan: Plan) -> tuple[str, ...]:
    """One sentence each."""
    return (*plan.checkpoint.warnings, *_general(plan), *_sources(plan), *_shapes(plan))


def _general(plan: Plan) -> Iterator[str]:
    unknown = sum(count for tensor, count in plan.kinds if not tensor.decision.role.recognised)
    if unknown:
        yield f"{unknown} tensor(s) have unrecognised names and are kept; see the table"
    treatments = {tensor.treatment for tensor, _ in plan.kinds}
    if treatments <= {Treatment.KEEP}:
        yield f"level {plan.level} quantizes nothing in this checkpoint"
    names = [tensor.source.info.name for tensor in plan.tensors]
    config = plan.checkpoint.config or {}
    text = config.get("text_config")
    tied = config.get("tie_word_embeddings", (text or {}).get("tie_word_embeddings"))
    head = any(name.endswith("lm_head.weight") for name in names)
    if tied is False and not head and any("embed_tokens" in name for name in names):
        yield "tie_word_embeddings is false and there is no lm_head.weight; loaders may invent one"
    if tied and head:
        yield (
            "tie_word_embeddings is true and lm_head.weight is stored too; it is kept, and the "
            "report tells whether it equals the embedding"
        )


def _sources(plan: Plan) -> Iterator[str]:
    passed = sum(count for tensor, count in plan.kinds if tensor.treatment is Treatment.PASS)
    if passed:
        yield f"{passed} tensor(s) are MXFP4 already; codes and scales stay byte for byte"
    for label, count in _by_storage(plan, Treatment.DECODE).items():
        form = "BF16" if plan.format.payload != "fp8" else "FP8"
        yield f"{count} {label} tensor(s) are decoded to {form}"
    for label, count in _by_storage(plan, Treatment.QUANTIZE).items():
        yield f"{count} {label} tensor(s) are decoded to float32 and quantized"
    if plan.dropped:
        yield (
            f"{len(plan.dropped)} tensor(s) of the old quantization are dropped, such as "
            f"{plan.dropped[0].info.name}"
        )
    if plan.stale:
        yield f"not carried over, as they describe the old quantization: {', '.join(plan.stale)}"
    if plan.checkpoint.sidecars:
        yield (
            "carried over unchanged beside the shards, not in the index: "
            + ", ".join(plan.checkpoint.sidecars)
        )


def _by_storage(plan: Plan, treatment: Treatment) -> Counter[str]:
    found: Counter[str] = Counter()
    for tensor, count in plan.kinds:
        if tensor.treatment is treatment and not tensor.source.plain:
            found[STORAGES[tensor.source.storage].label] += count
    return found


def _shapes(plan: Plan) -> Iterator[str]:
    quantized = [(t, count) for t, count in plan.kinds if t.treatment is Treatment.QUANTIZE]
    cut = sum(count for tensor, count in quantized if tensor.decision.role.bank is not None)
    if cut and any(len(task.shape) > 2 for shard in plan.shards for task in shard.tasks):
        cut = 0
    if cut:
        yield f"{cut} stacked expert bank(s) are written as one matrix per expert"
    biases = sum(
        count
        for tensor, count in plan.kinds
        if tensor.decision.role.role is Role.BIAS and len(tensor.info.shape) > 1
    )
    if cut and biases:
        yield (
            f"{biases} stacked expert bias(es) keep their source names; "
            "loaders of per-expert checkpoints may not look for them"
        )
    turned = sum(
        count
        for tensor, count in quantized
        if tensor.decision.role.bank is None and tensor.decision.role.axis == 0
    )
    if turned:
        yield (
            f"{turned} weight(s) stored as [in, out] (Conv1D) are written as [out, in] Linear "
            "codes; transformers does not build such layers for Conv1D models"
        )
