"""Serving engines: the layout each of them loads, and what it will not load of a plan.

Rules were read in the engines' sources: vLLM 0.33, SGLang 0.5.23, TokenSpeed 0.1, transformers
5.24, TensorRT-LLM, llama.cpp and mlx-lm 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mxfp4.converters.checkpoint import QUANTIZATION_KEYS
from mxfp4.converters.formats.stacked import MLX
from mxfp4.converters.plan import OutputOptions, Plan, Treatment
from mxfp4.converters.roles import Role
from mxfp4.converters.tasks import MODULES
from mxfp4.errors import RecipeError

_NATIVE: Mapping[str, str] = {"gpt_oss": "gpt-oss", "deepseek_v4": "deepseek-v4"}
"""Architectures with a layout of their own, which every engine takes for them."""

_MIMO = "mimo_v2"
_KIMI = frozenset({"kimi_k3"})


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout for a model in an engine, with a reason that is worth saying (or none)."""

    format: str
    activations: str = "none"
    note: str = ""


Chooser = Callable[[str, Mapping[str, Any]], Choice]
Rule = Callable[[Plan], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Engine:
    """How to write for an engine, and what to tell about a plan."""

    name: str
    choose: Chooser
    rules: tuple[Rule, ...]


def _has_fp8(config: Mapping[str, Any]) -> bool:
    places = (config, config.get("text_config") or {})
    entries = [place.get(key) for place in places for key in QUANTIZATION_KEYS]
    return any(isinstance(e, Mapping) and e.get("quant_method") == "fp8" for e in entries)


def _vllm(model: str, config: Mapping[str, Any]) -> Choice:
    if _has_fp8(config):
        return Choice("mimo", note="dense layers stay FP8, routed experts become MXFP4")
    return Choice("compressed-tensors")


def _sglang(model: str, config: Mapping[str, Any]) -> Choice:
    if model in _KIMI:
        return Choice("compressed-tensors")
    if model.startswith(_MIMO):
        return Choice("mimo")
    return Choice("quark", "mxfp4", "SGLang loads MXFP4 of this model as Quark W4A4, on ROCm")


def _plain(model: str, config: Mapping[str, Any]) -> Choice:
    return Choice("compressed-tensors")


def _llama_cpp(model: str, config: Mapping[str, Any]) -> Choice:
    if model in _KIMI:
        return Choice("compressed-tensors")
    if model.startswith(_MIMO):
        return Choice("mimo")
    note = (
        "its converter repacks MXFP4 of gpt-oss, Kimi-K3, DeepSeek-V4 and MiMo only; this model "
        "goes through BF16 and llama-quantize MXFP4_MOE"
    )
    return Choice("bf16", note=note)


def _mlx(model: str, config: Mapping[str, Any]) -> Choice:
    if model in _KIMI:
        return Choice("compressed-tensors")
    if model in (MLX.model_types or ()):
        return Choice("mlx")
    note = "mlx-lm names this model's tensors in its own way; convert the result with mlx_lm"
    return Choice("bf16", note=note)


def _dense(plan: Plan) -> list[str]:
    """MXFP4 weights that are not routed experts."""
    return [
        tensor.info.name
        for tensor in plan.tensors
        if tensor.treatment in MODULES
        and Role.EXPERT not in (tensor.decision.role.role, tensor.decision.role.inner)
    ]


def _model(plan: Plan) -> str:
    return str((plan.checkpoint.config or {}).get("model_type"))


def _packed(plan: Plan) -> bool:
    return any(tensor.treatment in MODULES for tensor in plan.tensors)


def _experts_only(why: str, formats: frozenset[str]) -> Rule:
    def rule(plan: Plan) -> Iterator[str]:
        dense = _dense(plan)
        if dense and plan.options.format in formats:
            yield f"{len(dense)} MXFP4 weights that are not routed experts ({dense[0]}): {why}"

    return rule


_COMPRESSED = frozenset({"compressed-tensors"})


def _known_layouts(*names: str) -> Rule:
    def rule(plan: Plan) -> Iterator[str]:
        if plan.options.format not in (*names, *_NATIVE.values(), "bf16", "fp8"):
            yield f"the layout {plan.options.format}: this engine has no reader for it"

    return rule


def _kimi_dense(plan: Plan) -> Iterator[str]:
    dense = _dense(plan)
    if _model(plan) in _KIMI and dense:
        yield f"MXFP4 outside the routed experts of Kimi-K3, such as {dense[0]}"


def _sglang_names(plan: Plan) -> Iterator[str]:
    if plan.options.format in _COMPRESSED and _model(plan) not in _KIMI and _packed(plan):
        yield "experts named weight_packed are skipped without an error for models but Kimi-K3"
    if plan.options.format == "quark" and plan.options.activations != "mxfp4":
        yield "Quark without MXFP4 activations is not recognised; use --activations mxfp4"


def _float16(plan: Plan) -> Iterator[str]:
    config = plan.checkpoint.config or {}
    if _packed(plan) and (config.get("dtype") or config.get("torch_dtype")) == "float16":
        yield "served in float16, scales below 2^-24 and above 2^15 are lost; serve in bfloat16"


def _fp8_activations(plan: Plan) -> Iterator[str]:
    if plan.options.activations == "fp8":
        yield "scale bytes above 249 stop the Marlin kernel when activations are FP8"
        yield "FP8 activations need compressed-tensors 0.20 or newer"


def _mtp_experts(plan: Plan) -> Iterator[str]:
    """The generic layout makes every routed expert MXFP4, prediction blocks included."""
    if plan.options.format not in ("mxfp4", "mimo"):
        return
    plain = [
        tensor.info.name
        for tensor in plan.tensors
        if tensor.treatment not in MODULES
        and Role.EXPERT in (tensor.decision.role.role, tensor.decision.role.inner)
    ]
    if plain and _packed(plan):
        yield f"{len(plain)} routed experts that are not MXFP4, such as {plain[0]}"


def _decoded(plan: Plan) -> Iterator[str]:
    lost = [t for t in plan.tensors if t.treatment is Treatment.DECODE]
    if lost and plan.options.format == "deepseek-v4":
        yield f"{len(lost)} dense weights in BF16, such as {lost[0].info.name}"


ENGINES: Mapping[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            "vllm",
            _vllm,
            (
                _known_layouts("compressed-tensors", "mxfp4", "quark", "mimo"),
                _kimi_dense,
                _mtp_experts,
                _float16,
                _fp8_activations,
                _decoded,
            ),
        ),
        Engine(
            "sglang",
            _sglang,
            (
                _known_layouts("compressed-tensors", "quark", "mimo"),
                _sglang_names,
                _experts_only("dense compressed-tensors MXFP4 has no scheme", _COMPRESSED),
            ),
        ),
        Engine("tokenspeed", _plain, (_known_layouts("compressed-tensors", "quark"),)),
        Engine(
            "transformers",
            _plain,
            (_known_layouts("compressed-tensors", "quark"), _fp8_activations),
        ),
        Engine(
            "trtllm",
            _plain,
            (
                _known_layouts("compressed-tensors"),
                _experts_only("only mixture-of-experts layers load MXFP4", _COMPRESSED),
            ),
        ),
        Engine(
            "llama.cpp",
            _llama_cpp,
            (_known_layouts("compressed-tensors", "mimo"), _kimi_dense),
        ),
        Engine("mlx", _mlx, (_known_layouts("mlx", "compressed-tensors"),)),
    )
}
"""Every engine by its command-line name."""


def choose_layout(engine: str, config: Mapping[str, Any]) -> Choice:
    """The layout that an engine loads for a model; raises `RecipeError` for unknown engines."""
    if engine not in ENGINES:
        raise RecipeError(
            f"unknown engine {engine!r}", hint="known engines: " + ", ".join(sorted(ENGINES))
        )
    model = str(config.get("model_type"))
    if model in _NATIVE:
        return Choice(_NATIVE[model])
    return ENGINES[engine].choose(model, config)


def engine_remarks(engine: str, plan: Plan) -> tuple[str, ...]:
    """What an engine will not load of a plan, or only under a condition."""
    return tuple(text for rule in ENGINES[engine].rules for text in rule(plan))


def options_for(engine: str, config: Mapping[str, Any], base: OutputOptions) -> OutputOptions:
    """Output options with the engine's layout; activations as asked, else as it needs them."""
    choice = choose_layout(engine, config)
    activations = base.activations if base.activations != "none" else choice.activations
    return OutputOptions(choice.format, base.max_shard_bytes, base.layout, activations)
