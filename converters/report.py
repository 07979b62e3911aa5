"""What a conversion did, for machines (`mxfp4_manifest.json`) and for people (`mxfp4_report.md`).

Both depend on plan and records alone, never on when, where or in how many attempts they were made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mxfp4.converters.formats import Payload
from mxfp4.converters.plan import CODEC_ID, Plan, Treatment
from mxfp4.converters.state import ShardRecord
from mxfp4.version import __version__

MANIFEST_NAME = "mxfp4_manifest.json"
REPORT_NAME = "mxfp4_report.md"
MANIFEST_FORMAT = "mxfp4-manifest/1"
_BAR_WIDTH = 40
_WORST = 10
_KEPT_ROWS = 200


def manifest(plan: Plan, records: Sequence[ShardRecord]) -> dict[str, Any]:
    """Everything a later check needs: recipe, decisions, hashes and errors."""
    return {
        "format": MANIFEST_FORMAT,
        "mxfp4": __version__,
        "codec": CODEC_ID,
        **({"codes": plan.codes} if plan.codes else {}),
        "plan": plan.id,
        "recipe": plan.recipe.to_json(),
        "level": str(plan.level),
        "output_format": plan.options.format,
        "totals": dict(plan.totals),
        "roles": role_table(plan),
        "error": overall_error(records),
        "worst_modules": worst_modules(records),
        "warnings": list(plan.warnings),
        "not_as_asked": not_as_asked(plan),
        "tied_head": tied_head(plan, records),
        **({"lossy_blocks": lossy_blocks(records)} if plan.format.payload == "fp8" else {}),
        "files": {
            record.shard: {"bytes": record.byte_count, "sha256": record.sha256}
            for record in records
        },
    }


def role_table(plan: Plan) -> list[dict[str, Any]]:
    """Tensors, parameters and bytes per role, action and dtype, largest first."""
    rows: dict[tuple[str, str, str], Counter[str]] = {}
    for tensor, count in plan.kinds:
        key = (str(tensor.decision.role.role), str(tensor.treatment), tensor.info.dtype)
        row = rows.setdefault(key, Counter())
        parameters, size = tensor.info.element_count, tensor.byte_count
        row.update(tensors=count, parameters=count * parameters, bytes=count * size)
    ordered = sorted(rows.items(), key=lambda item: (-item[1]["bytes"], item[0]))
    return [
        {"role": role, "action": action, "dtype": dtype, **dict(counts)}
        for (role, action, dtype), counts in ordered
    ]


def not_as_asked(plan: Plan) -> list[dict[str, str]]:
    """Tensors that level or patterns wanted to quantize and that were kept, with the reason."""
    return [
        {"tensor": tensor.info.name, "reason": tensor.decision.reason} for tensor in plan.blocked
    ]


def overall_error(records: Sequence[ShardRecord]) -> dict[str, Any]:
    """Error statistics of all quantized elements together.

    Combined from the shards' sums; the relative L2 error is the root of summed squares.
    """
    totals = [record.statistics[""] for record in records if "" in record.statistics]
    if not totals:
        return {}
    elements = sum(total["elements"] for total in totals)
    signal = sum(total["sum_squares"] for total in totals)
    error = sum(total["sum_squared_error"] for total in totals)
    counts = Counter[str]()
    for total in totals:
        counts.update(total["scale_histogram"])
    return {
        "elements": elements,
        "relative_l2": (error / signal) ** 0.5 if signal else 0.0,
        "max_abs_error": max(total["max_abs_error"] for total in totals),
        "clipped_share": _share(totals, "clipped", elements),
        "flushed_share": _share(totals, "flushed", elements),
        "zero_blocks": sum(total["zero_blocks"] for total in totals),
        "scale_histogram": {byte: counts[byte] for byte in sorted(counts, key=int)},
    }


def worst_modules(records: Sequence[ShardRecord], count: int = _WORST) -> list[dict[str, Any]]:
    """The modules with the largest relative error, worst first."""
    rows = [
        {"module": module, "relative_l2": found["relative_l2"]}
        for record in records
        for module, found in record.statistics.items()
        if module and "relative_l2" in found
    ]
    return sorted(rows, key=lambda row: (-row["relative_l2"], row["module"]))[:count]


def markdown(plan: Plan, records: Sequence[ShardRecord]) -> str:
    """The report for people."""
    totals, error = plan.totals, overall_error(records)
    before, after = totals["bytes_before"], totals["bytes_after"]
    lines = [
        "# MXFP4 conversion report",
        "",
        f"{totals['quantized']:,} of {totals['tensors']:,} tensors were quantized "
        f"(level `{plan.level}`, scale rule `{plan.recipe.rule}`, layout "
        f"`{plan.options.format}`); {_others(plan)}",
        "",
        "```",
        f"source {_bar(before, before)} {before:>17,} bytes",
        f"output {_bar(after, before)} {after:>17,} bytes",
        "```",
        "",
    ]
    if error:
        lines += [
            f"Relative L2 error of the quantized weights {error['relative_l2']:.4f}, "
            f"largest absolute error {error['max_abs_error']:.4g}, "
            f"clipped {error['clipped_share']:.3%}, flushed to zero {error['flushed_share']:.3%}, "
            f"blocks of zeros {error['zero_blocks']:,}.",
            "",
        ]
    lines += _attention(plan, records)
    lines += ["## By role", "", *_table(role_table(plan)), ""]
    if error:
        lines += ["## Shared scales", "", "```", *_histogram(error["scale_histogram"]), "```", ""]
        worst = worst_modules(records)
        lines += ["## Largest relative errors", "", *_table(worst), ""]
    lines += ["## Kept in the source dtype", "", *_kept(plan), ""]
    files = [{"file": r.shard, "bytes": r.byte_count, "sha256": r.sha256} for r in records]
    lines += ["## Files", "", *_table(files), "", f"Plan `{plan.id}`.", ""]
    return "\n".join(lines)


def _others(plan: Plan) -> str:
    passed, decoded = plan.totals["passed"], plan.totals["decoded"]
    if not passed and not decoded:
        return "all others are byte-identical to the source."
    return (
        f"{passed:,} were MXFP4 already and keep their codes and scales byte for byte, "
        f"{decoded:,} were decoded, and all others are byte-identical to the source."
    )


def tied_head(plan: Plan, records: Sequence[ShardRecord]) -> dict[str, Any]:
    """Whether config and file agree about the output head: the flag, and what is stored.

    `stored` is absent, equal or different; equality is that of the bytes written.
    """
    config = plan.checkpoint.config or {}
    tied = config.get("tie_word_embeddings")
    if tied is None and isinstance(config.get("text_config"), Mapping):
        tied = config["text_config"].get("tie_word_embeddings")
    hashes = {name: digest for r in records for name, digest in r.tensors.items()}
    head = next((h for name, h in hashes.items() if name.endswith("lm_head.weight")), None)
    table = next((h for name, h in hashes.items() if name.endswith("embed_tokens.weight")), None)
    if table is None:
        return {}
    stored = "absent" if head is None else "equal" if head == table else "different"
    return {"tie_word_embeddings": tied, "lm_head": stored}


def _head_note(plan: Plan, records: Sequence[ShardRecord]) -> list[str]:
    found = tied_head(plan, records)
    if not found.get("tie_word_embeddings") or found["lm_head"] == "absent":
        return []
    if found["lm_head"] == "equal":
        return ["- `lm_head.weight` equals the embedding, as tie_word_embeddings says"]
    return [
        "- `lm_head.weight` differs from the embedding although tie_word_embeddings is true: "
        "engines that follow the config will not use it"
    ]


def lossy_blocks(records: Sequence[ShardRecord]) -> int:
    """FP8 blocks whose values are not all what they were."""
    return sum(
        found.get("lossy_blocks", 0) for record in records for found in record.statistics.values()
    )


def _attention(plan: Plan, records: Sequence[ShardRecord]) -> list[str]:
    rows = [f"- {text}" for text in plan.warnings]
    rows += [
        f"- `{row['tensor']}` was not quantized: {row['reason']}" for row in not_as_asked(plan)
    ]
    rows += _head_note(plan, records)
    if plan.format.payload is Payload.FP8:
        rows.append(f"- {lossy_blocks(records):,} FP8 block(s) are not exactly what they were")
    return ["## Worth knowing", "", *rows, ""] if rows else []


def kept_groups(plan: Plan) -> list[dict[str, Any]]:
    """Kept tensors by role and reason, unrecognised names first."""
    groups: dict[tuple[bool, str, str], dict[str, Any]] = {}
    for tensor, count in plan.kinds:
        if tensor.treatment is not Treatment.QUANTIZE:
            role, reason = tensor.decision.role, tensor.decision.reason
            key = (role.recognised, str(role.role), reason)
            facts = {"recognised": role.recognised, "role": key[1], "tensors": 0, "reason": reason}
            group = groups.setdefault(key, {**facts, "first": tensor.info.name})
            group["tensors"] += count
    return [group for _, group in sorted(groups.items(), key=lambda item: item[0])]


def _kept(plan: Plan) -> list[str]:
    groups = kept_groups(plan)
    text = _table(groups[:_KEPT_ROWS])
    if len(groups) > _KEPT_ROWS:
        text.append(f"\n{len(groups) - _KEPT_ROWS} more reasons: `mxfp4 plan --tensors`.")
    return text


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return ["none"]
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    return lines + ["| " + " | ".join(_cell(row[name]) for name in names) + " |" for row in rows]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")


def _histogram(counts: Mapping[str, int]) -> list[str]:
    """One bar per scale byte that occurs."""
    top = max(counts.values(), default=0)
    return [
        f"2^{int(byte) - 127:<5} {_bar(count, top)} {count:>14,} blocks"
        for byte, count in counts.items()
    ]


def _bar(part: int, whole: int) -> str:
    filled = round(_BAR_WIDTH * part / whole) if whole else 0
    return ("#" * filled).ljust(_BAR_WIDTH)


def _share(totals: Sequence[Mapping[str, Any]], key: str, elements: int) -> float:
    return float(sum(total[key] for total in totals) / elements) if elements else 0.0
