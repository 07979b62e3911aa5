"""Inside the gguf environment: decode GGUF blocks of a converted folder, through a real GGUF file.

run_gguf.py FOLDER OUTPUT.npz prints the number of modules.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import json
import sys
from pathlib import Path

import gguf
import numpy as np


def tensors(folder):
    for path in sorted(Path(folder).glob("*.safetensors")):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8 : 8 + length]).items():
            if name.endswith(".weight_gguf"):
                start, end = (8 + length + offset for offset in entry["data_offsets"])
                yield name, np.frombuffer(raw[start:end], np.uint8).reshape(entry["shape"])


folder, output = sys.argv[1:]
blocks = dict(tensors(folder))
kind = gguf.GGMLQuantizationType.MXFP4
file = str(Path(output).with_suffix(".gguf"))
writer = gguf.GGUFWriter(file, "llama")
for name, data in blocks.items():
    writer.add_tensor(name, data, raw_dtype=kind)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
found = {}
for tensor in gguf.GGUFReader(file).tensors:
    assert tensor.tensor_type == kind
    found[tensor.name] = gguf.quants.dequantize(tensor.data, kind)
np.savez(output, **found)
print(json.dumps({"modules": len(found)}))
