"""Architectures outside the measured corpus, written down from their public loaders.

The lines are those of `families` in conftest.py.
"""

import pytest

LAYERS = 3
BASE = {"hidden_size": 128, "num_hidden_layers": LAYERS, "vocab_size": 512}
MOE = {**BASE, "num_experts": 8}

FAMILIES = {
    "mixtral as released by mistral": (
        {"dim": 128, "n_layers": LAYERS, "vocab_size": 512, "moe": {"num_experts": 8}},
        """
        tok_embeddings.weight                        V,H   embedding 1
        layers.{l}.attention.wq.weight               H,H   attention! 1
        layers.{l}.attention.wo.weight               H,H   attention! 1
        layers.{l}.attention_norm.weight             H     norm -
        layers.{l}.feed_forward.gate.weight          E,H   router 1
        layers.{l}.feed_forward.experts.{e}.w1.weight I,H  expert! 1
        layers.{l}.feed_forward.experts.{e}.w2.weight H,I  expert! 1
        layers.{l}.feed_forward.experts.{e}.w3.weight I,H  expert! 1
        norm.weight                                  H     norm -
        output.weight                                V,H   lm_head 1
        """,
    ),
    "mixtral as released by mistral, flattened": (
        {"dim": 128, "n_layers": LAYERS, "vocab_size": 512, "moe": {"num_experts": 8}},
        """
        layers.{l}.attention.wq.weight               H,H   attention! 1
        layers.{l}.block_sparse_moe.gate.weight      E,H   router 1
        layers.{l}.block_sparse_moe.w1               EI,H  expert! 1
        layers.{l}.block_sparse_moe.w2               EI,H  expert! 0
        layers.{l}.block_sparse_moe.w3               EI,H  expert! 1
        """,
    ),
    "dbrx": (
        {
            "d_model": 128,
            "n_layers": LAYERS,
            "vocab_size": 512,
            "ffn_config": {"moe_num_experts": 8, "ffn_hidden_size": 192},
        },
        """
        transformer.wte.weight                                       V,H   embedding 1
        transformer.blocks.{l}.norm_attn_norm.norm_1.weight          H     norm -
        transformer.blocks.{l}.norm_attn_norm.attn.Wqkv.weight       HHH,H attention! 1
        transformer.blocks.{l}.norm_attn_norm.attn.out_proj.weight   H,H   attention! 1
        transformer.blocks.{l}.ffn.router.layer.weight               E,H   router 1
        transformer.blocks.{l}.ffn.experts.mlp.w1                    EI,H  expert! 1
        transformer.blocks.{l}.ffn.experts.mlp.v1                    EI,H  expert! 1
        transformer.blocks.{l}.ffn.experts.mlp.w2                    EI,H  expert! 0
        lm_head.weight                                               V,H   lm_head 1
        """,
    ),
    "arctic": (
        {**BASE, "num_local_experts": 8},
        """
        model.layers.{l}.block_sparse_moe.gate.weight              E,H  router 1
        model.layers.{l}.block_sparse_moe.experts.{e}.w1.weight    I,H  expert! 1
        model.layers.{l}.block_sparse_moe.experts.{e}.w2.weight    H,I  expert! 1
        model.layers.{l}.block_sparse_moe.experts.{e}.w3.weight    I,H  expert! 1
        model.layers.{l}.residual_mlp.w1.weight                    H,H  shared_expert! 1
        model.layers.{l}.residual_mlp.w2.weight                    H,H  shared_expert! 1
        model.layers.{l}.residual_layernorm.weight                 H    norm -
        """,
    ),
    "grok-1": (
        {**BASE, "num_experts": 8},
        """
        model.layers.{l}.attn.q_proj.weight                     H,H  attention! 1
        model.layers.{l}.pre_attn_norm.scale                    H    norm -
        model.layers.{l}.moe_block.gate.weight                  E,H  router 1
        model.layers.{l}.moe_block.experts.{e}.linear.weight    I,H  expert! 1
        model.layers.{l}.moe_block.experts.{e}.linear_v.weight  I,H  expert! 1
        model.layers.{l}.moe_block.experts.{e}.linear_1.weight  H,I  expert! 1
        """,
    ),
    "grok-1, numbered directly": (
        {**BASE, "num_experts": 8},
        """
        transformer.decoder_layer.{l}.multi_head_attention.query.weight    H,H  attention! 1
        transformer.decoder_layer.{l}.router.weight                        E,H  router 1
        transformer.decoder_layer.{l}.moe.{e}.linear.weight                I,H  expert! 1
        transformer.decoder_layer.{l}.moe.{e}.linear_v.weight              I,H  expert! 1
        transformer.decoder_layer.{l}.moe.{e}.linear_1.weight              H,I  expert! 1
        transformer.decoder_layer.{l}.rms_norm.weight                      H    norm -
        """,
    ),
    "grok-2": (
        {**BASE, "num_local_experts": 8},
        """
        model.layers.{l}.block_sparse_moe.gate.weight            E,H  router 1
        model.layers.{l}.block_sparse_moe.experts.{e}.w1.weight  I,H  expert! 1
        model.layers.{l}.block_sparse_moe.experts.{e}.w2.weight  H,I  expert! 1
        model.layers.{l}.block_sparse_moe.experts.{e}.w3.weight  I,H  expert! 1
        model.layers.{l}.mlp.gate_proj.weight                    I,H  mlp! 1
        model.layers.{l}.mlp.up_proj.weight                      I,H  mlp! 1
        model.layers.{l}.mlp.down_proj.weight                    H,I  mlp! 1
        model.layers.{l}.post_moe_norm.weight                    H    norm -
        """,
    ),
    "smallthinker": (
        {**BASE, "moe_num_primary_experts": 8},
        """
        model.layers.{l}.block_sparse_moe.primary_router.weight    E,H  router 1
        model.layers.{l}.block_sparse_moe.experts.{e}.gate.weight  I,H  expert! 1
        model.layers.{l}.block_sparse_moe.experts.{e}.up.weight    I,H  expert! 1
        model.layers.{l}.block_sparse_moe.experts.{e}.down.weight  H,I  expert! 1
        """,
    ),
    "step-3": (
        {**BASE, "moe_num_experts": 8},
        """
        model.layers.{l}.moe.gate.weight                 E,H    router 1
        model.layers.{l}.moe.router_bias                 E      router_bias -
        model.layers.{l}.moe.gate_proj.weight            E,I,H  expert! 2
        model.layers.{l}.moe.up_proj.weight              E,I,H  expert! 2
        model.layers.{l}.moe.down_proj.weight            E,H,I  expert! 2
        model.layers.{l}.share_expert.gate_proj.weight   S,H    shared_expert! 1
        model.layers.{l}.share_expert.up_proj.weight     S,H    shared_expert! 1
        model.layers.{l}.share_expert.down_proj.weight   H,S    shared_expert! 1
        model.layers.{l}.self_attn.wq.weight             H,D    attention! 1
        model.layers.{l}.self_attn.inter_norm.weight     D      norm -
        """,
    ),
    "ernie 4.5 vision-language": (
        {**BASE, "moe_num_experts": [8, 8], "vision_config": {"hidden_size": 96}},
        """
        model.layers.{l}.mlp.gate.weight                                    H,E  router 0
        model.layers.{l}.mlp.gate.weight_1                                  H,E  router 0
        model.layers.{l}.mlp.moe_statics.e_score_correction_bias            N,E  router_bias -
        model.layers.{l}.mlp.experts.{e}.gate_proj.weight                   I,H  expert! 1
        model.layers.{l}.mlp.experts.{e}.up_proj.weight                     I,H  expert! 1
        model.layers.{l}.mlp.experts.{e}.down_proj.weight                   H,I  expert! 1
        model.layers.{l}.mlp.shared_experts.down_proj.weight                H,S  shared_expert! 1
        model.mtp_block.0.mlp.gate_proj.weight                              I,H  mtp 1
        model.mtp_linear_proj.0.weight                                      H,HH mtp 1
        model.resampler_model.spatial_linear.0.weight                       H,W  vision_projector 1
        vision_model.blocks.{l}.attn.qkv.weight                             WWW,W vision 1
        vision_model.blocks.{l}.mlp.fc1.weight                              HH,W vision 1
        """,
    ),
    "qwen3-vl-moe as released": (
        {"text_config": {**MOE, "model_type": "qwen3_vl_moe_text"}, "vision_config": {}},
        """
        model.language_model.layers.{l}.mlp.gate.weight            E,H     router 1
        model.language_model.layers.{l}.mlp.experts.gate_up_proj   E,H,II  expert! 1
        model.language_model.layers.{l}.mlp.experts.down_proj      E,I,H   expert! 1
        model.visual.blocks.{l}.mlp.linear_fc1.weight              HH,W    vision 1
        model.visual.merger.linear_fc2.weight                      H,HH    vision_projector 1
        """,
    ),
    "qwen3-vl-moe saved again": (
        {"text_config": {**MOE, "model_type": "qwen3_vl_moe_text"}, "vision_config": {}},
        """
        model.language_model.layers.{l}.mlp.gate.weight            E,H     router 1
        model.language_model.layers.{l}.mlp.experts.gate_up_proj   E,II,H  expert! 2
        model.language_model.layers.{l}.mlp.experts.down_proj      E,H,I   expert! 2
        """,
    ),
    "aria": (
        {"text_config": {**BASE, "moe_num_experts": 8}},
        """
        language_model.model.layers.{l}.mlp.router.weight                    E,H     router 1
        language_model.model.layers.{l}.mlp.experts.fc1.weight               E,H,II  expert! 1
        language_model.model.layers.{l}.mlp.experts.fc2.weight               E,I,H   expert! 1
        language_model.model.layers.{l}.mlp.shared_experts.gate_proj.weight S,H shared_expert! 1
        multi_modal_projector.query                                          E,W     ? -
        multi_modal_projector.cross_attn.q_proj.weight W,W vision_projector 1
        """,
    ),
    "openmoe": (
        {**BASE, "num_experts": 8, "model_type": "llama"},
        """
        model.layers.{l}.mlp.gate_weight            E,H    router 1
        model.layers.{l}.mlp.experts.wi_gate        E,H,I  expert! 1
        model.layers.{l}.mlp.experts.wi_up          E,H,I  expert! 1
        model.layers.{l}.mlp.experts.wo             E,I,H  expert! 1
        model.layers.{l}.extra_mlp.gate_proj.weight I,H    shared_expert! 1
        model.layers.{l}.pre_extra_mlp_layernorm.weight H  norm -
        """,
    ),
    "llama-moe": (
        {**BASE, "num_experts": 8},
        """
        model.layers.{l}.mlp.gate.gate_network.0.weight             E,H  router 1
        model.layers.{l}.mlp.gate.gate_network.2.weight             E,E  router 1
        model.layers.{l}.mlp.gate.weight_noise.weight               E,H  router 1
        model.layers.{l}.mlp.calculator.experts.weight_gate.{e}     I,H  expert! 1
        model.layers.{l}.mlp.calculator.experts.weight_up.{e}       I,H  expert! 1
        model.layers.{l}.mlp.calculator.experts.weight_down.{e}     H,I  expert! 1
        """,
    ),
    "moe-llava": (
        {**BASE, "moe": {"num_experts": [8]}},
        """
        layers.{l}.mlp.deepspeed_moe.gate.wg.weight E,H router 1
        layers.{l}.mlp.deepspeed_moe.experts.deepspeed_experts.{e}.gate_proj.weight I,H expert! 1
        layers.{l}.mlp.deepspeed_moe.experts.deepspeed_experts.{e}.up_proj.weight I,H expert! 1
        layers.{l}.mlp.deepspeed_moe.experts.deepspeed_experts.{e}.down_proj.weight H,I expert! 1
        model.image_tower.image_tower.encoder.layers.{l}.mlp.fc1.weight HH,W vision 1
        model.mm_projector.image_spatial_proj.0.weight H,W vision_projector 1
        """,
    ),
    "nomic-embed mixture": (
        {"n_embd": 128, "n_layer": LAYERS, "vocab_size": 512, "num_experts": 8},
        """
        embeddings.word_embeddings.weight                 V,H    embedding 1
        emb_ln.weight                                     H      norm -
        encoder.layers.{l}.attn.Wqkv.weight               HHH,H  attention! 1
        encoder.layers.{l}.mlp.router.layer.weight        E,H    router 1
        encoder.layers.{l}.mlp.experts.mlp.w1             EI,H   expert! 1
        encoder.layers.{l}.mlp.experts.mlp.w2             EI,H   expert! 0
        encoder.layers.{l}.mlp.experts.bias               H      bias -
        encoder.layers.{l}.norm1.weight                   H      norm -
        """,
    ),
    "grove": (
        MOE,
        """
        model.layers.{l}.mlp.gate.weight                         E,H  router 1
        model.layers.{l}.mlp.experts.{e}.gate_proj.weight        I,H  expert! 1
        model.layers.{l}.mlp.experts.{e}.down_proj.weight        H,I  expert! 1
        model.layers.{l}.mlp.chunk_experts.0.gate_proj.weight    S,H  shared_expert! 1
        model.layers.{l}.mlp.chunk_experts.0.down_proj.weight    H,S  shared_expert! 1
        """,
    ),
    "bailing": (
        MOE,
        """
        model.word_embeddings.weight                             V,H   embedding 1
        model.layers.{l}.attention.query_key_value.weight        HH,H  attention! 1
        model.layers.{l}.attention.dense.weight                  H,H   attention! 1
        model.layers.{l}.attention.query_layernorm.weight        D     norm -
        model.layers.{l}.mlp.gate.weight                         E,H   router 1
        model.layers.{l}.mlp.gate.expert_bias                    E     router_bias -
        model.layers.{l}.mlp.experts.{e}.up_proj.weight          I,H   expert! 1
        model.layers.{l}.mlp.shared_experts.up_proj.weight       I,H   shared_expert! 1
        """,
    ),
    "yuan": (
        {**BASE, "moe_config": {"moe_num_experts": 8}},
        """
        model.layers.{l}.self_attn.lf_gate.conv1.weight            H,H,2,1  conv -
        model.layers.{l}.self_attn.lf_gate.output_layernorm.weight H        norm -
        model.layers.{l}.mlp.gate.query_key_value.weight           ?24,H    router 1
        model.layers.{l}.mlp.experts.{e}.w1.weight                 II,H     expert! 1
        model.layers.{l}.mlp.experts.{e}.w2.weight                 H,I      expert! 1
        """,
    ),
    "minimax text": (
        {**BASE, "num_local_experts": 8},
        """
        model.layers.{l}.block_sparse_moe.gate.weight              E,H    router 1
        model.layers.{l}.block_sparse_moe.experts.{e}.w1.weight    I,H    expert! 1
        model.layers.{l}.block_sparse_moe.experts.{e}.w2.weight    H,I    expert! 1
        model.layers.{l}.self_attn.qkv_proj.weight                 HHH,H  attention! 1
        model.layers.{l}.self_attn.output_gate.weight              H,H    attention_gate 1
        model.layers.{l}.self_attn.norm.weight                     H      norm -
        model.layers.{l}.shared_mlp.gate_proj.weight               S,H    shared_expert! 1
        model.layers.{l}.coefficient.weight                        ?1,H   ? 1
        """,
    ),
    "jetmoe": (
        {**BASE, "num_local_experts": 8},
        """
        model.layers.{l}.mlp.router.layer.weight                       E,H     router 1
        model.layers.{l}.mlp.input_linear.weight                       E,II,H  expert! 2
        model.layers.{l}.mlp.output_linear.weight                      E,H,I   expert! 2
        model.layers.{l}.self_attention.experts.router.layer.weight    E,H     router 1
        model.layers.{l}.self_attention.experts.input_linear.weight    E,H,H   expert! 2
        model.layers.{l}.self_attention.kv_proj.weight                 H,H     attention! 1
        """,
    ),
    "switch transformers": (
        {
            "d_model": 128,
            "num_layers": LAYERS,
            "vocab_size": 512,
            "num_experts": 8,
            "is_encoder_decoder": True,
        },
        """
        encoder.block.{l}.layer.0.SelfAttention.q.weight                H,H  attention! 1
        encoder.block.{l}.layer.1.mlp.router.classifier.weight          E,H  router 1
        encoder.block.{l}.layer.1.mlp.experts.expert_{e}.wi.weight      I,H  expert! 1
        encoder.block.{l}.layer.1.mlp.experts.expert_{e}.wo.weight      H,I  expert! 1
        decoder.block.{l}.layer.1.EncDecAttention.v.weight              H,H  attention! 1
        """,
    ),
    "falcon-h1": (
        BASE,
        """
        model.layers.{l}.mamba.in_proj.weight       ?584,H  attention 1
        model.layers.{l}.mamba.out_proj.weight      H,H     attention 1
        model.layers.{l}.mamba.conv1d.weight        I,1,4   conv -
        model.layers.{l}.mamba.dt_bias              E       ssm_small -
        model.layers.{l}.self_attn.q_proj.weight    H,H     attention! 1
        model.layers.{l}.feed_forward.up_proj.weight I,H    mlp! 1
        """,
    ),
    "zamba2": (
        BASE,
        """
        model.layers.{l}.mamba.in_proj.weight                                   ?584,H  attention 1
        model.layers.{l}.mamba_decoder.mamba.in_proj.weight                     ?584,H  attention 1
        model.layers.{l}.mamba_decoder.mamba.A_log                              E       ssm_small -
        model.layers.{l}.linear.weight                                          H,H     ? 1
        model.layers.{l}.shared_transformer.self_attn.q_proj.weight             HH,HH   attention! 1
        model.layers.{l}.shared_transformer.feed_forward.gate_up_proj.weight    II,H    mlp! 1
        model.layers.{l}.shared_transformer.feed_forward.down_proj.weight       H,I     mlp! 1
        """,
    ),
    "recurrentgemma": (
        BASE,
        """
        model.layers.{l}.temporal_block.linear_x.weight              H,H    attention 1
        model.layers.{l}.temporal_block.linear_out.weight            H,H    attention 1
        model.layers.{l}.temporal_block.conv_1d.weight               H,1,4  conv -
        model.layers.{l}.temporal_block.rg_lru.input_gate_weight     E,16,16 ssm_small -
        model.layers.{l}.temporal_block.rg_lru.recurrent_param       H      ssm_small -
        model.layers.{l}.mlp_block.gate_proj.weight                  I,H    mlp! 1
        model.layers.{l}.channel_pre_norm.weight                     H      norm -
        """,
    ),
    "rwkv": (
        BASE,
        """
        rwkv.embeddings.weight                                V,H    embedding 1
        rwkv.blocks.{l}.attention.time_decay                  H      ssm_small -
        rwkv.blocks.{l}.attention.time_mix_key                1,1,H  ssm_small -
        rwkv.blocks.{l}.attention.receptance.weight           H,H    ? 1
        rwkv.blocks.{l}.ln1.weight                            H      norm -
        head.weight                                           V,H    lm_head 1
        """,
    ),
    "mamba in the original naming": (
        {"d_model": 128, "n_layer": LAYERS, "vocab_size": 512},
        """
        backbone.embedding.weight                   V,H    embedding 1
        backbone.layers.{l}.mixer.in_proj.weight    II,H   attention 1
        backbone.layers.{l}.mixer.x_proj.weight     S,I    ssm_small 1
        backbone.layers.{l}.mixer.dt_proj.weight    I,32   ssm_small 1
        backbone.layers.{l}.mixer.dt_proj.bias      I      ssm_small -
        backbone.layers.{l}.mixer.A_log             I,32   ssm_small -
        backbone.layers.{l}.mixer.conv1d.weight     I,1,4  conv -
        """,
    ),
    "baichuan": (
        BASE,
        """
        model.layers.{l}.self_attn.W_pack.weight   HHH,H  attention! 1
        model.layers.{l}.self_attn.o_proj.weight   H,H    attention! 1
        model.layers.{l}.mlp.gate_proj.weight      I,H    mlp! 1
        """,
    ),
    "chatglm": (
        {"hidden_size": 128, "num_layers": LAYERS, "padded_vocab_size": 512},
        """
        transformer.embedding.word_embeddings.weight                            V,H    embedding 1
        transformer.encoder.layers.{l}.self_attention.query_key_value.weight    HHH,H  attention! 1
        transformer.encoder.layers.{l}.self_attention.dense.weight              H,H    attention! 1
        transformer.encoder.layers.{l}.mlp.dense_h_to_4h.weight                 II,H   mlp! 1
        transformer.encoder.layers.{l}.mlp.dense_4h_to_h.weight                 H,I    mlp! 1
        transformer.output_layer.weight                                         V,H    lm_head 1
        """,
    ),
    "qwen 1": (
        BASE,
        """
        transformer.h.{l}.attn.c_attn.weight   HHH,H  attention! 1
        transformer.h.{l}.attn.c_attn.bias     HHH    bias -
        transformer.h.{l}.attn.c_proj.weight   H,H    attention! 1
        transformer.h.{l}.mlp.w1.weight        I,H    mlp! 1
        transformer.h.{l}.mlp.w2.weight        I,H    mlp! 1
        transformer.h.{l}.mlp.c_proj.weight    H,I    mlp! 1
        """,
    ),
    "starcoder": (
        {"n_embd": 128, "n_layer": LAYERS, "vocab_size": 512},
        """
        transformer.h.{l}.attn.c_attn.weight   I,H    attention! 1
        transformer.h.{l}.attn.c_attn.bias     I      bias -
        transformer.h.{l}.attn.c_proj.weight   H,H    attention! 1
        transformer.h.{l}.mlp.c_fc.weight      I,H    mlp! 1
        transformer.h.{l}.mlp.c_fc.bias        I      bias -
        """,
    ),
    "gpt-neox": (
        BASE,
        """
        gpt_neox.embed_in.weight                               V,H    embedding 1
        gpt_neox.layers.{l}.attention.query_key_value.weight   HHH,H  attention! 1
        gpt_neox.layers.{l}.attention.dense.weight             H,H    attention! 1
        gpt_neox.layers.{l}.mlp.dense_h_to_4h.weight           I,H    mlp! 1
        gpt_neox.final_layer_norm.weight                       H      norm -
        embed_out.weight                                       V,H    lm_head 1
        """,
    ),
    "gpt-j": (
        {"n_embd": 128, "n_layer": LAYERS, "vocab_size": 512},
        """
        transformer.h.{l}.attn.q_proj.weight   H,H  attention! 1
        transformer.h.{l}.mlp.fc_in.weight     I,H  mlp! 1
        transformer.h.{l}.mlp.fc_out.weight    H,I  mlp! 1
        """,
    ),
    "opt": (
        BASE,
        """
        model.decoder.embed_positions.weight            V,H  embedding 1
        model.decoder.project_in.weight                 H,D  ? 1
        model.decoder.layers.{l}.self_attn.k_proj.weight H,H attention! 1
        model.decoder.layers.{l}.fc1.weight             I,H  mlp! 1
        model.decoder.layers.{l}.fc2.weight             H,I  mlp! 1
        """,
    ),
    "bloom": (
        {"n_embed": 128, "n_layer": LAYERS, "vocab_size": 512},
        """
        word_embeddings.weight                        V,H    embedding 1
        word_embeddings_layernorm.weight              H      norm -
        h.{l}.self_attention.query_key_value.weight   HHH,H  attention! 1
        h.{l}.mlp.dense_4h_to_h.weight                H,I    mlp! 1
        """,
    ),
    "mpt": (
        {"d_model": 128, "n_layers": LAYERS, "vocab_size": 512},
        """
        transformer.blocks.{l}.attn.Wqkv.weight      HHH,H  attention! 1
        transformer.blocks.{l}.attn.out_proj.weight  H,H    attention! 1
        transformer.blocks.{l}.ffn.up_proj.weight    I,H    mlp! 1
        transformer.blocks.{l}.norm_1.weight         H      norm -
        """,
    ),
    "olmo 1": (
        {"d_model": 128, "n_layers": LAYERS, "vocab_size": 512},
        """
        model.transformer.wte.weight                V,H    embedding 1
        model.transformer.blocks.{l}.att_proj.weight HHH,H attention! 1
        model.transformer.blocks.{l}.attn_out.weight H,H   attention! 1
        model.transformer.blocks.{l}.ff_proj.weight II,H   mlp! 1
        model.transformer.blocks.{l}.ff_out.weight  H,I    mlp! 1
        model.transformer.ff_out.weight             V,H    ? 1
        """,
    ),
    "bert": (
        BASE,
        """
        bert.embeddings.word_embeddings.weight                V,H  embedding 1
        bert.embeddings.token_type_embeddings.weight          N,H  embedding 1
        bert.embeddings.LayerNorm.weight                      H    norm -
        bert.encoder.layer.{l}.attention.self.query.weight    H,H  attention! 1
        bert.encoder.layer.{l}.attention.output.dense.weight  H,H  attention! 1
        bert.encoder.layer.{l}.attention.output.LayerNorm.weight H norm -
        bert.encoder.layer.{l}.intermediate.dense.weight      I,H  mlp! 1
        bert.encoder.layer.{l}.output.dense.weight            H,I  mlp! 1
        bert.pooler.dense.weight                              H,H  ? 1
        cls.predictions.decoder.weight                        V,H  lm_head 1
        """,
    ),
    "qwen2.5-omni": (
        {
            "thinker_config": {"text_config": BASE, "audio_config": {}, "vision_config": {}},
            "talker_config": {"hidden_size": 64},
        },
        """
        thinker.model.layers.{l}.self_attn.q_proj.weight    H,H  attention! 1
        thinker.model.layers.{l}.mlp.up_proj.weight         I,H  mlp! 1
        thinker.audio_tower.layers.{l}.self_attn.q_proj.weight  W,W  vision 1
        thinker.audio_tower.layers.{l}.fc1.weight           HH,W vision 1
        thinker.visual.blocks.{l}.attn.q.weight             W,W  vision 1
        thinker.lm_head.weight                              V,H  lm_head 1
        talker.model.layers.{l}.mlp.up_proj.weight          I,D  other_linear 1
        talker.codec_head.weight                            V,D  lm_head 1
        token2wav.code2wav_dit_model.transformer_blocks.{l}.attn.to_q.weight  W,W  other_linear 1
        """,
    ),
    "internvl": (
        {"llm_config": BASE, "vision_config": {"hidden_size": 96}},
        """
        language_model.model.layers.{l}.attention.wqkv.weight     HH,H   attention! 1
        language_model.model.layers.{l}.feed_forward.w1.weight    I,H    mlp! 1
        language_model.model.tok_embeddings.weight                V,H    embedding 1
        language_model.output.weight                              V,H    lm_head 1
        vision_model.encoder.layers.{l}.attn.qkv.weight           WWW,W  vision 1
        vision_model.encoder.layers.{l}.mlp.fc1.weight            HH,W   vision 1
        mlp1.1.weight                                             H,HH   vision_projector 1
        """,
    ),
    "deepseek-ocr": (
        {"language_config": {**BASE, "n_routed_experts": 8}},
        """
        model.layers.{l}.mlp.experts.{e}.up_proj.weight                        I,H  expert! 1
        model.layers.{l}.mlp.gate.weight                                       E,H  router 1
        model.sam_model.blocks.{l}.attn.qkv.weight                             WWW,W vision 1
        model.vision_model.transformer.layers.{l}.self_attn.qkv_proj.weight    WWW,W vision 1
        model.projector.layers.weight H,W vision_projector 1
        model.image_newline                                                    H    vision -
        """,
    ),
    "an encoder under a neutral name": (
        {"language_config": {**BASE, "n_routed_experts": 8}},
        """
        model.layers.{l}.mlp.experts.{e}.up_proj.weight                I,H  expert! 1
        model.layers.{l}.mlp.gate.weight                               E,H  router 1
        model.layers.{l}.input_layernorm.weight                        H    norm -
        model.qwen2_model.model.model.layers.{l}.mlp.up_proj.weight    ?416,W vision 1
        model.qwen2_model.model.model.layers.{l}.self_attn.q_proj.weight W,W vision 1
        model.qwen2_model.model.model.layers.{l}.input_layernorm.weight W   vision -
        """,
    ),
    "minicpm-o": (
        BASE,
        """
        llm.model.layers.{l}.self_attn.q_proj.weight       H,H  attention! 1
        llm.lm_head.weight                                 V,H  lm_head 1
        vpm.encoder.layers.{l}.self_attn.q_proj.weight     W,W  vision 1
        apm.layers.{l}.fc1.weight                          HH,W vision 1
        resampler.kv_proj.weight                           H,W  vision_projector 1
        tts.model.layers.{l}.self_attn.q_proj.weight       D,D  other_linear 1
        """,
    ),
    "phi-4 multimodal": (
        BASE,
        """
        model.layers.{l}.self_attn.qkv_proj.base_layer.weight        HHH,H  attention! 1
        model.layers.{l}.self_attn.qkv_proj.lora_A.vision.weight     64,H   other_linear 1
        model.layers.{l}.mlp.gate_up_proj.base_layer.weight          II,H   mlp! 1
        model.layers.{l}.mlp.gate_up_proj.lora_B.speech.weight       II,64  other_linear 1
        model.embed_tokens_extend.image_embed.img_processor.layers.{l}.fc1.weight HH,W vision 1
        """,
    ),
    "cohere": (
        BASE,
        """
        model.layers.{l}.self_attn.q_norm.weight   N,32  norm -
        model.layers.{l}.self_attn.q_proj.weight   H,H   attention! 1
        model.layers.{l}.mlp.gate_proj.weight      I,H   mlp! 1
        """,
    ),
    "nemotron-nas": (
        BASE,
        """
        model.layers.0.self_attn.linear_attn.weight   H,H  ? 1
        model.layers.1.self_attn.q_proj.weight        H,H  attention! 1
        model.layers.1.mlp.linear_mlp.weight          H,H  ? 1
        model.layers.2.mlp.gate_proj.weight           S,H  mlp! 1
        """,
    ),
    "eagle draft": (
        {**BASE, "num_hidden_layers": 1},
        """
        midlayer.self_attn.q_proj.weight   H,HH  mtp 1
        midlayer.hidden_norm.weight        H     mtp -
        fc.weight                          H,HHH ? 1
        """,
    ),
    "inkling as released": (
        {"text_config": {**BASE, "n_routed_experts": 8, "n_shared_experts": 2}},
        """
        model.llm.embed.weight                                     V,H     embedding 1
        model.llm.embed_norm.weight                                H       norm -
        model.llm.unembed.weight                                   V,H     lm_head 1
        model.llm.layers.{l}.attn.wq_du.weight                     H,H     attention! 1
        model.llm.layers.{l}.attn.wk_dv.weight                     D,H     attention! 1
        model.llm.layers.{l}.attn.wo_ud.weight                     H,H     attention! 1
        model.llm.layers.{l}.attn.wr_du.weight                     D,H     ? 1
        model.llm.layers.{l}.attn.rel_logits_proj.proj             16,I    ? -
        model.llm.layers.{l}.attn.k_sconv.weight                   D,1,4   conv -
        model.llm.layers.{l}.mlp.gate.weight                       ?10,H   router 1
        model.llm.layers.{l}.mlp.gate.bias                         E       router_bias -
        model.llm.layers.{l}.mlp.gate.global_scale                 1       router_bias -
        model.llm.layers.{l}.mlp.experts.w13_weight                E,II,H  expert! 2
        model.llm.layers.{l}.mlp.experts.w2_weight                 E,H,I   expert! 2
        model.llm.layers.{l}.mlp.shared_experts.shared_w13_weight  2,II,H  shared_expert! 2
        model.llm.layers.{l}.mlp.shared_experts.shared_w2_weight   2,H,I   shared_expert! 2
        model.audio.encoder.weight                                 V,H     vision -
        """,
    ),
    "experts stored by megatron's names": (
        MOE,
        """
        decoder.layers.{l}.self_attention.linear_qkv.weight                    HHH,H  attention! 1
        decoder.layers.{l}.self_attention.linear_proj.weight                   H,H    attention! 1
        decoder.layers.{l}.mlp.router.weight                                   E,H    router 1
        decoder.layers.{l}.mlp.experts.local_experts.{e}.linear_fc1.weight     II,H   expert! 1
        decoder.layers.{l}.mlp.experts.local_experts.{e}.linear_fc2.weight     H,I    expert! 1
        """,
    ),
    "experts switched in one tensor": (
        MOE,
        """
        model.layers.{l}.mlp.gate.weight                    E,H    router 1
        model.layers.{l}.mlp.switch_mlp.gate_proj.weight    E,I,H  expert! 2
        model.layers.{l}.mlp.switch_mlp.up_proj.weight      E,I,H  expert! 2
        model.layers.{l}.mlp.switch_mlp.down_proj.weight    E,H,I  expert! 2
        """,
    ),
    "mistral native with latent attention": (
        {"dim": 128, "n_layers": LAYERS, "vocab_size": 512, "moe": {"num_experts": 8}},
        """
        layers.{l}.attention.wkv_a_with_mqa.weight   S,H  attention! 1
        layers.{l}.attention.wkv_b.weight            H,D  attention! 1
        layers.{l}.attention.indexer.wq_b.weight     H,S  indexer 1
        layers.{l}.gate.weight                       E,H  router 1
        layers.{l}.experts.{e}.w1.weight             I,H  expert! 1
        layers.{l}.experts.{e}.w2.weight             H,I  expert! 1
        layers.{l}.shared_experts.w1.weight          S,H  shared_expert! 1
        """,
    ),
    "gates of several shared experts": (
        MOE,
        """
        model.layers.{l}.mlp.shared_experts.gate.weight       N,H  ? 1
        model.layers.{l}.mlp.shared_experts.up_proj.weight    S,H  shared_expert! 1
        model.layers.{l}.mlp.experts.{e}.up_proj.weight       I,H  expert! 1
        model.layers.{l}.mlp.gate.weight                      E,H  router 1
        """,
    ),
    "plamo 2": (
        BASE,
        """
        model.layers.layers.{l}.mixer.in_proj.weight          HH,H   attention 1
        model.layers.layers.{l}.mixer.bcdt_proj.weight        D,H    ssm_small 1
        model.layers.layers.{l}.mixer.dt_proj.weight          E,D    ssm_small 1
        model.layers.layers.{l}.mixer.conv1d.weight           H,1,4  conv -
        model.layers.layers.{l}.mixer.A_log                   E      ssm_small -
        model.layers.layers.{l}.mlp.gate_up_proj.weight       II,H   mlp! 1
        model.layers.layers.{l}.pre_mixer_norm.weight         H      norm -
        """,
    ),
    "sequence models for speech": (
        {**BASE, "encoder_layers": LAYERS},
        """
        model.layers.{l}.self_attn.q_proj.weight      H,H  attention! 1
        depth_decoder.layers.{l}.mlp.fc1.weight       I,D  other_linear 1
        audio_tokenizer.decoder.blocks.{l}.attn.q_proj.weight W,W vision 1
        codec_model.encoder.layers.0.conv.weight      D,1,4 ? -
        """,
    ),
    "gemma 3n": (
        {"text_config": BASE},
        """
        model.language_model.layers.{l}.altup.prediction_coefs.weight        16,N  other_linear 1
        model.language_model.layers.{l}.altup.modality_router.weight         N,H   other_linear 1
        model.language_model.layers.{l}.laurel.linear_left.weight            64,H  other_linear 1
        model.language_model.layers.{l}.per_layer_projection.weight          H,32  other_linear 1
        model.language_model.embed_tokens_per_layer.weight                   V,96  embedding 1
        model.language_model.layers.{l}.mlp.up_proj.weight                   I,H   mlp! 1
        """,
    ),
    "a predictor that only the layer count gives away": (
        {**MOE, "num_nextn_predict_layers": 1},
        """
        model.layers.{l}.mlp.experts.{e}.up_proj.weight   I,H  expert! 1
        model.layers.{l}.mlp.gate.weight                  E,H  router 1
        model.layers.3.mlp.experts.{e}.up_proj.weight     I,H  mtp 1
        model.layers.3.self_attn.q_proj.weight            H,H  mtp 1
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
