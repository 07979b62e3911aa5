"""Roles against module classes: models built without memory, judged by what their authors wrote.

The classes of the modules that own a parameter say what it is (an embedding, a norm, a router, a
convolution), and the expert modules say whether they are stored input-major. Rules see only names,
shapes and the config.
"""

import contextlib
import json
import re

import pytest

from mxfp4.converters.decide import Action, decide
from mxfp4.converters.header import TensorInfo
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.converters.roles import Role, classify

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
CONFIGS = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING
auto = pytest.importorskip("transformers.models.auto.modeling_auto")

pytestmark = pytest.mark.filterwarnings("ignore")


def _names(text):
    return text.split()


CLASSES = {
    **auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    **auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
MIXTURES = _names("""
afmoe aria aria_text axk1 axk2 bailing_hybrid cohere2_moe deepseek_v2 deepseek_v3
deepseek_v32 deepseek_v4 ernie4_5_moe exaone_moe flex_olmo glm4_moe glm4_moe_lite glm4v_moe
glm5_next glm_moe_dsa gpt_oss granitemoe granitemoehybrid granitemoeshared hy_v3 hy_v4
inkling2_text inkling_text jamba jetmoe kimi_linear kolibri1 laguna lara_mini llama4_text
longcat_flash mimo_v2_flash minimax minimax_m2 minimax_m3_vl mistral4 mixtral muse_spark
nemotron_h nllb-moe olmoe phimoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next
qwen3_vl_moe sarvam_moe solar_open step3p7 switch_transformers zaya
""")
DENSE = _names("""
apertus bamba bart bitnet bloom codegen cohere2 deepseek_vl falcon falcon_h1 falcon_mamba
fuyu gemma2 gemma3 glm4 got_ocr2 gpt2 gpt_bigcode gpt_neo gpt_neox gptj granite helium
idefics3 internvl lfm2 llama llava mamba2 mistral3 mllama mpt olmo2 olmo_hybrid opt
persimmon phi phi3 pix2struct qwen2_vl qwen3_vl recurrent_gemma rwkv seed_oss smollm3
stablelm starcoder2 t5 t5gemma xglm zamba2
""")
KEEP_CLASSES = re.compile(
    r"Embedding|Conv\d?d$|\w*Norm\w*|\w*Router\w*|\w*Indexer\w*|\w*MoEGate\w*"
)
NOT_A_NORM = re.compile(r"Embedding\w+|.*(Attention|MLP|SelfOutput|DecoderLayer|Block)$|Conv1D")
LAYER_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
    "depth",
)
LAYER_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")


def shorten(config, depth=0):
    """Keep four layers of each stack, with every kind of layer among them."""
    for name in LAYER_COUNTS:
        if isinstance(getattr(config, name, None), int) and getattr(config, name) > 4:
            _try(config, name, 4)
    for name in LAYER_LISTS:
        value = getattr(config, name, None)
        if isinstance(value, list) and len(value) > 4:
            _try(config, name, ([*dict.fromkeys(value), *value])[:4])
    for name in ("first_k_dense_replace", "num_dense_layers"):
        if (getattr(config, name, None) or 0) > 1:
            _try(config, name, 1)
    if depth < 3:
        for value in list(vars(config).values()):
            if hasattr(value, "to_dict") and not isinstance(value, type):
                shorten(value, depth + 1)


def _try(config, name, value):
    with contextlib.suppress(Exception):  # a derived value that cannot be set stays
        setattr(config, name, value)


def build(model_type):
    config = CONFIGS[model_type]()
    shorten(config)
    model_class = getattr(transformers, CLASSES[model_type])
    with torch.device("meta"):
        model = model_class(config)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    tensors = [
        TensorInfo(name, "BF16", tuple(value.shape))
        for name, value in model.state_dict().items()
        if name not in tied
    ]
    return model, tensors, json.loads(config.to_json_string(use_diff=False))


def owners(model, name):
    """Modules from the root down to the one that holds the parameter."""
    module, chain = model, []
    for part in name.split(".")[:-1]:
        module = getattr(module, part)
        chain.append(module)
    return chain


@pytest.fixture(params=[*MIXTURES, *DENSE])
def zoo_model(request):
    try:
        return build(request.param)
    except (ImportError, KeyError, AttributeError, TypeError, ValueError) as error:
        pytest.skip(f"{request.param} cannot be built here: {error}")


def test_no_kept_class_is_quantized_and_experts_are_found(zoo_model):
    model, tensors, config = zoo_model
    roles = classify(tensors, config)
    decisions = decide(tensors, roles, Recipe(level=Level.LINEAR))
    wrong = []
    for info in tensors:
        chain = owners(model, info.name)
        names = [type(module).__name__ for module in chain[-2:]]
        kept = any(KEEP_CLASSES.fullmatch(n) and not NOT_A_NORM.fullmatch(n) for n in names)
        if kept and decisions[info.name].action is Action.QUANTIZE:
            wrong.append((info, names, decisions[info.name].reason))
        experts = [m for m in chain if type(m).__name__.endswith("Experts")]
        if experts and len(info.shape) == 3:
            role = roles[info.name]
            if role.role not in (Role.EXPERT, Role.SHARED_EXPERT):
                wrong.append((info, names, role))
            transposed = getattr(experts[-1], "is_transposed", "Llama4" in str(type(experts[-1])))
            if role.axis != (1 if transposed else 2):
                wrong.append((info, names, role))
    assert not wrong
