"""The vocabulary: which words in tensor names mean what, each list in one place.

Words are whole name segments in lower case unless a comment says otherwise. They were collected
from public model code; a word alone never quantizes a tensor, it also has to sit in the right
place (see `rules`).
"""

from __future__ import annotations

import re


def stem(leaf: str) -> str:
    """A leaf of a bank without what only says "weight", "shared" or "several"."""
    return leaf.removesuffix("_weight").removeprefix("shared_").replace("projs", "proj")


def word_set(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


STACKS = word_set(
    "layers layer h blocks block decoder_layer decoder_layers encoder_layer encoder_layers "
    "transformer_layers transformer_blocks transformer_encoder mamba_layers linear_layers "
    "resblocks decoder_blocks encoder_blocks mtp mtp_block mtp_blocks mtp_layers mtp_modules "
    "nextn_layers nextn_predict_layers"
)
STACK_ENDINGS = re.compile(r"(?!.*(conv|feature|sampl|merger|adapter|proj)).*_(layers|blocks)")
"""Segments whose index counts layers: known words, and new words for layers and blocks."""

MTP = re.compile(r"mtp(_.*)?|nextn(_.*)?|midlayer|eagle.*|medusa.*|draft_.*|speculat.*")
"""A segment of a multi-token-prediction or draft block."""

MTP_LEAVES = frozenset({"eh_proj", "enorm", "hnorm", "shared_head", "e_proj", "h_proj"})
"""What only a prediction layer holds; a layer with one of these is not part of the trunk."""

LANGUAGE = word_set(
    "language_model text_model llm lm text_decoder language thinker llm_model text "
    "language_tower backbone_lm"
)
"""A prefix segment that says: from here on, the text trunk."""

TOWER = re.compile(
    r".*(vision|visual|image|audio|speech|video|whisper|siglip|talker|code2wav|token2wav|vocoder"
    r"|code_predictor|codec|depth_decoder|diffusion|vqmodel|mimi|acoustic|pixtral).*"
    r"|vit|v?it_.*|.*_vit|vpm|apm|tts|sam(_.*)?|clip(_.*)?|.*_clip|vae|vq.*|dit|.*_dit|aligner_vit"
    r"|patch_embed.*|perception|flow|bigvgan|sound_.*"
)
"""A prefix segment of a tower or a head that is not the text trunk."""

SPEECH_OUTPUT = re.compile(
    r".*(talker|code2wav|token2wav|vocoder|code_predictor|codec|depth_decoder).*|tts"
)
"""Towers that make sound."""

PROJECTOR = re.compile(
    r".*(projector|merger|connector|resampler|aligner|abstractor|perceiver|qformer|adapter)"
    r"(?!.*lora).*|mm_.*|mlp1|patch_merge.*|embed_(vision|audio|video|image)|vl_proj|img_proj.*"
)
"""A segment between a tower and the trunk."""

EMBEDDING = re.compile(
    r"wte|wpe|shared|emb|embd|.*embed(?!.*(norm|ln)).*|.*_emb|emb_.*|.*embd.*|tok_emb.*"
    r"|relative_attention_bias|rel_pos.*|.*position_bias|relative_position.*|time_.*_table"
)
"""A module leaf that holds a table of vectors."""

HEAD = re.compile(r"(.*_)?lm_?head(_.*)?|embed_out|codec_head|(.*_)?vocab_proj|unembed.*")
TOP_HEAD = word_set(
    "output head output_layer score classifier decoder logits predictions qa_outputs"
)
"""Heads that are recognised only outside the layers."""

NORM = re.compile(
    r".*norm(?!al)(alization)?(s|ing)?(_?\d+|_(a|b|f|x|y|q|k|v|in|out|pre|post|attn|mlp|ffn|mhc))?"
    r"|ln(_?.*)?|.*_ln(_.*|\d+)?|.*layrnorm|.*layer_?norm.*|.*rms_?norm.*"
)
"""A segment that names a normalisation."""

CONV = re.compile(r".*conv(\d*d?)?(_.*|\d+)?(?<!proj)|dwconv|patch_conv.*")
"""A module leaf that names a convolution."""

SIDE_CHANNEL = re.compile(
    r"hc_.*|(.*_)?hc|.*hyper_?conn.*|.*mhc.*|altup.*|laurel.*|.*per_layer_.*|ple(_.*)?|.*_res_proj"
    r"|.*residual_proj|.*lora.*|.*attn_res(_.*)?|engram.*|.*_adapter|adapter(_.*)?|.*engram.*"
    r"|router_aux.*|value_residual.*|.*resid_.*mix.*|x0_.*|.*_lambda.*"
)
"""Residual-stream mixers, per-layer embeddings and adapters: small, sensitive, kept."""

INDEXER = re.compile(r".*indexer.*|index_.*|lightning_index.*|idx_.*")
"""The scorer of sparse attention."""

COMPRESSOR = re.compile(r".*compress(or|ion|ed).*|.*compress")

LATENT = re.compile(
    r".*latent.*proj.*|fc[12]_latent.*|routed_expert_(down|up)_proj|(pre|post)_expert_proj"
    r"|expert_(down|up|in|out)_proj|latent_.*"
)
"""Projections into and out of the width that routed experts work in."""

SHARED_GATE = re.compile(r"shared?_(expert|experts|mlp)_gate|shared_gate|shared_experts?_router")
"""The scalar gate of a shared expert."""

SHARED = re.compile(
    r".*shared?_?(expert|mlp|ffn|feed_forward).*|extra_mlp|residual_mlp|chunk_experts"
    r"|shared_moe.*|shared_swiglu.*|dense_expert.*|common_expert.*|.*expert.*_shared"
)
"""An expert that every token visits."""

EXPERTS = re.compile(r"(.*_)?experts?(_(list|modules|bank|layers?|weights?|mlps?|#))?")
"""A container of routed experts."""

INDEXED_EXPERTS = frozenset({"moe", "deepspeed_experts"})
"""Containers of experts when an index follows."""

ROUTER = re.compile(r".*router.*|.*routing.*")
"""Anywhere in a segment: a router or a part of one."""

ROUTER_WORDS = word_set(
    "gate wg gating switch classifier gate_network weight_noise noise noisy gate_weight "
    "wgate_moe router_gate gate_fn topk_gate gate_linear gate_layer w_gate moe_gate "
    "expert_gate experts_gate gates wnoise w_noise linear_gate"
)
"""Routers by a whole segment; inside an expert or attention these words mean other things."""

ROUTER_BIAS = re.compile(
    r".*e_score_.*|.*correction_bias.*|expert_bias|experts_bias|balancing_bias.*|.*router.*_bias"
    r"|.*routing_bias.*|per_expert_scale|score_bias|gate_bias|expert_scale.*|routing_scale.*"
    r"|router_scale.*|tid2eid|moe_statics|expert_load.*|tokens_per_expert"
)
"""Vectors and tables that take part in choosing experts."""

STATE_LEAVES = re.compile(
    r"x_proj|dt_proj|dt_in_proj|in_proj_(a|b|ba|ab|dt|beta|alpha|g?k)|[abfg]_[ab]_proj|[ab]_proj"
    r"|[fg]_proj_[01]|f_proj|a_log|alog|d|dt_bias|dt|.*decay.*|bc(dt)?_proj|dtbc_proj"
    r"|gk_proj.*|beta_proj|alpha_proj|time_(decay|first|maa|faaaa|mix).*|.*forget_gate.*|fgate.*"
    r"|igate.*|(input|recurrent)_gate(_.*)?|rg_lru|recurrent_param|[wavg][12]|"
    r"(f|i)_?gate_?(proj|preact).*|ssm_.*"
)
"""Small projections and vectors of a recurrence; asked only where a recurrence is."""

STATE_ALWAYS = re.compile(
    r"x_proj|dt_proj|in_proj_(a|b|ba|ab)|a_log|dt_bias|f_[ab]_proj|g_[ab]_proj|bcdt_proj"
    r"|dt_in_proj|time_(decay|first|maa|faaaa).*|beta_proj|b_proj|a_proj"
)
"""State leaves that are so wherever they stand."""

RECURRENCE = re.compile(r".*(mamba|ssm|ssd|rg_?lru|recurrent|s6|rwkv|time_mix|tmix|xlstm|mlstm).*")
"""A segment of a recurrent block."""

ATTENTION = re.compile(
    r".*(attn|attention).*|mixer|temporal_block|token_mixer|sequence_mixer|time_mixer|mla|mha|gqa"
    r"|swa|kda|gdn|delta_?net|attn_?\d*"
)
"""A segment of a sequence-mixing block."""

ANY_MIXER = frozenset({"mixer"})
"""Blocks that are attention in one layer and a feed-forward block in another."""

FFN = re.compile(
    r".*mlps?(_?\d+|_block|_[a-z]+)?|.*ffns?(_?\d+|_block|_[a-z]+)?|.*feed_?forward(s|_?\d+|_.*)?"
    r"|ff|densereludense|.*swiglu.*|mixer|channel_mixer|dense_block|cmix|ff_.*|geglu.*|glu"
)
"""A segment of a feed-forward block."""

QKV_LEAVES = re.compile(
    r"[qkv]_proj|[qkv]|w[qkv]|w_[qkv]|[qkv]_lin|[qkv]_linear|query|key|value|queries|keys|values"
    r"|to_[qkv]|project_[qkv]|(query|key|value)_proj|(q|k|v|kv|qk|qkv)_proj|qkv|w_?qkv|qkv_linear|w_?pack"
    r"|query_key_value|c_attn|q_attn|in_proj_qkvz?|in_proj_(q|k|v|qk|kv)|to_(kv|qkv)|wkv|kv"
    r"|qkv_layer|linear_qkv|gqkv_proj|w[qkv]_d[uv]|fused_qkv.*|attention_qkv|attn_qkv|kv_proj|key_value|self_attention_qkv"
)
"""Projections from the residual stream into attention."""

MLA_LEAVES = re.compile(
    r"(q|kv)_[ab]_proj(_with_mqa)?|w(q|kv)_[ab](_with_mqa)?|(q|kv|k|v)_(down|up)_proj|(kv|q)_a|(kv|q)_b"
    r"|fused_qkv_a_proj(_with_mqa)?|qkv_a_proj(_with_mqa)?|wo_[ab]|o_[ab]_proj|(k|v)_b_proj"
    r"|w(k|v)_b|(q|kv)_(down|up)|linear_(q|kv)_(down|up)_proj|kv_a_proj"
)

OUTPUT_LEAVES = re.compile(
    r"o_proj|out_proj|wo|w_o|o|o_lin|out_lin|dense|c_proj|proj|out|output_proj|to_out|linear_out"
    r"|attn_out|attention_out|wout|w_out|o_linear|out_linear|attention_output|proj_out|output|linear_proj"
    r"|final_linear|output_dense|wo_ud"
)
"""Projections from attention back into the residual stream."""

ATTENTION_GATE = re.compile(
    r"g_proj|gate_proj|gate|output_gate(_proj)?|out_gate|og_proj|wg|wgate|g|in_proj_z|z_proj"
    r"|attn_gate(_proj)?|o_gate(_proj)?|head_gate(_proj)?|gate_linear|w_gate|gating|.*sink_proj"
    r"|attention_gate(_proj)?|g_linear|gate_attn|linear_gate|.*gate.*_proj"
)
"""Gates on the output of attention."""

FFN_IN = re.compile(
    r"gate_proj|up_proj|w1|w3|v1|fc1|fc_1|fc3|fc_3|gate_up_proj|up_gate_proj|w12|w13|w1_w3|w31"
    r"|w_in|gate_up|wi(_\d+|_gate|_up)?|c_fc(_\d+)?|fc_in|dense_h_to_4h(_gate|_up|\d*)?|lin1|linear_?1"
    r"|input_linear|in_proj|gate|up|linear_v|linear|fc11|fc12|w_gate|w_up|gate_linear|linear_gate|up_linear"
    r"|linear_fc1|h_to_4h|dense_1|ff1|intermediate|weight_gate|weight_up|merged_linear|w_1|w_3"
    r"|gate_and_up_proj|proj_up(_gate)?|layer_1|w_0|w13_dn|w_gate_up|ffn_gate|ffn_up|key|xw"
)
"""Projections from the residual stream into a feed-forward block."""

FFN_OUT = re.compile(
    r"down_proj|w2|fc2|fc_2|wo|w_out|c_proj|fc_out|dense_4h_to_h|lin2|linear_?2|output_linear"
    r"|out_proj|down|linear_1|w_down|down_linear|linear_fc2|4h_to_h|dense_2|ff2|weight_down|w_2"
    r"|output|proj_2|w2_md|proj_down|layer_2|ffn_down|ff_out|value"
)
"""Projections from a feed-forward block back into the residual stream."""

FUSED_IN: dict[str, tuple[str, str]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "gate_and_up_proj": ("gate_proj", "up_proj"),
    "up_gate_proj": ("up_proj", "gate_proj"),
    "gate_up": ("gate", "up"),
    "input_linear": ("gate_proj", "up_proj"),
    "w_gate_up": ("w_gate", "w_up"),
    "w13": ("w1", "w3"),
    "w1_w3": ("w1", "w3"),
    "w31": ("w3", "w1"),
    "w12": ("w1", "w2"),
}
"""Leaves that hold two projections, and the names of the two in stored order."""

LEAF_WRAPPERS = word_set("linear base_layer linear_layer inner_linear wrapped")
"""Leaves that say nothing: the module around them has the name."""

PROJECTION = re.compile(r".*proj|.*qkv.*|w[qkvo123]|w_[a-z]+|[qkvo]|fc[123]|query|key|value|dense")
"""Names of single projections that a leaf wrapper may stand under."""

ATTENTION_WRAPPERS = word_set("self output qkv_proj out_proj attn_module inner")
"""What may stand between an attention segment and its projections."""

FFN_WRAPPERS = word_set("w_in w_out net inner intermediate output")
"""What may stand between a feed-forward segment and its projections."""

GATE_PARENT = re.compile(r"(.*_)?(gate|gating)(_mlp|_net.*)?")
"""A parent that makes a small network a gate."""

DIRECT_ATTENTION = re.compile(r"[qkvo]_proj|att_proj|attn_(out|qkv|q|k|v|output)")
DIRECT_FFN = re.compile(r"ff_(proj|out)|ffn_(gate|up|down)")
"""Projections that carry the name of their block and stand directly in the layer."""
