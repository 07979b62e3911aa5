"""Every MXFP4 layout written by hand, from nibbles, without the code under test."""

import numpy as np

EXPERTS, HIDDEN, INTER, LAYERS = 4, 64, 96, 2
SHAPES = {"gate_proj": (INTER, HIDDEN), "up_proj": (INTER, HIDDEN), "down_proj": (HIDDEN, INTER)}
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)


def random_codes(seed=0):
    """{(layer, expert, projection): (nibbles [N, K], scale bytes [N, K/32])}, code 8 included."""
    rng = np.random.default_rng(seed)
    found = {}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for name, (rows, columns) in SHAPES.items():
                nibbles = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
                nibbles[0, :7] = 8
                scales = rng.integers(0, 253, (rows, columns // 32), dtype=np.uint8)
                found[layer, expert, name] = nibbles, scales
    return found


def pack(nibbles):
    """Two codes a byte, the even element in the low nibble."""
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def gguf(nibbles, scales):
    """Scale byte, then element j low and element j + 16 high."""
    blocks = nibbles.reshape(*scales.shape, 32)
    payload = blocks[..., :16] | (blocks[..., 16:] << 4)
    whole = np.concatenate([scales[..., None], payload], axis=-1)
    return whole.reshape(scales.shape[0], -1)


def values(nibbles, scales):
    magnitude = VALUES[nibbles & 7] * np.repeat(2.0 ** (scales.astype(float) - 127), 32, axis=-1)
    return np.where(nibbles & 8, -magnitude, magnitude).astype(np.float32)


def per_expert(codes_leaf, dtype, scales_leaf, scale_dtype):
    def write(codes, model):
        tensors = {}
        for (layer, expert, name), (nibbles, scales) in codes.items():
            base = f"model.layers.{layer}.mlp.experts.{expert}.{name}"
            tensors[base + codes_leaf] = (dtype, pack(nibbles))
            tensors[base + scales_leaf] = (scale_dtype, scales)
        return tensors

    return write


def gguf_blocks(codes, model):
    return {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight_gguf": ("U8", gguf(*pair))
        for (layer, expert, name), pair in codes.items()
    }


def stacked(codes, layer, name, part):
    return np.stack([codes[layer, expert, name][part] for expert in range(EXPERTS)])


def gpt_oss(codes, model):
    tensors = {}
    for layer in range(LAYERS):
        base = f"model.layers.{layer}.mlp.experts."
        for leaf in ("gate_up_proj", "down_proj"):
            arrays = []
            for part in (0, 1):
                if leaf == "down_proj":
                    both = stacked(codes, layer, "down_proj", part)
                else:
                    pair = [stacked(codes, layer, n, part) for n in ("gate_proj", "up_proj")]
                    if model == "gpt_oss":  # rows of gate and up in turn
                        both = np.stack(pair, axis=2).reshape(EXPERTS, 2 * INTER, -1)
                    else:
                        both = np.concatenate(pair, axis=1)
                arrays.append(both)
            blocks = pack(arrays[0]).reshape(*arrays[1].shape, 16)
            tensors[base + leaf + "_blocks"] = ("U8", blocks)
            tensors[base + leaf + "_scales"] = ("U8", arrays[1])
    return tensors


def mlx(codes, model):
    tensors = {}
    for layer in range(LAYERS):
        for name in SHAPES:
            base = f"model.layers.{layer}.mlp.switch_mlp.{name}."
            packed = np.ascontiguousarray(pack(stacked(codes, layer, name, 0)))
            tensors[base + "weight"] = ("U32", packed.view("<u4"))
            tensors[base + "scales"] = ("U8", stacked(codes, layer, name, 1))
    return tensors


def bf16(codes, model):
    return {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight": (
            "BF16",
            (values(*pair).view(np.uint32) >> 16).astype(np.uint16),
        )
        for (layer, expert, name), pair in codes.items()
    }


WRITERS = {
    "compressed-tensors": per_expert(".weight_packed", "U8", ".weight_scale", "U8"),
    "mxfp4": per_expert(".weight", "U8", ".weight_scale", "U8"),
    "quark": per_expert(".weight", "U8", ".weight_scale", "U8"),
    "mimo": per_expert(".weight", "U8", ".weight_scale", "U8"),
    "deepseek-v4": per_expert(".weight", "I8", ".scale", "F8_E8M0"),
    "ling": per_expert(".weight", "I8", ".weight_scale_inv", "F8_E8M0"),
    "gpt-oss": gpt_oss,
    "mlx": mlx,
    "gguf-blocks": gguf_blocks,
    "bf16": bf16,
}

CONFIGS = {
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    "mxfp4": {"quant_method": "mxfp4"},
    "quark": {"quant_method": "quark", "export": {"kv_cache_group": []}},
    "mimo": {"quant_method": "fp8", "store_dtype": "mxfp4", "mxfp4_block_size": 32},
    "deepseek-v4": {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
    "ling": {"quant_method": "fp8", "routed_experts_quant_method": "mxfp4"},
    "gpt-oss": {"quant_method": "mxfp4"},
    "mlx": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "gguf-blocks": {"quant_method": "gguf-blocks"},
}


def kept_tensors(builder, seed=1):
    """What no layout touches."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return "BF16", builder.bf16(rng.normal(0, 0.05, shape))

    tensors = {"model.embed_tokens.weight": normal(128, HIDDEN)}
    for layer in range(LAYERS):
        base = f"model.layers.{layer}."
        tensors[base + "input_layernorm.weight"] = normal(HIDDEN)
        tensors[base + "mlp.gate.weight"] = normal(EXPERTS, HIDDEN)
        for name in "qkvo":
            tensors[f"{base}self_attn.{name}_proj.weight"] = normal(HIDDEN, HIDDEN)
    tensors["lm_head.weight"] = normal(128, HIDDEN)
    return tensors


def config_of(builder, layout, model="qwen3_moe"):
    found = builder.moe_config(moe_intermediate_size=INTER, model_type=model)
    if model == "gpt_oss":
        found.update(intermediate_size=INTER, num_local_experts=EXPERTS)
    if layout in CONFIGS:
        found["quantization_config"] = CONFIGS[layout]
    if layout == "mlx":
        found["quantization"] = CONFIGS[layout]
    if layout == "deepseek-v4":
        found["expert_dtype"] = "fp4"
    return found


def write_source(builder, folder, layout, codes, model="qwen3_moe", *, kept=None, config=None):
    """Three shards: codes, all other tensors, and every scale away from its codes."""
    tensors = WRITERS[layout](codes, model)
    names = list(tensors)
    scales = [n for n in names if n.endswith(("scale", "scales", "scale_inv"))]
    shards = [
        {name: tensors[name] for name in names if name not in scales},
        kept_tensors(builder) if kept is None else kept,
        {name: tensors[name] for name in reversed(scales)},
    ]
    shards = [shard for shard in shards if shard]
    return builder.write(folder, shards, config or config_of(builder, layout, model))


def as_read(tensors):
    """The form that `builder.read` gives."""
    return {
        name: (dtype, array.shape, np.ascontiguousarray(array).tobytes())
        for name, (dtype, array) in tensors.items()
    }
