"""More architectures: vendors' own loaders, training frameworks, diffusion, hybrids and add-ons.

The lines are those of `families` in conftest.py.
"""

import pytest

LAYERS = 3
BASE = {"hidden_size": 128, "num_hidden_layers": LAYERS, "vocab_size": 512}
MOE = {**BASE, "num_experts": 8}

FAMILIES = {
    "hunyuan mixture": (
        {**MOE, "moe_topk": 2, "num_shared_expert": 1},
        """
        model.layers.{l}.self_attn.qkv_proj.weight                    HHH,H  attention! 1
        model.layers.{l}.self_attn.query_layernorm.weight             32     norm -
        model.layers.{l}.mlp.gate.wg.weight                           E,H    router 1
        model.layers.{l}.mlp.shared_mlp.gate_and_up_proj.weight       II,H   shared_expert! 1
        model.layers.{l}.mlp.experts.{e}.gate_and_up_proj.weight      II,H   expert! 1
        model.layers.{l}.mlp.experts.{e}.down_proj.weight             H,I    expert! 1
        patch_embed.model.0.weight                                    H,16,1,1 ? -
        timestep_emb.mlp.0.weight                                     H,H    ? 1
        time_embed_2.mlp.2.weight                                     H,H    ? 1
        vae.decoder.conv_in.weight                                    H,16,3,3,3 ? -
        """,
    ),
    "pangu": (
        MOE,
        """
        model.layers.{l}.mlp.gate.weight                      E,H  router 1
        model.layers.{l}.mlp.router_scale                     1,E  router_bias -
        model.layers.{l}.mlp.experts.{e}.gate_proj.weight     I,H  expert! 1
        model.layers.{l}.mlp.shared_expert.up_proj.weight     I,H  shared_expert! 1
        model.layers.{l}.pre_mlp_layernorm.weight             H    norm -
        """,
    ),
    "phixtral": (
        {"n_embd": 128, "n_layer": LAYERS, "vocab_size": 512, "num_local_experts": 8},
        """
        transformer.embd.wte.weight                  V,H    embedding 1
        transformer.h.{l}.mixer.Wqkv.weight          HHH,H  attention! 1
        transformer.h.{l}.moe.gate.weight            E,H    router 1
        transformer.h.{l}.moe.mlp.{e}.fc1.weight     I,H    expert! 1
        transformer.h.{l}.moe.mlp.{e}.fc2.weight     H,I    expert! 1
        lm_head.linear.weight                        V,H    lm_head 1
        lm_head.ln.weight                            H      norm -
        """,
    ),
    "kimi linear": (
        {**MOE, "linear_attn_config": {"num_heads": 4}},
        """
        model.layers.{l}.self_attn.q_conv1d.weight                     H,1,4    conv -
        model.layers.{l}.self_attn.A_log                               1,1,4,1  ssm_small -
        model.layers.{l}.self_attn.dt_bias                             H        ssm_small -
        model.layers.{l}.self_attn.f_a_proj.weight                     32,H     ? 1
        model.layers.{l}.self_attn.f_b_proj.weight                     H,32     ? 1
        model.layers.{l}.self_attn.g_b_proj.weight                     H,32     ? 1
        model.layers.{l}.self_attn.b_proj.weight                       N,H      ? 1
        model.layers.{l}.block_sparse_moe.gate.weight                  E,H      router 1
        model.layers.{l}.block_sparse_moe.gate.e_score_correction_bias E        router_bias -
        model.layers.{l}.block_sparse_moe.experts.{e}.w1.weight        I,H      expert! 1
        """,
    ),
    "experts narrower than the model": (
        {**BASE, "n_routed_experts": 8, "moe_latent_size": 64},
        """
        backbone.layers.{l}.mixer.gate.weight                        E,H  router 1
        backbone.layers.{l}.mixer.gate.e_score_correction_bias       E    router_bias -
        backbone.layers.{l}.mixer.fc1_latent_proj.weight             D,H  ? 1
        backbone.layers.{l}.mixer.fc2_latent_proj.weight             H,D  ? 1
        backbone.layers.{l}.mixer.experts.{e}.up_proj.weight         I,D  expert! 1
        backbone.layers.{l}.mixer.experts.{e}.down_proj.weight       D,I  expert! 1
        backbone.layers.{l}.mixer.shared_experts.up_proj.weight      I,H  shared_expert! 1
        """,
    ),
    "flattened experts whose way in is fused": (
        MOE,
        """
        model.layers.{l}.ffn.router.layer.weight     E,H    router 1
        model.layers.{l}.ffn.experts.mlp.w13         EII,H  expert! 1
        model.layers.{l}.ffn.experts.mlp.w2          EI,H   expert! 0
        """,
    ),
    "flattened experts whose names do not tell the way": (
        {"dim": 128, "n_layers": LAYERS, "vocab_size": 512, "moe_args": {"num_experts": 8}},
        """
        layers.{l}.feed_forward.router_DE                    H,E   router 0
        layers.{l}.feed_forward.experts.moe_w_in_eD_F        EH,I  ? 1
        layers.{l}.feed_forward.experts.moe_w_out_eF_D       EI,H  ? 1
        layers.{l}.attention.wq.weight                       H,H   attention! 1
        """,
    ),
    "experts of megatron numbered in the parameter": (
        MOE,
        """
        embedding.word_embeddings.weight                           V,H   embedding 1
        decoder.layers.{l}.mlp.router.weight                       E,H   router 1
        decoder.layers.{l}.mlp.experts.linear_fc1.weight{e}        II,H  ? 1
        decoder.layers.{l}.mlp.experts.linear_fc2.weight{e}        H,I   ? 1
        decoder.layers.{l}.mlp.shared_experts.linear_fc1.weight    II,H  shared_expert! 1
        decoder.layers.{l}.mlp.shared_experts.gate_weight          1,H   shared_expert_gate 1
        output_layer.weight                                        V,H   lm_head 1
        """,
    ),
    "deepspeed": (
        MOE,
        """
        model.layers.{l}.mlp.deepspeed_moe.gate.wg.weight    E,H  router 1
        model.layers.{l}.mlp.deepspeed_moe.experts.deepspeed_experts.{e}.w1.weight I,H expert! 1
        model.layers.{l}.mlp.coefficient.weight              2,H  ? 1
        """,
    ),
    "routers with noise": (
        MOE,
        """
        model.layers.0.moe.w_gate                          H,E  router 0
        model.layers.0.moe.w_noise                         H,E  router 0
        model.layers.1.moe.router.topkroute_linear.weight  E,H  router 1
        model.layers.1.moe.router.noise_linear.weight      E,H  router 1
        model.layers.{l}.moe.experts.{e}.fc1.weight        I,H  expert! 1
        model.layers.{l}.moe.experts.{e}.fc2.weight        H,I  expert! 1
        """,
    ),
    "routers under many names": (
        MOE,
        """
        model.layers.{l}.mlp.expert_selector.weight       E,H  router 1
        model.layers.{l}.mlp.topk_gate.weight             E,H  router 1
        model.layers.{l}.mlp.routing_gate.weight          E,H  router 1
        model.layers.{l}.mlp.expert_gate.weight           E,H  router 1
        model.layers.{l}.mlp.gate_network.0.weight        D,H  router 1
        model.layers.{l}.mod_router.weight                1,H  router 1
        model.layers.{l}.mlp.gating_residual.weight       E,E  ? 1
        model.layers.{l}.mlp.const_experts.0.wg.weight    2,H  ? 1
        model.layers.{l}.mlp.experts.{e}.up_proj.weight   I,H  expert! 1
        """,
    ),
    "a general name beside experts": (
        BASE,
        """
        model.layers.0.mlp.linear.weight                  12,H  ? 1
        model.layers.1.mlp.fc1.weight                     12,H  ? 1
        model.layers.2.mlp.fc1.weight                     I,H   mlp! 1
        model.layers.2.mlp.fc2.weight                     H,I   mlp! 1
        model.layers.{l}.mlp.experts.{e}.up_proj.weight   I,H   expert! 1
        model.layers.{l}.mlp.experts.{e}.down_proj.weight H,I   expert! 1
        """,
    ),
    "diffusion transformer with experts": (
        {"num_routed_experts": 8, "num_layers": LAYERS, "num_attention_heads": 4},
        """
        double_stream_blocks.{l}.block.adaLN_modulation.1.weight       HHHHHH,H  ? 1
        double_stream_blocks.{l}.block.ff_i.gate.weight                E,H       router 1
        double_stream_blocks.{l}.block.ff_i.experts.{e}.w1.weight      I,H       expert! 1
        double_stream_blocks.{l}.block.ff_i.shared_experts.w1.weight   S,H       shared_expert! 1
        x_embedder.proj.weight                                         H,64      ? 1
        t_embedder.timestep_embedder.linear_1.weight                   H,H       ? 1
        caption_projection.0.linear.weight                             H,H       ? 1
        final_layer.linear.weight                                      64,H      ? 1
        """,
    ),
    "heads of rewards and drafts, and adapters": (
        BASE,
        """
        model.layers.{l}.self_attn.q_proj.base_layer.weight       H,H   attention! 1
        model.layers.{l}.self_attn.q_proj.lora_A.default.weight   32,H  ? 1
        model.layers.{l}.self_attn.q_proj.lora_B.default.weight   H,32  ? 1
        v_head.summary.weight                                     1,H   ? 1
        score.weight                                              2,H   ? 1
        reward_head.weight                                        32,H  ? 1
        classifier.dense.weight                                   H,H   ? 1
        medusa_head.0.0.linear.weight                             H,H   ? 1
        medusa_head.0.1.weight                                    V,H   ? 1
        """,
    ),
    "hyena and long short-term memory": (
        BASE,
        """
        backbone.blocks.{l}.filter.short_filter_weight           HHH,1,3  ? -
        backbone.blocks.{l}.filter.poles                         N,8,1,2  ? -
        backbone.blocks.{l}.projections.weight                   HHH,H    ? 1
        backbone.blocks.{l}.mlstm_layer.igate_preact.weight      N,H      ssm_small 1
        backbone.blocks.{l}.mlstm_layer.fgate_preact.weight      N,H      ssm_small 1
        backbone.blocks.{l}.mlstm_layer.ogate_preact.weight      H,H      ? 1
        backbone.blocks.{l}.ffn.proj_up_gate.weight              I,H      mlp! 1
        backbone.unembed.weight                                  V,H      ? 1
        """,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_family(families, family):
    config, text = FAMILIES[family]
    assert not families.misjudged(config, text)


def test_no_protected_role_is_quantized_without_a_config_either(families):
    for family, (_, text) in FAMILIES.items():
        assert not families.unprotected(text), family
