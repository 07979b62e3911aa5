"""Inside the mlx environment: load a folder with mlx-lm, and save logits and decoded weights.

run_mlx.py FOLDER OUTPUT.npz TOKENS prints the number of quantized modules.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model

folder, output, tokens = sys.argv[1:]
mx.set_default_device(mx.cpu)
model, _ = load_model(Path(folder))
# The CPU back end multiplies stacked matrices in float32 only; BF16 weights fit into it.
model.set_dtype(mx.float32)
logits = model(mx.array([json.loads(tokens)])).astype(mx.float32)
arrays = {"logits": np.array(logits)}
modules = 0
for name, module in model.named_modules():
    if getattr(module, "mode", None) == "mxfp4":
        weight = mx.dequantize(
            module.weight, module.scales, group_size=module.group_size, bits=4, mode="mxfp4"
        )
        arrays[name] = np.array(weight.astype(mx.float32))
        modules += 1
np.savez(output, **arrays)
print(json.dumps({"modules": modules}))
